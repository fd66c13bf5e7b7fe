"""Which plan is fastest? Prices of a model on a machine become a `Plan`.

Input: a `Costs` (`cuts/problem.py`), which prices any sharding at any microbatch size, and `PlanConstraints` of the
user. Output: an `autopar.ir.plan.Plan` with what was proven of it.

Files in reading order:

- `search.py`: every mesh, number of microbatches and schedule in the order of lower bounds; the best is solved and
  certified.
- `space/`: points of that search, their lower bounds, and constraints.
- `shardings/`: one strategy per group, by integer program.
- `cuts/`: pipeline cuts by dynamic programme, integer program and local search; exact cost of a stage.
- `joint/`: both decisions in one program, for small models.
- `result/`: the plan, its alternatives, and what bounds its step.
- `backend.py`, `highs.py`: the solvers behind PuLP.

``autopar plan vit_tiny_patch16_224 --devices 2 --pp 2 --batch 8`` prints, among more::

    step        635.9 ms ±50 %, 12.6 samples/s ±50 % (predicted)
                pipeline 625.0 ms + optimizer 10.9 ms
    solver      HiGHS: optimal, certified gap 0.00 %, 0.01 s, balancing time
"""
