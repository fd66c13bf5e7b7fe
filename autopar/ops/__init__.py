"""Torch operators that graphs may name (``torch.ops.autopar``), and the registry of all operators.

Question: what does an operation of a graph run? Input: an `Op` whose ``target`` names an operator. Output: the
operator, its arguments, the shapes of its results without data. The room knows neither stages nor process groups.

Read registry (operator, arguments, results on meta tensors), collectives (layout changes of one mesh axis with their
gradients), async_tp (a linear layer fused with its collective), wgrad_accumulation (wgrad matmuls that add to the main
gradient), split_backward (layers that leave their wgrad matmul for later), counter_rng (random numbers that no plan
changes), patch_embed (convolutions as matrix products), padded_convolution (groups padded for cuDNN), space (parts of
pictures, whose ranks exchange halos and moments), regions (where programs are divided for torch.compile); kernels are
the Triton kernels of these.

>>> from autopar.ops.registry import operator
>>> print(operator("autopar.reduce_scatter.default"))
autopar.reduce_scatter.default
"""
