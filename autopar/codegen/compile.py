"""Compiled regions: regions that differ in names alone, such as transformer blocks, share one compilation.

A program is divided after the first product of each numbered module (`autopar.ops.regions`), and names become numbers.
So regions of equal blocks are one function of weights and values, which is compiled once.

Regions go to inductor, torch.compile's backend, as the graphs that they are. Its frontend would trace their Python code
into the same graphs again, which takes longer than to load a region from torch's caches.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

# Not public in torch 2.11 to 2.15. It compiles a backward before the first call, and says for which layouts of
# gradients one is compiled; nothing public does.
from torch._functorch import config as functorch_config
from torch._higher_order_ops.wrap import tag_activation_checkpoint

from autopar.codegen.activation_checkpoint import Segment
from autopar.codegen.buffer_layouts import likely_layouts
from autopar.codegen.regions import numbered_ops, with_random_arguments
from autopar.ir.graph import Op, Value
from autopar.ops.gradient_layout import CHANNELS_LAST
from autopar.ops.registry import CHANNEL_NORMS

Emit = Callable[[Sequence[Op], Sequence[str], Sequence[str]], fx.GraphModule]

# A norm's backward kernel writes partial sums of the weight's gradient, each over some rows; a second kernel adds
# them: 392 in 9.8 µs, 784 in 15 to 20, from 1,024 on in 10, as several blocks share them. torch.compile's default is
# 788 for the 12,608 tokens of 64 images. With 394, a step of ViT-L of 117 ms is 2 ms shorter (pp 2, 256 images).
# A quarter of 1,568 would be a loss: the norm's own kernel takes 52 µs instead of 26 (50,176 rows of 128) (H200).
SLOW_SUMS = range(500, 1024)
SPLIT_SIZE = "triton.mix_order_reduction_split_size"
# A value with several readers is computed again by each, unless it takes more reads. torch.compile's default is 4, a
# norm over channels takes 5: SiLU and GELU, which read their operand twice, would read it stored in float32.
STORED_ABOVE = "realize_reads_threshold"
NORM_READS = 12
# The layouts of a region's values are those of the trace. torch.compile would move convolutions to channels last, and
# with them what other operations save: attention then refuses its mask (CoAtNet), and regions copy at their borders.
LAYOUT_CHOICE = "layout_optimization"

# Compiled functions of this process, by code and arguments, least recently used first. Stages, modes and models share
# them. A function that is dropped here stays with the modules that call it.
COMPILED_REGIONS: dict[str, RegionCode] = {}
MAX_COMPILED_REGIONS = 256
COMPILING = threading.Lock()  # the compiler works for one thread at a time


class Argument(NamedTuple):
    """A region's argument as the compiler sees it.

    Args:
        storage: of a weight, its offset in elements within its storage, and that storage's size in bytes. Backwards on
            GPUs have them in the key of torch's cache (2.11 to 2.15).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    requires_grad: bool
    storage: tuple[int, int] | None = None

    @staticmethod
    def of(tensor: Tensor, storage: tuple[int, int] | None = None) -> Argument:
        return Argument(tuple(tensor.shape), tensor.dtype, tensor.stride(), tensor.requires_grad, storage)

    def fake(self, device: torch.device) -> Tensor:
        """A tensor like it, without memory within a `FakeTensorMode`."""
        if self.storage is None:
            tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        else:
            offset, size = self.storage
            storage = torch.empty(size // self.dtype.itemsize, dtype=self.dtype, device=device)
            tensor = storage.as_strided(self.shape, self.stride, offset)
        return tensor.requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class RegionSource:
    """Recipe by which equal regions are compiled; can be pickled.

    Args:
        build: makes the module. A pickled fx.GraphModule would be traced again, which loses checkpoints and names.
        code: of the module, and flags; regions with equal ones compute the same.
        options: of inductor.
    """

    build: Callable[[], fx.GraphModule]
    code: str
    arguments: tuple[Argument, ...]
    options: Mapping[str, Any]
    device: torch.device

    def compile(self) -> Callable[..., Any]:
        """Compile forward and, where gradients are enabled, backward; both are also in torch's caches on disk then."""
        # Not public in torch 2.11 to 2.15. Their imports bring in the whole compiler.
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        with FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True):
            arguments = [argument.fake(self.device) for argument in self.arguments]
        with functorch_config.patch(force_non_lazy_backward_lowering=True):
            return inductor(self.build(), arguments, dict(self.options))


def inductor(module: fx.GraphModule, arguments: Sequence[Tensor], options: dict[str, Any]) -> Any:
    """A module compiled for arguments like the given ones.

    `torch._inductor.compile` is documented for graphs from elsewhere, though not public (torch 2.11 to 2.15).
    """
    from torch import _inductor

    with likely_layouts():
        return _inductor.compile(module, list(arguments), options=options)


CompileAhead = Callable[[Sequence[RegionSource]], None]


@dataclass(eq=False)
class RegionCode:
    """The compiled functions of equal regions; new until it is called or compiled ahead.

    Args:
        first: a weak reference to the first of the regions.
        compiled: functions by torch's modes, and by strides and ``requires_grad`` of what they were compiled for.
    """

    source: RegionSource
    first: Callable[[], CompiledRegion | None] = lambda: None
    is_new: bool = True
    compiled: dict[tuple[Any, ...], Callable[..., Any]] = field(default_factory=dict)

    def __call__(self, weights: Sequence[Tensor], args: Sequence[Tensor]) -> Any:
        given = *weights, *args
        modes = (
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_default_dtype(),
            torch.get_num_threads(),
            *layouts(given),
        )
        call = self.compiled.get(modes)
        if call is None:
            with COMPILING:
                if modes not in self.compiled:
                    first = self.first()
                    own = weights
                    if first is not None and layouts(first.weights) == layouts(weights):
                        own = first.weights  # those of `stored_source`
                    arguments = arguments_of(own, args)
                    self.compiled[modes] = replace(self.source, arguments=arguments).compile()
                    self.is_new = False
            call = self.compiled[modes]
        return call(*given)

    def stored_source(self) -> RegionSource | None:
        """The source with the storages of the first region's weights; None if that region is gone."""
        region = self.first()
        if region is None:
            return None
        read = self.source.arguments[len(region.weights) :]
        return replace(self.source, arguments=(*arguments_of(region.weights, ()), *read))


def layouts(tensors: Iterable[Tensor]) -> tuple[tuple[tuple[int, ...], bool], ...]:
    """Strides of tensors, and whether they require gradients."""
    return tuple([(tensor.stride(), tensor.requires_grad) for tensor in tensors])


def arguments_of(weights: Iterable[Tensor], read: Iterable[Tensor]) -> tuple[Argument, ...]:
    """Arguments of a region: its weights, and the values that it reads, whose storages are their own."""
    own = (Argument.of(w, (int(w.storage_offset()), w.untyped_storage().nbytes())) for w in weights)
    return *own, *(Argument.of(value) for value in read)


class CompiledRegion(nn.Module):
    """Calls a compiled function, which equal regions share, with the weights of one region.

    Its first call compiles the backward too. torch would compile that when the first gradient arrives: in a pipeline,
    one stage after the other, and the first stages wait for all. A forward on a GPU needs no host to wait.
    """

    def __init__(self, code: RegionCode, weights: Sequence[Tensor], ahead: CompileAhead | None) -> None:
        super().__init__()
        self.code, self.weights = code, list(weights)  # a list: the module that holds the region owns them
        self.ahead = ahead

    def forward(self, *args: Tensor) -> Any:
        if self.code.is_new and self.ahead is not None:
            self.ahead(take_new())
        return self.code(self.weights, args)


def take_new() -> list[RegionSource]:
    """Sources of all regions of this process whose code is new, which it no longer is."""
    taken = [(code, source) for code in COMPILED_REGIONS.values() if code.is_new and (source := code.stored_source())]
    for code, _ in taken:
        code.is_new = False
    return [source for _, source in taken]


def with_checkpoint(body: fx.GraphModule, draws: bool) -> fx.GraphModule:
    """A module that checkpoints ``body``: saves its arguments, and the compiled backward runs it again.

    torch.compile's frontend makes this operator of `torch.utils.checkpoint.checkpoint` (torch 2.11 to 2.15).
    """
    graph = fx.Graph()
    arguments = [graph.placeholder(node.name) for node in body.graph.find_nodes(op="placeholder")]
    inner = graph.create_node("get_attr", "body")
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws}
    results = graph.call_function(tag_activation_checkpoint, (inner, *arguments), options)
    (made,) = body.graph.output_node().args
    assert isinstance(made, tuple)
    graph.output(tuple(graph.call_function(getitem, (results, k)) for k in range(len(made))))
    return fx.GraphModule({"body": body}, graph, class_name="Checkpointed")


def compiled_region(
    region: Segment,
    values: Mapping[str, Value],
    weights: Mapping[str, Tensor],
    emit: Emit,
    device: torch.device,
    recompute: bool,
    keep_order: bool,
    ahead: CompileAhead | None,
) -> CompiledRegion:
    """A region that is compiled at its first call, unless an equal region has been compiled.

    Equal regions have equal operations and constants, equal shapes, dtypes and strides of all values and weights that
    enter, and the same device. What differs in their random masks enters as tensors.

    Args:
        values: the values that operations read, by name; weights are not among them.
        weights: tensors of the weights by name.
        emit: makes a module from operations, names of arguments, and names of results.
        device: on which the region runs.
        recompute: checkpoint the region: save only its inputs.
        keep_order: run collectives in the order of the trace, as other ranks do whose shapes differ.
        ahead: compiles all new regions of the process, at the first call of one of them.
    """
    ops, numbers = with_random_arguments(region.ops)
    held = {name: weights[name] for op in region.ops for name in op.reads if name in weights}
    held |= {name: number.to(device) for name, number in numbers.items()}
    own = tuple(held)
    numbered = numbered_ops(ops, own, region.reads)
    arguments, results = (*own, *region.reads), region.makes
    names = [numbered.names[n] for n in arguments], [numbered.names[n] for n in results]
    build = partial(region_module, emit, numbered.ops, *names, [values[name] for name in region.reads])
    module = build()
    taken = [Argument.of(w) for w in held.values()]
    read = (values[name] for name in region.reads)
    taken += [Argument(v.shape, getattr(torch, v.dtype), v.stride, v.requires_grad) for v in read]
    text = f"{module.code}\n{recompute}\n{keep_order}"
    key = f"{text}\n{taken}\n{device}"
    code = COMPILED_REGIONS.pop(key, None)
    if code is None:
        if recompute:
            build = partial(checkpointed_module, build, region.is_random)
        options = cuda_options(region.ops, device) if device.type == "cuda" else {}
        if keep_order:
            from autopar.codegen.collective_order import CUSTOM_PASS, CollectivesInOrder  # imports the whole compiler

            options[CUSTOM_PASS] = CollectivesInOrder()
        code = RegionCode(RegionSource(build, text, tuple(taken), options, device))
    COMPILED_REGIONS[key] = code
    if len(COMPILED_REGIONS) > MAX_COMPILED_REGIONS:
        del COMPILED_REGIONS[next(iter(COMPILED_REGIONS))]
    made = CompiledRegion(code, list(held.values()), ahead)
    if code.first() is None:
        code.first = weakref.ref(made)
    return made


def region_module(
    emit: Emit, ops: Sequence[Op], arguments: Sequence[str], results: Sequence[str], reads: Sequence[Value]
) -> fx.GraphModule:
    """The module of a region, which reads values after its weights."""
    module = emit(ops, arguments, results)
    keep_gradient_layouts(module, reads)
    return module


def checkpointed_module(build: Callable[[], fx.GraphModule], draws: bool) -> fx.GraphModule:
    return with_checkpoint(build(), draws)


def keep_gradient_layouts(region: fx.GraphModule, reads: Sequence[Value]) -> None:
    """Have a region return the gradients of the values that it reads, its last arguments, in the values' layouts.

    Compiled backwards take no others. torch.compile returns a gradient in the layout that eager kernels would give it,
    which is transposed where a sum begins with the gradient of a transposed reader.
    """
    for node, value in zip(region.graph.find_nodes(op="placeholder")[-len(reads) or None :], reads):
        if not value.requires_grad or not node.users or not any(value.stride):  # the latter are slots
            continue
        with region.graph.inserting_before(next(iter(node.users))):
            kept = region.graph.call_function(
                torch.ops.autopar.gradient_layout.default, (node, is_channels_last(value))
            )
        node.replace_all_uses_with(kept, delete_user_cb=lambda user, kept=kept: user is not kept)
    region.recompile()


def is_channels_last(value: Value) -> bool:
    """Whether a value is in channels last, and not contiguous too."""
    like = torch.empty_strided(value.shape, value.stride, device="meta")
    memory_format = CHANNELS_LAST.get(like.dim())
    return memory_format is not None and not like.is_contiguous() and like.is_contiguous(memory_format=memory_format)


def gradient_of(result: Value) -> Value:
    """The gradient of a region's result, in the layout that its compiled backward is compiled for: others are copied.

    torch 2.11 compiles for contiguous gradients of contiguous and of permuted results, and for gradients in channels
    last of results in channels last; 2.15 for gradients in the layout of the result. In a step, regions pass such
    gradients to each other.
    """
    if getattr(functorch_config, "guess_tangent_strides_as_outputs", False):
        return result
    if is_channels_last(result):
        return result
    return replace(result, stride=torch.empty(result.shape, device="meta").stride())


def cuda_options(ops: Sequence[Op], device: torch.device) -> dict[str, Any]:
    """Options for torch.compile for a region on a CUDA device, as far as torch has them (2.11 to 2.15 do)."""
    from torch._inductor import list_options

    options: dict[str, Any] = {LAYOUT_CHOICE: False}
    if any(op.target in CHANNEL_NORMS for op in ops):
        options[STORED_ABOVE] = NORM_READS
    if rows := norm_rows(ops):
        options |= norm_options(rows, torch.cuda.get_device_properties(device).multi_processor_count)
    return {name: value for name, value in options.items() if name in list_options()}


def norm_rows(ops: Iterable[Op]) -> int:
    """Rows of a region's largest norm over rows; 0 without one."""
    norms = [op.outputs[0] for op in ops if op.target in ("aten.layer_norm.default", "aten.rms_norm.default")]
    largest = max(norms, key=lambda value: prod(value.shape), default=None)
    return 0 if largest is None else prod(largest.shape[:-1])


def norm_options(rows: int, processors: int) -> dict[str, Any]:
    """The option that halves the partial sums of a norm; none if torch.compile's own number is good.

    Args:
        processors: multiprocessors of the device.
    """
    split = min(max(1 << (rows // (8 * processors)).bit_length() >> 1, 16), 128)  # rows of a sum, as torch.compile's
    return {SPLIT_SIZE: 2 * split} if rows // split in SLOW_SUMS else {}
