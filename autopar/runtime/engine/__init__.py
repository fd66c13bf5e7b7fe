"""Engine: the hot loop of a rank's step.

Question: in which order does a rank receive, compute and send, at the least cost in Python?
Input: a `Schedule`, the rank's `records.ChunkModule`s and a `StepData`. Output: losses and outputs on the device, and
`metrics` that the host reads later.

Reading order:
    records.py         a chunk's module, a step's data, its results, times of its actions
    executor.py        BoundStep: a schedule bound to modules, peers and tags, then run
    edges.py           tensors between chunks: indices, gradient edges, checks
    deferred_wgrads.py gradients of weights that split backwards leave for later
    send_lifetimes.py  at which action each send buffer may be freed
    staging.py         inputs copied to the GPU on a side stream
    loss.py            the loss function on the rank's device and under autocast
    batch_loss.py      one loss of the outputs of all microbatches of all replicas
    timer.py           time marks on the host or in a stream
    metrics.py         losses and norm, read from the GPU without stalling it
    cuda_graph.py      whole training steps as CUDA graphs
    recorded_flags.py  flags between hosts, recorded and replayed for CUDA graphs
    closure_guard.py   Python values and tensors that loss_fn reads
"""
