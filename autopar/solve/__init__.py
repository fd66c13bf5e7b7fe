"""Which plan is fastest? Prices of a model on a machine become a `Plan`.

Input: a `Costs` (`cuts/problem.py`), which prices any sharding at any microbatch size, and `PlanConstraints` of the
user. Output: an `autopar.ir.plan.Plan` with what was proven of it.

Files in reading order:

- `search.py`: the fastest candidate is solved and certified, or an error says what would fit.
- `space/`: every mesh, number of microbatches and schedule in the order of lower bounds.
- `shardings/`: one strategy per group, by integer program.
- `cuts/`: pipeline cuts by dynamic programme, local search and integer program; exact cost of a stage.
- `result/`: the plan, its alternatives, and what bounds its step.
- `backend.py`, `highs.py`: the solvers behind PuLP.

``autopar plan vit_tiny_patch16_224 --devices 2 --pp 2 --batch 8`` prints, among more::

    step        543.0 ms ±21 %, 14.7 samples/s ±21 % (predicted)
                rests on compute ±21 % (assumed); `autopar profile` on such a machine measures it
                pipeline 530.7 ms + optimizer 12.3 ms
    solver      HiGHS: feasible, certified gap 1.98 %, 0.71 s
                no cuts of this mesh take less than 532.2 ms
"""
