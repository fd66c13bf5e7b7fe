"""Pipeline schedules as data: actions of every rank, generators, proofs, simulated time.

Question: in which order does each rank run forwards and backwards, and how long does a step take? Input: a schedule's
name, where its stages lie (`Placement`), microbatches. Output: a `Schedule`, a tuple of `Action`s per rank, and a
`Timeline`. A schedule is proved once before its first run (`check`); the runtime relies on the proof.

Read actions (an action prints as ``2F0``), generate (one pure function per schedule), list_schedule (orders for given
times), order (dependencies), check (the promises), simulate and timeline (time and picture), fast_step_time (the step
time of many stages and microbatches).

>>> print(simulate(generate("1f1b", Placement(2), 3), [1.0] * 2, [2.0] * 2))
step 12.000 s, bubble 25.0% of it, activations in flight 2 1
rank 0: F0-----F1-----..............B0------------F2-----B1------------.......B2------------|  75%
rank 1: .......F0-----B0------------F1-----B1------------F2-----B2------------..............|  75%
"""
