"""The printed sharding of each block of the model, and its collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from rich.console import RenderableType
from rich.table import Table

from autopar.ir.plan_parts import BlockSharding, Collective, PlanView
from autopar.ir.text import numeric, plain_table, wrapped
from autopar.ir.units import BYTES, TIME, percent, text

FULLY_EXPOSED = 0.99  # share of collective time; with less of it exposed, the table tells how much is hidden
MAX_BLOCKS = 12  # distinct blocks in the table; few models have more kinds
NAME_CELLS, MODULE_CELLS = 24, 28


def sharding_parts(plan: PlanView) -> Sequence[RenderableType]:
    """The shardings of every kind of block, and their collectives where there are any."""
    parts: list[RenderableType] = [split_table(plan)]
    if any(block.collectives for block in plan.blocks):
        parts += ["", collective_table(plan)]
    return parts


def split_table(plan: PlanView) -> Table:
    """A row per module of a block; neighbouring modules with equal sharding share a row."""
    sizes = plan.mesh.axis_sizes
    axes = f"axes {', '.join(f'{axis} of {size}' for axis, size in sizes.items())}" if len(sizes) > 1 else ""
    table = plain_table("sharded", "module", f"over {axes or f'{plan.mesh.tp} ranks'}")
    blocks = merged_blocks(plan.blocks)
    for block in blocks[:MAX_BLOCKS]:
        name = block_name(block)
        for modules, how in grouped_rows(block.rows):
            table.add_row(name, wrapped(modules, MODULE_CELLS), how)
            name = ""
    hidden = blocks[MAX_BLOCKS:]
    if hidden:
        table.add_row(f"and {len(hidden)} more kinds", "", "")
    return table


def merged_blocks(blocks: Sequence[BlockSharding]) -> list[BlockSharding]:
    """Blocks with rows; repetitions of a block with equal rows are one block, even if their collectives differ."""
    by_pattern: dict[tuple, BlockSharding] = {}
    for block in blocks:
        if block.rows:
            prefix, dot, number = block.name.rpartition(".")
            repeated = f"{prefix}{dot}*" if number.isdigit() else block.name
            key = (repeated, tuple(block.rows.items()))
            known = by_pattern.get(key)
            by_pattern[key] = block if known is None else replace(known, name=repeated, count=known.count + block.count)
    return list(by_pattern.values())


def collective_table(plan: PlanView) -> Table:
    """A row per block and direction: the collectives and their time each time the block runs."""
    table = plain_table("collectives", "direction", "of one block and microbatch", *numeric("time", no_wrap=True))
    for block in [b for b in plan.blocks if b.collectives][:MAX_BLOCKS]:
        name = block_name(block)
        for direction in ("forward", "backward"):
            collectives = [c for c in block.collectives if c.direction == direction]
            if collectives:
                table.add_row(
                    name, direction, collectives_text(collectives), text(sum(c.seconds for c in collectives), TIME)
                )
                name = ""
    total = sum(b.count * c.seconds for b in plan.blocks for c in b.collectives)
    whole = sum(s.forward_seconds + s.backward_seconds for s in plan.stages)
    exposed = sum(s.collective_seconds for s in plan.stages)
    hidden = f"; {text(total - exposed, TIME)} overlaps matmuls, the rest" if exposed < FULLY_EXPOSED * total else ","
    share = f"{hidden} {percent(exposed / whole, 0)} of its time" if whole else ""
    table.add_row("all", "", f"of one microbatch{share}", text(total, TIME))
    return table


def block_name(block: BlockSharding) -> str:
    """``24 × blocks.*``; the name alone for a single block."""
    return wrapped(f"{block.count} × {block.name}" if block.count > 1 else block.name, NAME_CELLS)


def grouped_rows(rows: Mapping[str, str]) -> list[tuple[str, str]]:
    """(modules, sharding) pairs; neighbours with equal sharding share one pair."""
    return [
        (", ".join(module for module, _ in members), how)
        for how, members in groupby(rows.items(), key=lambda row: row[1])
    ]


def collectives_text(collectives: Sequence[Collective]) -> str:
    """``2 × all-reduce of 38.5 MiB, all-gather of 4.00 MiB``."""
    counts = Counter((c.kind, c.num_bytes, c.axis) for c in collectives)
    return ", ".join(
        (f"{count} × " if count > 1 else "") + f"{kind} of {text(num_bytes, BYTES)}" + (f" over {axis}" if axis else "")
        for (kind, num_bytes, axis), count in counts.items()
    )
