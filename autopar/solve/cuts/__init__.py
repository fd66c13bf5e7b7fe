"""Where to cut the model into pipeline stages?

Input: a `CutProblem` (a priced model, the stages to fill, their memory). Output: `Cuts`, the stage of every group
with a proven bound.

Files in reading order: `problem.py` (input and objective), `evaluate.py` with `memory.py` and `buffers.py` (exact
cost of given cuts), `merge.py` (colocated groups become one), `dynamic_programme.py` (contiguous cuts), `ranges.py`
and `ilp.py` (the integer program and its reduction), `solve.py` (all of them, with a certificate), `local_search.py`
(cuts moved by the simulated step), `infeasible.py` (messages).
"""
