"""``autopar.plan``: how the best plan for a model on a machine is found.

In: a `PlanRequest` (model, example call, devices, options) and the machine's cost model. Out: a `Plan`.

``plan``: arguments, the steps of planning, warnings; start here.
``costs``: `PlanCosts`, the cost of the model under each sharding, computed once and read by the search.
``error_band``: by how much the plan's step may be off, and what that rests on.
``hardware``: one cost model for all ranks, with the memory of the smallest.
``rank0``: under a launcher, rank 0 plans and the other ranks receive the plan.
``refine``: shardings that stages may choose among, and a bound over all of them.
``measured``: plans by measured times: ``cost="measured"`` times configurations that look best until the best one has
been; ``cost="auto"`` times the regions on which the choice hangs, within a budget.
``undecided``: the regions on which the choice hangs.
"""
