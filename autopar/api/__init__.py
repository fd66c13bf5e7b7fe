"""Everything that a user calls, and the only room where the stages meet.

Question: how does an unmodified model become one that trains on several devices? In: a model and keyword arguments.
Out: a `ParallelModel`. A call of ``parallelize`` checks its arguments and then takes four steps::

    parallelize(model)                       api/parallelize.py, api/recipe_check.py: the user's callables tried
     ├─ lower_example(request)  → Graph      api/planning/plan.py, trace/lower.py: export, then every pass by name
     ├─ plan_graph(graph)       → Plan       api/planning/plan.py, solve/search.py: costs, search, refinement; under
     │                                       a launcher api/planning/rank0.py: on rank 0, for all ranks
     ├─ ProgramCache(plan)      → Program[]  api/program_cache.py, sharding/shard_graph.py, codegen/split.py
     └─ start(programs)         → running    api/rank_specs.py, runtime/launch/, runtime/rank.py

A call of the running model binds its arguments and sends each rank its part of the batch::

    pm.train_step(x, y)                      api/model.py
     └─ Dispatcher.carry_out(request)        api/dispatch.py: the batch cut into microbatches, an agreement among ranks
         ├─ ProgramCache.specialize          api/program_cache.py: programs for a microbatch shape that is new
         └─ StepRequest for each rank        runtime/spec.py, runtime/engine/executor.py

Read in this order: ``parallelize``, ``options``, ``planning/``, ``program_cache``, ``model``, ``dispatch``, ``batch``,
``outputs``, ``batch_agreement``, ``checkpoint``. Models by name: ``model_names``, ``model_source``. Example,
``print(pm.train_step(x, y))`` for a small MLP on two CPU workers::

    StepResult(loss=1.5001184940338135, step_seconds=0.015515219000008074, grad_norm=0.6283057332038879, outputs=None,
               skipped=False)
"""
