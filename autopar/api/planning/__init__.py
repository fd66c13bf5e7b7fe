"""``autopar.plan``: how the best plan for a model on a machine is found.

In: a `PlanRequest` (model, example call, devices, options) and the machine's cost model. Out: a `Plan`.

``plan``: arguments, the steps of planning, warnings; start here.
``costs``: `PlanCosts`, the cost of the model under each sharding, computed once and read by the search.
``refine``: cuts and shardings decided again in one integer program, with a bound that certifies the plan.
``measured``: ``cost="measured"``; configurations that look best are timed until the best one has been.
"""
