"""Compiled regions: regions that differ in names alone, such as transformer blocks, share one compilation.

A program is divided at numbered modules (`autopar.ops.regions`), and names become numbers. So equal blocks are one
function of weights and values, which is compiled once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import log2, prod
from typing import Any

import torch
from torch import Tensor, fx, nn

# Not public in torch 2.11 to 2.15. It compiles a backward before the first call, and says for which layouts of
# gradients one is compiled; nothing public does.
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint

from autopar.codegen.activation_checkpoint import Segment
from autopar.codegen.regions import numbered_ops
from autopar.ir.graph import Op, Value

Emit = Callable[[Sequence[Op], Sequence[str], Sequence[str]], fx.GraphModule]

# A norm's backward kernel writes partial sums of the weight's gradient, each over some rows; a second kernel adds
# them. torch.compile's default is 788 partial sums for the 12,608 tokens of 64 images. Adding them takes 20 µs, five
# times per block of ViT-L. With 394, a step of 117 ms is 2 ms shorter (pp 2, 256 images, H200, torch 2.11).
TARGET_PARTIAL_SUMS = 400
SPLIT_SIZE = "triton.mix_order_reduction_split_size"  # one of torch._inductor.list_options() (2.11 to 2.15)

# Compiled functions of this process, by code and arguments, least recently used first. Stages, modes and models share
# them. A function that is dropped here stays with the modules that call it.
COMPILED_REGIONS: dict[str, Callable[..., Any]] = {}
MAX_COMPILED_REGIONS = 256


class CompiledRegion(nn.Module):
    """Calls a compiled function, which equal regions share, with the weights of one region.

    Its first call compiles the backward too. torch would compile that when the first gradient arrives: in a pipeline,
    one stage after the other, and the first stages wait for all. A forward on a GPU needs no host to wait.
    """

    def __init__(self, call: Callable[..., Any], weights: Sequence[Tensor]) -> None:
        super().__init__()
        self.call, self.weights = call, list(weights)  # a list: the module that holds the region owns them
        self.is_new = True

    def forward(self, *args: Tensor) -> Any:
        if self.is_new:
            self.is_new = False
            with functorch_config.patch(force_non_lazy_backward_lowering=True):
                return self.call(*self.weights, *args)
        return self.call(*self.weights, *args)


def with_checkpoint(body: fx.GraphModule, draws: bool) -> fx.GraphModule:
    """A module that checkpoints ``body``: saves its arguments, and the compiled backward runs it again.

    The module has generated code: torch.compile counts compilations per code object and stops at a limit, which a
    shared Python function would reach.
    """
    graph = fx.Graph()
    arguments = [graph.placeholder(node.name) for node in body.graph.find_nodes(op="placeholder")]
    inner = graph.create_node("get_attr", "body")
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws}
    graph.output(graph.call_function(checkpoint, (inner, *arguments), options))
    return fx.GraphModule({"body": body}, graph, class_name="Checkpointed")


def compiled_region(
    region: Segment,
    values: Mapping[str, Value],
    weights: Mapping[str, Tensor],
    emit: Emit,
    recompute: bool = False,
    keep_order: bool = False,
) -> CompiledRegion:
    """A region that torch.compile compiles at its first call, unless an equal region has been compiled.

    Equal regions have equal operations and constants, and equal shapes, dtypes and strides of all values and weights
    that enter. Blocks that draw random numbers differ: the code holds each operation's random stream.

    Args:
        values: the values that operations read, by name; weights are not among them.
        weights: tensors of the weights by name.
        emit: makes a module from operations, names of arguments, and names of results.
        recompute: checkpoint the region: save only its inputs.
        keep_order: run collectives in the order of the trace, as other ranks do whose shapes differ.
    """
    own = tuple(dict.fromkeys(name for op in region.ops for name in op.reads if name in weights))
    numbered = numbered_ops(region.ops, own, region.reads)
    arguments, results = (*own, *region.reads), region.makes
    module = emit(numbered.ops, [numbered.names[n] for n in arguments], [numbered.names[n] for n in results])
    held = [weights[name] for name in own]
    taken = [(tuple(w.shape), w.dtype, w.stride(), w.requires_grad) for w in held]
    taken += [(v.shape, v.dtype, v.stride, v.requires_grad) for v in (values[name] for name in region.reads)]
    key = f"{module.code}\n{taken}\n{recompute}\n{keep_order}"
    call = COMPILED_REGIONS.pop(key, None)
    if call is None:
        whole = with_checkpoint(module, region.is_random) if recompute else module
        options = norm_options(region.ops) if any(weight.is_cuda for weight in held) else {}
        if keep_order:
            from autopar.codegen.collective_order import CUSTOM_PASS, CollectivesInOrder  # imports the whole compiler

            options[CUSTOM_PASS] = CollectivesInOrder()
        call = torch.compile(whole, fullgraph=True, dynamic=False, options=options or None)
    COMPILED_REGIONS[key] = call
    if len(COMPILED_REGIONS) > MAX_COMPILED_REGIONS:
        del COMPILED_REGIONS[next(iter(COMPILED_REGIONS))]
    return CompiledRegion(call, held)


def gradient_of(result: Value) -> Value:
    """The gradient of a region's result, in the layout that its compiled backward is compiled for: others are copied.

    torch 2.11 compiles for contiguous gradients of contiguous and of permuted results, and for gradients in channels
    last of results in channels last; 2.15 for gradients in the layout of the result. In a step, regions pass such
    gradients to each other.
    """
    if getattr(functorch_config, "guess_tangent_strides_as_outputs", False):
        return result
    like = torch.empty_strided(result.shape, result.stride, device="meta")
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(like.dim())
    if channels_last is not None and like.is_contiguous(memory_format=channels_last):
        return result
    return replace(result, stride=torch.empty(result.shape, device="meta").stride())


def norm_options(ops: Iterable[Op]) -> dict[str, Any]:
    """Options for torch.compile that fit the norms of a region; none without norms, or if torch lacks the option."""
    from torch._inductor import list_options

    shapes = [op.outputs[0].shape for op in ops if op.target in ("aten.layer_norm.default", "aten.rms_norm.default")]
    rows = max((prod(shape[:-1]) for shape in shapes), default=0)
    if rows == 0 or SPLIT_SIZE not in list_options():
        return {}
    return {SPLIT_SIZE: 2 ** min(max(round(log2(rows / TARGET_PARTIAL_SUMS)), 4), 7)}
