"""The measurements of `autopar profile`, as data: sizes from kernels that only launch to those that fill a device."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, get_args

from autopar.cost.ops.overlap import OVERLAP_WINDOWS
from autopar.ir.hardware import COMPUTE_KINDS, LaunchKind, OpKind
from autopar.ir.network import CollectiveKind

PointKind = Literal["launch", "optimizer", "capacity", "point-to-point", "overlap"] | OpKind | CollectiveKind
Fusion = Literal["", "unfused", "fused"]  # a linear layer and its collective: two operators, or one
FUSIONS: tuple[Fusion, ...] = ("unfused", "fused")
COLLECTIVES: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
# In the order of measuring.
POINT_KINDS: tuple[PointKind, ...] = (
    "capacity", "launch", *COMPUTE_KINDS, "memory", "optimizer", "point-to-point", *COLLECTIVES, "overlap",
)  # fmt: skip
NETWORK = "network"  # category of all cases between nodes
CATEGORIES = (*POINT_KINDS, NETWORK)  # values of --only
KIB, MIB = 2**10, 2**20
SIZES_TEXT = re.compile(r"\d+(x\d+)*")
GROUP_TEXT = re.compile(r" (\d+) ranks(?: over (\d+) nodes)?$")


@dataclass(frozen=True)
class Case:
    """One measurement to make.

    Args:
        variant: of the kind, such as "forward", "gelu" or "all_gather_linear"; of messages between nodes the level that
            they cross, such as "leaf", empty for none.
        sizes: their meaning depends on the kind, see `Sizes`.
        ranks: of the group of a collective, 2 for a message, otherwise 1. Between nodes, senders and receivers.
        fusion: of the kind "overlap"; otherwise empty.
        nodes: over which the ranks are spread evenly. Of several nodes, each has one rank of a collective's group or
            all its ranks; with one, all groups of its shape run at the same time. Nodes of the first half send
            messages to those of the second half.
    """

    kind: PointKind
    variant: str = ""
    dtype: str = ""
    sizes: tuple[int, ...] = ()
    ranks: int = 1
    fusion: Fusion = ""
    nodes: int = 1

    @property
    def name(self) -> str:
        """Text that identifies the case, such as ``matmul forward float32 64x256x256``, ``all-reduce 1024 4 ranks`` or
        ``all-reduce 1024 4 ranks over 2 nodes``.

        Files of points hold it.
        """
        sizes, group = "x".join(map(str, self.sizes)), f"{self.ranks} ranks" if self.ranks > 1 else ""
        group += f" over {self.nodes} nodes" if self.nodes > 1 else ""
        return " ".join(t for t in (self.kind, self.variant, self.fusion, self.dtype, sizes, group) if t)

    @property
    def category(self) -> str:
        """Value of --only that measures the case."""
        return NETWORK if self.nodes > 1 else self.kind

    @staticmethod
    def from_name(kind: PointKind, name: str, dtype: str, ranks: int) -> Case:
        """The case with this name.

        Raises:
            ValueError: it is not the name of a case of that kind, dtype and number of ranks.
        """
        group = GROUP_TEXT.search(name)
        words = (name[: group.start()] if group else name).split()[1:]
        sizes = tuple(map(int, words.pop().split("x"))) if words and SIZES_TEXT.fullmatch(words[-1]) else ()
        if dtype and words and words[-1] == dtype:
            words.pop()
        fusion: list[Fusion] = [f for f in FUSIONS if f in words[-1:]]
        nodes = int(group[2] or 1) if group else 1
        variant = " ".join(words[: len(words) - len(fusion)])
        case = Case(kind, variant, dtype, sizes, ranks, fusion[0] if fusion else "", nodes)
        if case.name != name:
            raise ValueError(f"{name!r} is not the name of a {kind} case in {dtype or 'any dtype'} on {ranks} ranks")
        return case


@dataclass(frozen=True)
class Sizes:
    """The sizes that are measured on one type of device.

    Args:
        dtypes: of attention and convolutions; matmuls have the four of a cost model.
        slow_dtypes: dtypes in which some devices take minutes for large products.
        slow_flops: FLOPs from which products in ``slow_dtypes`` are left out.
        matmul: tokens, features in, features out.
        attention: batch, heads, tokens, width of a head.
        convolution: batch, channels in, channels out, image, kernel, stride, groups: 3 × 3 and 1 × 1 as in ResNets.
            On CPU also a patch embedding, which programs on GPUs compute as a matrix product.
        depthwise: as convolution, with the shapes of ConvNeXt and MobileNet.
        memory: elements.
        memory_dtypes: of memory-bound operations.
        optimizer: parameters, in 16 tensors.
        message: bytes, inside a node.
        network: bytes, between nodes.
        overlap: tokens, features in and features out of whole linear layers that ranks share.
    """

    dtypes: tuple[str, ...]
    slow_dtypes: tuple[str, ...]
    slow_flops: float
    matmul: tuple[tuple[int, int, int], ...]
    attention: tuple[tuple[int, int, int, int], ...]
    convolution: tuple[tuple[int, int, int, int, int, int, int], ...]
    depthwise: tuple[tuple[int, int, int, int, int, int, int], ...]
    memory: tuple[int, ...]
    memory_dtypes: tuple[str, ...]
    optimizer: tuple[int, ...]
    message: tuple[int, ...]
    network: tuple[int, ...]
    overlap: tuple[tuple[int, int, int], ...] = ()


CPU = Sizes(
    dtypes=("float32", "bfloat16"),
    slow_dtypes=("float16", "float64"),
    slow_flops=3e8,
    matmul=(
        (16, 64, 64), (64, 192, 192), (197, 192, 576), (197, 384, 384), (394, 384, 1152), (788, 384, 1536),
        (788, 768, 768), (1024, 1024, 1024),
    ),
    attention=((1, 2, 49, 64), (1, 3, 197, 64), (4, 6, 197, 64), (1, 6, 577, 64), (2, 4, 197, 128), (1, 4, 768, 128)),
    convolution=(
        (1, 16, 16, 16, 3, 1, 1), (2, 64, 64, 28, 3, 1, 1), (4, 64, 64, 56, 3, 1, 1), (4, 256, 256, 14, 3, 1, 1),
        (4, 256, 64, 56, 1, 1, 1), (8, 256, 1024, 14, 1, 1, 1), (4, 3, 384, 224, 16, 16, 1),
    ),
    depthwise=((4, 96, 96, 28, 7, 1, 96), (4, 144, 144, 56, 3, 1, 144), (8, 384, 384, 14, 7, 1, 384)),
    # For tensors of more than 32 MiB the C library maps new pages, at a tenth of the speed.
    memory=(KIB, 16 * KIB, 128 * KIB, 512 * KIB, 2 * MIB, 4 * MIB),
    memory_dtypes=("float32",),
    optimizer=(MIB, 4 * MIB, 8 * MIB),
    message=(KIB, 16 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB),
    network=(KIB, 64 * KIB, 512 * KIB, 2 * MIB, 4 * MIB),
)  # fmt: skip
CUDA = Sizes(
    dtypes=("float32", "bfloat16", "float16"),
    slow_dtypes=("float64",),
    slow_flops=1e11,
    matmul=(
        (64, 256, 256), (197, 384, 1152), (788, 768, 768), (1024, 1024, 1024), (3152, 768, 3072), (6304, 1024, 1024),
        (12608, 1024, 4096), (25216, 1024, 4096), (8192, 8192, 8192),
    ),
    attention=(
        (2, 3, 197, 64), (8, 12, 197, 64), (64, 16, 197, 64), (32, 12, 577, 64), (16, 16, 1024, 64), (4, 16, 4096, 64),
        (16, 8, 197, 128), (16, 16, 1024, 128),
    ),
    convolution=(
        (2, 64, 64, 28, 3, 1, 1), (32, 64, 64, 56, 3, 1, 1), (64, 128, 128, 28, 3, 1, 1), (64, 512, 512, 7, 3, 1, 1),
        (128, 256, 256, 14, 3, 1, 1), (64, 256, 64, 56, 1, 1, 1), (128, 256, 1024, 14, 1, 1, 1),
    ),
    depthwise=(
        (4, 96, 96, 28, 7, 1, 96), (64, 96, 96, 56, 7, 1, 96), (64, 384, 384, 14, 7, 1, 384),
        (64, 144, 144, 56, 3, 1, 144), (64, 768, 768, 7, 7, 1, 768), (128, 128, 128, 56, 7, 1, 128),
        (128, 512, 512, 14, 7, 1, 512), (64, 240, 240, 28, 5, 1, 240), (64, 672, 672, 14, 5, 1, 672),
        (128, 32, 32, 112, 3, 1, 32), (64, 144, 144, 56, 3, 2, 144),
    ),
    memory=(KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB),
    memory_dtypes=("float32", "bfloat16"),
    optimizer=(4 * MIB, 32 * MIB, 256 * MIB),
    message=(KIB, 64 * KIB, MIB, 8 * MIB, 64 * MIB, 256 * MIB),
    network=(KIB, 64 * KIB, MIB, 8 * MIB, 64 * MIB, 256 * MIB),
    overlap=((6304, 768, 3072), (25216, 1024, 4096)),
)  # fmt: skip
SIZES = {"cpu": CPU, "cuda": CUDA}
MEMORY_BOUND_OPS = ("add", "gelu", "layer_norm")
LAUNCHES: tuple[LaunchKind, ...] = get_args(LaunchKind)


def cases(device_type: str, devices: int, nodes: int = 1, levels: Mapping[str, int] | None = None) -> tuple[Case, ...]:
    """All cases of a cost model, in the order of measuring.

    Args:
        devices: of each node.
        levels: nodes of a level's groups, by its name in the file.
    """
    sizes = SIZES[device_type]
    local = sorted(unordered_cases(sizes, devices), key=lambda case: POINT_KINDS.index(case.kind))
    return *local, *network_cases(sizes.network, devices, nodes, levels or {})


def network_cases(sizes: Sequence[int], devices: int, nodes: int, levels: Mapping[str, int]) -> Iterator[Case]:
    """Cases between nodes: messages of one rank and of all ranks of a node, and collectives of one rank of each node
    and of all ranks, over 2, 4, … and all nodes. Levels are measured whose groups are at most half of the nodes."""
    per_node = sorted({1, devices})
    if nodes > 1:
        yield from (Case("point-to-point", "", "", (size,), 2 * m, nodes=2) for m in per_node for size in sizes)
    for name, group in levels.items():
        if 2 * group <= nodes:
            ranks = 2 * group * devices
            yield from (Case("point-to-point", name, "", (size,), ranks, nodes=2 * group) for size in sizes)
    for kind, num_nodes, m in product(COLLECTIVES, group_sizes(nodes), per_node):
        yield from (Case(kind, "", "", (size,), num_nodes * m, nodes=num_nodes) for size in sizes)


def unordered_cases(sizes: Sizes, devices: int) -> Iterator[Case]:
    """All cases of a cost model with these sizes, in any order."""
    yield Case("capacity")
    for kind in LAUNCHES:
        yield Case("launch", kind)
    for dtype in ("float32", "bfloat16", "float16", "float64"):
        for tokens, in_features, out_features in sizes.matmul:
            if dtype not in sizes.slow_dtypes or 2 * tokens * in_features * out_features < sizes.slow_flops:
                yield Case("matmul", "forward", dtype, (tokens, in_features, out_features))
                yield Case("matmul", "backward", dtype, (tokens, in_features, out_features))
    for dtype in sizes.dtypes:
        for variant in ("forward", "both ways"):
            yield from (Case("attention", variant, dtype, shape) for shape in sizes.attention)
            yield from (Case("convolution", variant, dtype, shape) for shape in sizes.convolution)
            yield from (Case("depthwise", variant, dtype, shape) for shape in sizes.depthwise)
    for dtype in sizes.memory_dtypes:
        for op in MEMORY_BOUND_OPS:
            yield from (Case("memory", op, dtype, (elements,)) for elements in sizes.memory)
    yield from (Case("optimizer", "", "float32", (numel,)) for numel in sizes.optimizer)
    if devices > 1:
        yield from (Case("point-to-point", "", "", (size,), 2) for size in sizes.message)
    for kind in COLLECTIVES:
        for ranks in group_sizes(devices):
            yield from (Case(kind, "", "", (size,), ranks) for size in sizes.message)
    for operator, fusion, ranks in product(OVERLAP_WINDOWS, FUSIONS, group_sizes(devices)):
        yield from (Case("overlap", operator, "bfloat16", shape, ranks, fusion) for shape in sizes.overlap)


def group_sizes(devices: int) -> tuple[int, ...]:
    """Powers of two below the number of devices, and that number; at least 2."""
    powers = (2**i for i in range(1, devices.bit_length()))
    return tuple(sorted({size for size in (*powers, devices) if 2 <= size <= devices}))
