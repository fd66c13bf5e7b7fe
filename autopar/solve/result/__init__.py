"""How does a decision become a plan that explains itself?

Input: a `Decision` (problem, prices, stage of every group). Output: a `Plan`.

Files in reading order: `make_plan.py` (stages, prediction, shardings), `block_costs.py` (times of the model's blocks),
`alternatives.py` (rejected plans), `step_breakdown.py` (seconds of a step by activity), `reasons.py` (what bounds the
step, why others are slower).
"""
