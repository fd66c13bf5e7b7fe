"""Cuts and shardings in one integer program, for models that are small enough.

Input: a `JointProblem`. Output: `Joint`, stage and strategy of every group.

Files in reading order: `problem.py` (cost of a given assignment), `program.py` (variables and constraints),
`solve.py`.
"""
