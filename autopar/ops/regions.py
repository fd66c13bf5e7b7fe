"""Regions of a program's operations that are compiled separately: equal blocks share one compiled region."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby

import torch

from autopar.ir.graph import Op, Ref
from autopar.ops.registry import named_arguments, operator

MIN_REGION_OPS = 8  # operations
ROOT = "root"  # block of operations of the model itself
CONVOLUTIONS = {
    *(f"aten.conv{kind}{dims}d" for kind in ("", "_transpose") for dims in (1, 2, 3)),
    "aten.convolution", "autopar.patch_convolution", "autopar.place_convolution", "autopar.padded_convolution",
    "autopar.convolution_split",
    "autopar.halo_convolution", "autopar.halo_conv_transpose",
}  # fmt: skip
MATRIX_PRODUCTS = {
    *(f"aten.{name}" for name in ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum")),
    "autopar.linear_wgrad_fused", "autopar.linear_split",
}  # fmt: skip


def region_starts(ops: Sequence[Op], required_starts: Collection[int] = ()) -> tuple[int, ...]:
    """Positions of the operations that each begin a region, 0 first.

    A block is a run of operations of one numbered module, such as ``blocks.3``, or between such modules. It counts from
    `MIN_REGION_OPS` operations up; of nested modules (``stages.2``, ``stages.2.blocks.7``) the innermost one counts.
    Fewer operations in between join the region before them.

    A region begins after a block's first product. The norm, activation or sum before it is thus compiled with the end
    of the previous block, and torch.compile fuses both; it fuses nothing across the product. A block without
    `product_end` begins a region with its first operation. Operations after the last block begin one too, unless a part
    of that block is a region with them alone. If an operation writes into a value, everything is one region, because
    other readers of that memory are not tracked.

    Args:
        required_starts: positions that begin a region in any case.
    """
    if not ops or any(writes_into_value(op) for op in ops):
        return (0,) if ops else ()
    sizes = module_sizes(ops)
    homes = block_homes(ops, sizes)
    starts, end, is_after_product = [0], 0, False
    for home, run in groupby(homes):
        begin, end = end, end + len(list(run))
        is_stem, is_last = begin == 0 and sizes[home] != end, end == len(ops)
        product = None if is_stem else product_end(ops[begin:end])
        if product is not None and len(ops) - begin - product < MIN_REGION_OPS:
            product = None
        is_short = end - begin < MIN_REGION_OPS and not is_last
        if is_short or (is_last and is_after_product and product is None):
            continue
        start = begin + (product or 0)
        if starts[-1] == 0 or start - starts[-1] >= MIN_REGION_OPS:
            starts.append(start)
            is_after_product = product is not None
    return tuple(sorted({*starts, *required_starts}))


def module_sizes(ops: Sequence[Op]) -> Counter[str]:
    """Operations of each numbered module."""
    return Counter(path for op in ops for path in numbered_modules(op.module))


def block_homes(ops: Sequence[Op], sizes: Counter[str]) -> list[str]:
    """The numbered module that each operation belongs to, the innermost of `MIN_REGION_OPS` operations; else empty."""
    return [next((p for p in numbered_modules(op.module) if sizes[p] >= MIN_REGION_OPS), "") for op in ops]


def op_blocks(ops: Sequence[Op]) -> dict[str, str]:
    """The block of each operation, by name: its numbered module, such as ``blocks.3``, or else its outermost module,
    such as ``patch_embed``, or `ROOT`."""
    homes = zip(ops, block_homes(ops, module_sizes(ops)), strict=True)
    return {op.name: home or op.module.partition(".")[0] or ROOT for op, home in homes}


def parameter_blocks(ops: Sequence[Op], names: Collection[str]) -> dict[str, str]:
    """The block of each parameter that operations read: that of its first reader."""
    home, blocks = op_blocks(ops), dict[str, str]()
    for op in ops:
        for name in op.reads:
            if name in names:
                blocks.setdefault(name, home[op.name])
    return blocks


def product_end(block: Sequence[Op]) -> int | None:
    """Position after a block's first products and the collective that completes them; None if no region begins there.

    The first products are those that read values made in the block before them, such as query, key and value of one
    norm. No region begins where another operation reads such a value too, which would be one more tensor in memory.
    Nor does one begin after

    - a convolution with a bias: torch.compile adds the bias in a kernel that is fused with what follows in the region,
    - a product of rows that are strided in memory, as between tokens: the norm's kernel, which writes them, would read
      the summands of the block before across rows too.
    """
    first = next((position for position, op in enumerate(block) if packet(op) in CONVOLUTIONS | MATRIX_PRODUCTS), None)
    if first is None:
        return None
    made = {value.name: value for op in block[:first] for value in op.outputs}
    last = max((k for k, op in enumerate(block) if k > first and not made.keys().isdisjoint(op.reads)), default=first)
    product = block[last]
    if packet(product) in CONVOLUTIONS:
        is_end = named_arguments(product)["bias"] is None
    else:
        strided = [name for name, value in made.items() if len(value.shape) > 1 and value.stride[-1] > 1]
        is_end = packet(product) in MATRIX_PRODUCTS and set(strided).isdisjoint(product.reads)
    return 1 + max(k for k, op in enumerate(block) if product.name in (op.name, op.home)) if is_end else None


def packet(op: Op) -> str:
    """The operator of an operation without its overload, such as ``aten.conv2d``."""
    return op.target.rpartition(".")[0]


def numbered_modules(module: str) -> Iterator[str]:
    """The modules on a path whose last name has a number, the innermost first."""
    names = module.split(".")
    for depth in range(len(names), 0, -1):
        if any(character.isdigit() for character in names[depth - 1]):
            yield ".".join(names[:depth])


def writes_into_value(op: Op) -> bool:
    """Whether an operation updates a tensor in place that is not a weight's."""
    target = operator(op.target)
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return False
    first = op.args[0] if op.args else None
    return isinstance(first, Ref) and first.name not in op.mutates
