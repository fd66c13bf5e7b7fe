"""Runtime: runs programs on ranks, which are worker processes, processes of a launcher, or this process.

Question: how do generated programs train, step by step, on the devices of a mesh?
Input: one `spec.RankSpec` per rank, its parts of the weights, and `Program`s. Output: running `rank.Rank`s, which take
a `spec.StepRequest` and return a `spec.RankStepResult`.

Reading order:
    spec.py          plain data that goes to a rank and comes back
    rank.py          one rank: weights, programs, steps, state
    host_copies.py   CPU copies of its weights and gradients, for the caller
    commands.py      the calls that a rank answers
    random_state.py  random numbers apart from those of the user's script
    engine/          the hot loop: bound schedules, CUDA graphs, staging, metrics
    comm/            process groups, point-to-point, symmetric memory, collectives
    params/          main-grad buffers, their reduction, ZeRO all-gather, low-precision copies
    optim/           optimizer step, clipping, loss scaling, EMA
    checkpoint/      saving and loading a rank's state
    launch/          worker pool, torchrun and srun, failure propagation
    memory/          allocator settings, peaks, out-of-memory errors

>>> rank_text(Mesh(pp=2, tp=2), 3, Placement(2))
'rank 3 (stage 1, shard 1)'
"""
