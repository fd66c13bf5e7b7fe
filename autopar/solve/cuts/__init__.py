"""Where to cut the model into pipeline stages?

Input: a `CutProblem` (a priced model, the stages to fill, their memory). Output: `Cuts`, the stage of every group
with a proven bound.

Files in reading order: `problem.py` (input and objective), `intervals.py` (exact costs of all intervals of groups),
`evaluate.py` with `memory.py` and `buffers.py` (exact cost of given cuts), `merge.py` (colocated groups become one, in
several orders), `dynamic_programme.py` (contiguous cuts by a closed form), `step_time.py` (the simulated step),
`local_search.py` (cuts moved by it), `program.py` (the integer program), `certify.py` (its rows, until the bound is of
the simulated step), `solve.py` (all of them), `kept_blocks.py` (parameters that stay gathered, for given cuts),
`infeasible.py` (messages).
"""
