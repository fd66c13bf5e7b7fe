"""Picture of the model: its blocks in order, a row for each stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autopar.ir.blocks import shardings_inside
from autopar.ir.names import inside
from autopar.ir.plan import Plan
from autopar.ir.plan_parts import BlockCost
from autopar.ir.sharding_table import collectives_text, grouped_rows
from autopar.ir.table import ranks_text, stage_ends
from autopar.ir.units import COUNT, TIME, plural, text, unit_of
from autopar.tools.report.html.palette import position_colour, text_colour
from autopar.tools.report.html.plots import BAR_WIDTH, Figure, axis, hover, layout, plain, row_axis, rows_height

SUMS_UP = 1e-3  # relative difference from a stage's time below which its blocks count as its own
ONLY_ROW_PIXELS = 230  # height of the figure of one stage, whose names stand upright
MAX_LEGEND = 12
MAX_NAMED_ROWS = 32


def model_figure(plan: Plan) -> Figure:
    """A bar for each block, as wide as its time, or for each stage where the blocks' times are not known."""
    blocks = blocks_of(plan) or whole_stages(plan)
    stages, pp = len(plan.stages), plan.mesh.pp
    slowest = max(s.forward_seconds + s.backward_seconds for s in plan.stages)
    unit, unit_seconds = unit_of(slowest, TIME)
    traces = [trace(plan, position, blocks, unit_seconds) for position in range(pp)]
    several = stages > 1
    names = [f"stage {s}" if stages <= MAX_NAMED_ROWS else str(s) for s in range(stages)]
    return Figure(
        "model",
        f"The model's {plural(len(blocks), 'block')} on {plural(stages, 'stage')}, each as wide as its time.",
        traces,
        layout(
            rows_height(stages) if several else ONLY_ROW_PIXELS,
            barmode="overlay",
            showlegend=1 < pp <= MAX_LEGEND,
            uniformtext={"mode": "hide", "minsize": 11},
            xaxis=axis(f"forward and backward, {unit}", range=[0, slowest / unit_seconds]),
            yaxis=row_axis(names, showticklabels=several),
        ),
        "Blocks in the order in which they run"
        + (", a row for each stage, coloured by the ranks that run it" if several else "")
        + (" and paler in their earlier chunks" if plan.chunks > 1 else "")
        + ". A bar is as wide as a microbatch's forward and backward take on one rank; its label has the sharding.",
    )  # fmt: skip


def trace(plan: Plan, position: int, blocks: Sequence[BlockCost], unit_seconds: float) -> Mapping[str, Any]:
    """Bars of the blocks at a pipeline position."""
    starts, row = dict.fromkeys(range(len(plan.stages)), 0.0), []
    for block in blocks:
        if plan.placement.position(block.stage) == position:
            row.append((block, starts[block.stage]))
        starts[block.stage] += block.seconds / unit_seconds
    row.sort(key=lambda item: -item[0].stage)  # the legend has the colour of the first bar: not a pale one
    ranks, pp = plan.mesh.ranks(position), plan.mesh.pp
    colours = [position_colour(position, pp, block.stage // pp, plan.chunks) for block, _ in row]
    return {
        "type": "bar",
        "orientation": "h",
        "name": f"rank{'s' if len(ranks) > 1 else ''} {ranks_text(ranks)}",
        "x": [block.seconds / unit_seconds for block, _ in row],
        "base": [start for _, start in row],
        "y": [block.stage for block, _ in row],
        "width": BAR_WIDTH,
        "text": [plain(block.name) for block, _ in row],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "insidetextfont": {"color": list(map(text_colour, colours))},
        **hover([[block.name, *lines(plan, block)] for block, _ in row]),
        "marker": {
            "color": colours,
            "line": {"color": "white", "width": 1},
        },
    }


def lines(plan: Plan, block: BlockCost) -> Iterator[str]:
    """Lines about a block: its ranks, times and parameters, how it is sharded, and its collectives."""
    stage = plan.stages[block.stage]
    yield f"stage {block.stage}, {'ranks' if len(stage.ranks) > 1 else 'rank'} {ranks_text(stage.ranks)}"
    yield f"forward {text(block.forward_seconds, TIME)}, backward {text(block.backward_seconds, TIME)}"
    yield f"{text(block.params, COUNT)} parameters"
    if stage.recompute != "none":
        segments = "" if stage.recompute == "all" else " segments"
        yield f"recomputes {stage.recompute_text}{segments} of the stage"
    if (gathered := plan.param_blocks.get(block.name)) is not None:
        yield f"parameters gathered {'once a step' if gathered == 'kept' else 'before each use'} (ZeRO-3)"
    if plan.mesh.tp == 1:
        yield "not sharded (tp 1)"
        return
    found = shardings_inside(plan.blocks, block.name)
    rows = [row for sharding in found for row in grouped_rows(sharding.rows)]
    yield f"over {plan.mesh.tp} ranks:" if rows else f"whole on each of {plan.mesh.tp} ranks"
    yield from (f"{modules}: {how}" for modules, how in rows)
    for direction in ("forward", "backward"):
        sent = [c for sharding in found for c in sharding.collectives if c.direction == direction]
        if sent:
            yield f"{direction}: {collectives_text(sent)}"


def blocks_of(plan: Plan) -> Sequence[BlockCost]:
    """The plan's blocks; none if it has none, or if it was edited so that they are no longer its stages'."""
    for s, (stage, (first, last)) in enumerate(zip(plan.stages, stage_ends(plan.stages))):
        own = [block for block in plan.block_costs if block.stage == s]
        seconds = stage.forward_seconds + stage.backward_seconds
        if abs(sum(block.seconds for block in own) - seconds) > SUMS_UP * seconds:
            return ()
        for end in (first, last):
            known = [block for block in plan.block_costs if inside(end, block.name)]
            if known and all(block.stage != s for block in known):
                return ()
    return plan.block_costs


def whole_stages(plan: Plan) -> Sequence[BlockCost]:
    """Each stage as one block."""
    return [
        BlockCost(f"{first} … {last}" if first != last else first, s, stage.params, stage.forward_seconds,
                  stage.backward_seconds)
        for s, (stage, (first, last)) in enumerate(zip(plan.stages, stage_ends(plan.stages)))
    ]  # fmt: skip
