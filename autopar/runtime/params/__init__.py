"""Parameters of a rank: main-grad buffers, their reduction, ZeRO all-gather, low-precision copies.

Question: where do a rank's weights and gradients lie, and how do replicas and shards agree on them?
Input: the rank's parameters by name, and `Weight`s with their owners. Output: summed gradients in ``param.grad`` before
an update, and up-to-date compute parameters before a forward.

Reading order:
    flat_buckets.py     which parameters share a flat buffer, who owns them, where they lie
    grad_sums.py        gradients taken from autograd's leaves and added
    grad_buffer.py      main grads: sums over microbatches in flat memory
    grad_reduce.py      their all-reduce or reduce-scatter over replicas
    sharded_params.py   under ZeRO: this replica's pieces of weights, gathered for programs
    sharded_grads.py    from ZeRO-2 on: main grads of these pieces only, and their reduction
    compute_copies.py   low-precision copies that programs read
    full_params.py      unsharded parameters, for optimizers that need them
"""
