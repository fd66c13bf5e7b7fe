"""Printed result of ``autopar explain``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import RenderableType
from rich.table import Column, Table

from autopar.ir.plan import Plan
from autopar.ir.plan_parts import Alternative, recomputing_text, replica_text
from autopar.ir.table import GAP, NEARLY_FULL, batch_text, comparison_text, precision_text, ranks_text, schedule_text
from autopar.ir.text import NONE, labelled, numeric, plain_table, wrapped
from autopar.ir.units import BYTES, TIME, column, decimals, in_unit, percent, text, unit_of
from autopar.solve.result.step_breakdown import StepBreakdown
from autopar.tools.explain.advice import Explanation
from autopar.tools.explain.breakdown import BUFFERS, Breakdown, Position
from autopar.tools.explain.diff import Change, Difference
from autopar.tools.explain.why_not_result import WhyNotResult

ROUNDING = 1e-9  # share of a step below which a part counts as absent
LONGEST_LIST = 24  # rows of shardings that differ
# Titles in a terminal that is too narrow for whole words.
HYPHENATED = {
    "recomputation": "recom-\nputation",
    "collectives": "collec-\ntives",
    "transfers": "trans-\nfers",
    "reduction": "reduc-\ntion",
    "optimizer": "opti-\nmizer",
}


def explanation_parts(plan: Plan, explanation: Explanation, width: int) -> Sequence[RenderableType]:
    """Bound of the plan, then a row per position for its step and for its memory, then suggestions."""
    breakdown = explanation.breakdown
    step, error = breakdown.step_seconds, percent(plan.prediction.error, 0)
    lines = [
        ("bound by", explanation.headline),
        ("step", f"{text(step, TIME)} ±{error} (predicted)"),
        ("plan", described(plan)),
        *(("recomputes", recomputing) for recomputing in [recomputing_text(plan.stages)] if recomputing),
        *(("note", note) for note in explanation.notes),
    ]
    parts: list[RenderableType] = [labelled(lines), "", time_table(breakdown, width)]
    parts += [units_note(breakdown), "", memory_table(breakdown), *memory_notes(breakdown)]
    if explanation.suggestions:
        parts += ["", help_table(explanation, step)]
    return parts


def described(plan: Plan) -> str:
    """A plan in one line."""
    return (
        f"{plan.model.name}, {plan.mesh}{replica_text(plan)}, {schedule_text(plan)}, {precision_text(plan)}, "
        f"batch {batch_text(plan)}, on {plan.hardware.device} (cost model {plan.hardware.name})"
    )


def time_table(breakdown: Breakdown, width: int) -> Table:
    """A row per position: seconds of each part and its share of the step; parts absent everywhere have no column."""
    names = shown(*(p.spent for p in breakdown.positions))
    unit = unit_of(breakdown.step_seconds, TIME)
    digits = decimals(breakdown.step_seconds / unit[1])

    def number(seconds: float) -> str:
        return f"{seconds / unit[1]:,.{digits}f}"

    rows = []
    for position in breakdown.positions:
        spent = position.spent.by_name
        cells = (f"{number(spent[n])}\n{share(spent[n], breakdown.step_seconds)}" for n in names)
        rows.append([*of_position(position), *cells, number(position.spent.seconds)])
    titles = ["ranks", "stages", *names, "step"]
    texts = [[title, *"\n".join(cells).split("\n")] for title, *cells in zip(titles, *rows)]
    if sum(max(map(len, t)) + GAP for t in texts) - GAP > width:
        titles = [HYPHENATED.get(title, title) for title in titles]
    table = plain_table(*numeric(*titles))
    for row in rows:
        table.add_row(*row)
    return table


def share(seconds: float, step_seconds: float) -> str:
    """Part of the step in percent."""
    return percent(seconds / step_seconds) if step_seconds else NONE


def shown(*parts: StepBreakdown) -> Sequence[str]:
    """Names of the parts that are present in some breakdown, and always compute."""
    return [n for n in parts[0].by_name if n == "compute" or any(p.by_name[n] > ROUNDING * p.seconds for p in parts)]


def of_position(position: Position) -> Sequence[str]:
    """Ranks and stages of a position, as texts."""
    return ranks_text(position.ranks), ", ".join(map(str, position.stages))


def units_note(breakdown: Breakdown) -> str:
    """Line below `time_table`."""
    return f"in {unit_of(breakdown.step_seconds, TIME)[0]} and % of the step"


def memory_notes(breakdown: Breakdown) -> Sequence[str]:
    """Line below `memory_table`, if the plan has memory figures of its stages."""
    if not any(p.memory.largest for p in breakdown.positions):
        return ()
    return ("* the largest part; gradients count with the weights, state is the optimizer's",)


def memory_table(breakdown: Breakdown) -> Table:
    """A row per position: peak, spare memory, and the peak's parts with the largest one marked."""
    memories = [p.memory for p in breakdown.positions]
    names = [n for n in memories[0].by_name if n != BUFFERS or any(m.buffer_bytes for m in memories)]
    columns = numeric("ranks", "stages", "peak memory", "spare", *names, overflow="fold")
    columns[2].no_wrap = True
    table = plain_table(*columns)
    peaks, spare = column([m.peak_bytes for m in memories], BYTES), column([m.spare_bytes for m in memories], BYTES)
    for i, (position, memory) in enumerate(zip(breakdown.positions, memories)):
        parts = [
            f"{text(memory.by_name[n], BYTES)}{' *' if n == memory.largest else '  '}" for n in names if memory.by_name
        ]
        style = "yellow" if memory.share > NEARLY_FULL else ""
        table.add_row(
            *of_position(position), f"{peaks[i]} {percent(memory.share, 0):>5}", spare[i], *parts, style=style
        )
    return table


def help_table(explanation: Explanation, step_seconds: float) -> Table:
    """A row per suggestion: the resulting step, compared with the plan's."""
    table = plain_table("what would help", *numeric("step", "", no_wrap=True))
    for item in explanation.suggestions:
        row = Alternative(item.text, item.step_seconds)
        table.add_row(item.text, text(item.step_seconds, TIME), comparison_text(row, step_seconds))
    return table


def answer_parts(plan: Plan, breakdown: Breakdown, answer: WhyNotResult) -> Sequence[RenderableType]:
    """Answer to one ``--why-not``: how the best plan under the constraint compares, and both steps by activity."""
    lines = [("why not", answer.asked), ("answer", answer.text)]
    if answer.plan is None or answer.breakdown is None:
        return [labelled(lines)]
    lines.append(("plan", described(answer.plan)))
    if answer.command:
        lines.append(("get it", answer.command))
    table = spent_table(("part of the step", "this plan", answer.asked), breakdown.spent, answer.breakdown.spent)
    return [labelled(lines), "", table]


def spent_table(titles: tuple[str, str, str], before: StepBreakdown, after: StepBreakdown) -> Table:
    """Two mean breakdowns side by side: a row per part of the step, and the difference."""
    table = plain_table(Column(titles[0], no_wrap=True), *numeric(*titles[1:], "difference"))
    names = shown(before, after)
    rows = [*((n, before.by_name[n], after.by_name[n]) for n in names), ("step", before.seconds, after.seconds)]
    unit = unit_of(max(before.seconds, after.seconds), TIME)
    for name, mine, other in rows:
        change = round((other - mine) / unit[1], 2) * unit[1]
        sign = "+" if change > 0 else ""
        table.add_row(name, in_unit(mine, unit, 2), in_unit(other, unit, 2), f"{sign}{in_unit(change or 0.0, unit, 2)}")
    return table


def difference_parts(before: Plan, after: Plan, found: Difference, width: int) -> Sequence[RenderableType]:
    """Two plans side by side: settings, cuts and shardings that differ, peak memory, and parts of their steps."""
    titles = ("this plan", "the other")
    parts: list[RenderableType] = []
    if found.notes:
        parts += [labelled([("note", note) for note in found.notes]), ""]
    room = max(20, (width - 30) // 2)
    groups: Mapping[str, Sequence[Change]] = {
        "setting": found.settings, "cut": found.cuts, "split": found.shardings[:LONGEST_LIST]
    }  # fmt: skip
    for name, rows in groups.items():
        if rows:
            parts += [change_table((name, *titles), rows, room), ""]
    more = len(found.shardings) - LONGEST_LIST
    if more > 0:
        parts += [f"and {more} more that are split differently (--json lists all)", ""]
    if not any(groups.values()):
        parts += ["Both plans decide the same.", ""]
    parts += [peak_table(found), "", spent_table(("part of the step", *titles), found.before.spent, found.after.spent)]
    return parts


def change_table(titles: tuple[str, ...], rows: Sequence[Change], room: int) -> Table:
    """A row per change."""
    table = plain_table(*titles)
    for row in rows:
        table.add_row(wrapped(row.name, room), wrapped(row.before, room), wrapped(row.after, room))
    return table


def peak_table(found: Difference) -> Table:
    """A row per position: peak memory under both plans."""
    table = plain_table(*numeric("position", "ranks", "peak memory, this plan", "ranks", "the other"))
    both = (found.before.positions, found.after.positions)
    for i in range(max(map(len, both))):
        cells = []
        for positions in both:
            cells += (
                [ranks_text(positions[i].ranks), f"{text(positions[i].memory.peak_bytes, BYTES)} "
                 f"{percent(positions[i].memory.share, 0):>5}"] if i < len(positions) else [NONE, NONE]
            )  # fmt: skip
        table.add_row(str(i), *cells)
    return table
