"""Why is a plan as fast as it is, why is another plan not better, and how do two plans differ?

Input: a `Plan`, from its file alone; questions with constraints also need the plan's model. Output: an `Explanation`,
a `WhyNotResult` per question, a `Difference`; `tools/report/explain_table.py` prints them.

Files in reading order:

- `breakdown.py`: seconds of the step by activity, at every pipeline position.
- `advice.py`: what bounds the step, and changes that would shorten it.
- `why_not.py`: plans again under a constraint and compares; `why_not_result.py`: the answer.
- `diff.py`: settings, cuts and shardings that differ between two plans.
"""
