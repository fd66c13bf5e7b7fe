"""The printed plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import hypot

from rich.console import RenderableType
from rich.table import Column, Table

from autopar.ir.html import WIDTH, html_of
from autopar.ir.layout import pattern_of
from autopar.ir.microbatches import microbatches_text
from autopar.ir.names import inside
from autopar.ir.plan_parts import (
    COMMUNICATION,
    ONE_DEVICE,
    TIMED,
    Alternative,
    Basis,
    Measuring,
    PlanView,
    PriceSource,
    Stage,
    StepPart,
    replica_text,
)
from autopar.ir.sharding_table import sharding_parts
from autopar.ir.text import NONE, labelled, numeric, plain_table, rendered, wrapped
from autopar.ir.units import BYTES, COUNT, TIME, column, percent, plural, text

BAR_CELLS = 8
GAP = 2  # columns between two cells
MIN_NAME_COLUMNS = 12  # columns for module names, however narrow the terminal is
BAR_NAME_COLUMNS = 18  # columns for module names without which time bars are left out
DROPPED_IF_NARROW = ("sends", "params")  # columns of stages that leave room for module names
NEARLY_FULL = 0.9  # share of a device's memory from which a stage is marked
NOTABLE_SHARE = 0.01  # share of a step from which reduction and optimizer have a row
TIME_BAR = "F █ B ░"
SOURCES: Mapping[PriceSource, str] = {
    "analytic": "", "measured": ", operations timed", "mixed": ", some operations timed"
}  # fmt: skip
BASES: Mapping[Basis, str] = {"steps": "measured steps", "measured": "measured one by one", "assumed": "assumed"}
# What narrows a part of the step's error, by the part and what it rests on.
REMEDIES: Mapping[tuple[str, Basis], str] = {
    ("compute", "assumed"): "`autopar profile` on such a machine measures it",
    ("compute", "measured"): "`autopar bench --calibrate` on such a machine narrows it",
    ("links", "assumed"): "`autopar profile` on such a machine measures it",
    ("links", "measured"): "`autopar profile` with all devices of a node narrows it",
    ("network", "assumed"): "`autopar profile` under torchrun measures it",
}


def plan_text(plan: PlanView, width: int = 100, color: bool = False) -> str:
    """The plan as a table for people, ``width`` columns wide, with terminal colours if ``color``."""
    return rendered(plan_parts(plan, width), width, color)


def plan_parts(plan: PlanView, width: int) -> Sequence[RenderableType]:
    """Parts of the printed plan, for so many columns."""
    parts: list[RenderableType] = [header(plan), "", stage_table(plan, width), ""]
    if plan.blocks:
        parts += [*sharding_parts(plan), ""]
    parts.append(footer(plan))
    if plan.alternatives:
        parts += ["", alternative_table(plan)]
    return parts


def plan_html(plan: PlanView) -> str:
    """The plan as HTML, for notebooks."""
    return html_of(plan_parts(plan, WIDTH))


def header(plan: PlanView) -> Table:
    """Rows about the model, its inputs, the machine and the mesh."""
    model, hardware, mesh = plan.model, plan.hardware, plan.mesh
    arguments = ", ".join(f"{k}={v!r}" for k, v in model.kwargs.items())
    name = f"{model.name}({arguments})" if arguments else model.name
    inputs = ", ".join(f"{i.name} {i.dtype}{list(i.shape)}" for i in model.inputs)
    return labelled(
        [
            ("model", f"{name}, {text(model.num_params, COUNT)} parameters"),
            ("inputs", inputs),
            ("batch", batch_text(plan)),
            (
                "devices",
                f"{mesh.devices} × {hardware.device}, {text(hardware.memory_bytes, BYTES)} each, over {hardware.link} "
                f"(cost model {hardware.name}{SOURCES[hardware.cost]})",
            ),
            (
                "mesh",
                f"{mesh}{replica_text(plan)}, schedule {schedule_text(plan)}, {precision_text(plan)}, "
                f"bubble {percent(plan.prediction.bubble_fraction)}",
            ),
        ]
    )


def precision_text(plan: PlanView) -> str:
    """``bf16``, or ``bf16, channels_last``."""
    return plan.precision + (", channels_last" if plan.channels_last else "")


def schedule_text(plan: PlanView) -> str:
    """``1f1b``, or ``interleaved, 2 chunks a rank``."""
    return plan.schedule + (f", {plan.chunks} chunks a rank" if plan.chunks > 1 else "")


def stage_table(plan: PlanView, width: int) -> Table:
    """A row per stage: its modules, times, memory and messages.

    Where ranks have several stages, each stage shows its part of the rank's peak; a row is marked when the rank is
    full.
    """
    stages, pp = plan.stages, plan.mesh.pp
    slowest = max(s.forward_seconds + s.backward_seconds for s in stages)
    peaks = column([s.peak_bytes for s in stages], BYTES)
    stage_shares = [s.peak_bytes / plan.hardware.memory_bytes for s in stages]
    own = [plan.placement.stages(plan.placement.position(i)) for i in range(len(stages))]
    rank_shares = [sum(stage_shares[s] for s in row) for row in own]
    chunks = {"chunk": [str(i // pp) for i in range(len(stages))]} if plan.chunks > 1 else {}
    recompute = {"recompute": [s.recompute_text for s in stages]} if any(s.recompute != "none" for s in stages) else {}
    shares = [percent(share, 0) for share in stage_shares]
    sends = column([s.send_bytes for s in stages], BYTES)
    numbers = {
        "stage": [str(i) for i in range(len(stages))],
        "ranks": [ranks_text(s.ranks) for s in stages],
        **chunks,
        "params": column([s.params for s in stages], COUNT),
        "forward": column([s.forward_seconds for s in stages], TIME),
        "backward": column([s.backward_seconds for s in stages], TIME),
        TIME_BAR: [time_bar(s, slowest) for s in stages],
        **recompute,
        "peak memory": [f"{peak} {share:>{max(map(len, shares))}}" for peak, share in zip(peaks, shares)],
        "sends": [sent if s.send_bytes else NONE for s, sent in zip(stages, sends)],
    }

    def name_columns() -> int:
        """Columns that are left for the modules' names."""
        return width - sum(GAP + max(map(len, (title, *cells))) for title, cells in numbers.items())

    if name_columns() < BAR_NAME_COLUMNS:
        del numbers[TIME_BAR]
    for title in DROPPED_IF_NARROW:  # Rich would shorten all titles and numbers
        if name_columns() < MIN_NAME_COLUMNS:
            del numbers[title]
    name_width = name_columns()
    columns = numeric(*numbers, no_wrap=True)
    if TIME_BAR in numbers:
        columns[list(numbers).index(TIME_BAR)] = Column(TIME_BAR, style="cyan", no_wrap=True)
    names_at = 1 + list(numbers).index("chunk" if chunks else "ranks")
    columns.insert(names_at, Column("from … to", overflow="fold"))
    table = plain_table(*columns)
    for i, (first, last) in enumerate(stage_ends(stages)):
        where = wrapped(f"{first} … {last}" if first != last else first, max(name_width, MIN_NAME_COLUMNS))
        row = [cells[i] for cells in numbers.values()]
        row.insert(names_at, where)
        table.add_row(*row, style="yellow" if rank_shares[i] > NEARLY_FULL else "")
    return table


def footer(plan: PlanView) -> Table:
    """Rows about the prediction, its bound, the solver and the exceptions."""
    prediction = plan.prediction
    seconds, rate, error = prediction.step_seconds, prediction.samples_per_second, prediction.error
    band = f"±{percent(error, 0)}"
    rows = [("step", f"{text(seconds, TIME)} {band}, {rate:,.1f} samples/s {band} (predicted)")]
    rows += one_device_rows(plan)
    rows += basis_rows(prediction.parts)
    rows += step_parts(seconds, prediction.reduce_seconds, prediction.optimizer_seconds)
    rows += param_rows(plan)
    rows += measuring_rows(plan.solver.measuring)
    if plan.chunks > 1:
        fullest = max(range(plan.mesh.devices), key=lambda rank: prediction.peak_bytes[rank])
        peak = prediction.peak_bytes[fullest]
        share = percent(peak / plan.hardware.memory_bytes, 0)
        rows.append(
            ("memory", f"rank {fullest} is the fullest: {text(peak, BYTES)}, {share}, all of its chunks together")
        )
    if plan.bound_by:
        rows.append(("bound by", plan.bound_by))
    rows += solver_rows(plan)
    if plan.exceptions:
        listed = ", ".join(f"{name} on {stage}" for name, stage in list(plan.exceptions.items())[:3])
        more = f", {len(plan.exceptions) - 3} more" if len(plan.exceptions) > 3 else ""
        rows.append(("exceptions", f"{plural(len(plan.exceptions), 'operation')} outside their range: {listed}{more}"))
    return labelled(rows)


def param_rows(plan: PlanView) -> list[tuple[str, str]]:
    """Labelled line: the blocks whose parameters are gathered before each use, and those that are kept (ZeRO-3)."""
    words = {"gathered": "gathered before each use", "kept": "gathered once a step"}
    texts: list[str] = []
    for state, word in words.items():
        names = [name for name, own in plan.param_blocks.items() if own == state]
        counts = Counter(map(pattern_of, names))
        listed = (f"{pattern} ({n})" if n > 1 else pattern_name(pattern, names) for pattern, n in counts.items())
        texts += [f"{word}: {', '.join(listed)}"] if names else []
    return [("parameters", "; ".join(texts))] if texts else []


def pattern_name(pattern: str, names: Sequence[str]) -> str:
    """The only name that fits a pattern."""
    return next(name for name in names if pattern_of(name) == pattern)


def one_device_rows(plan: PlanView) -> list[tuple[str, str]]:
    """Labelled line: one device is predicted to be faster than the plan's; none where it is not, or does not fit."""
    step = plan.prediction.step_seconds
    alone = next((a.step_seconds for a in plan.alternatives if a.label == ONE_DEVICE), None)
    if alone is None or alone >= step or text(alone, TIME) == text(step, TIME):
        return []
    return [("", f"one device is predicted to be faster: {text(alone, TIME)} instead of {text(step, TIME)}")]


def basis_rows(parts: Sequence[StepPart]) -> list[tuple[str, str]]:
    """Labelled line: what the step's error is from, and the command that would narrow its largest part."""
    named: dict[str, list[StepPart]] = {}
    for part in parts:
        named.setdefault(part.name if part.name in (*COMMUNICATION, TIMED) else "compute", []).append(part)
    errors = {name: hypot(*(part.error for part in same)) for name, same in named.items()}
    bases: dict[str, Basis] = {name: max(same, key=lambda part: part.error).basis for name, same in named.items()}
    largest = sorted((name for name in errors if errors[name] >= NOTABLE_SHARE), key=lambda name: -errors[name])
    if not largest:
        return []
    listed = ", ".join(f"{name} ±{percent(errors[name], 0)} ({BASES[bases[name]]})" for name in largest)
    remedy = REMEDIES.get((largest[0], bases[largest[0]]), "")
    return [("", f"rests on {listed}{'; ' * bool(remedy)}{remedy}")]


def measuring_rows(measuring: Measuring | None) -> list[tuple[str, str]]:
    """Labelled line: the regions that were timed to decide between plans, and what that did to the choice."""
    if measuring is None:
        return []
    if not measuring.num_regions:
        reason = "their errors cannot turn the choice" if measuring.has_rivals else "no other plan fits"
        return [("measured", f"no operations: {reason}")]
    took = f"{measuring.seconds:.0f} s of a {measuring.budget_seconds:g} s budget"
    earlier, timed = measuring.num_earlier, measuring.num_timed
    known = f", {'all' if earlier == timed else earlier} of them earlier" if earlier else ""
    now = f"{',' * bool(earlier)} in {took}" if earlier < timed or not timed else ""
    stayed = measuring.before == measuring.after
    choice = f"stayed {measuring.after}" if stayed else f"changed from {measuring.before} to {measuring.after}"
    counted = f"{timed} of {plural(measuring.num_regions, 'region')}{known}{now}"
    return [("measured", f"{counted}; the choice {choice}")]


def solver_rows(plan: PlanView) -> list[tuple[str, str]]:
    """Labelled lines: what is proven of the step, over all cuts and shardings of the plan's mesh and schedule, and of
    other meshes."""
    others = [("", text) for text in [other_meshes_text(plan)] if text]
    solver, mesh = plan.solver, plan.mesh
    if mesh.pp == mesh.tp == 1:
        return [("solver", "nothing to cut or to shard on this mesh"), *others]
    done = f"{solver.name}: {solver.status}, certified gap {percent(solver.gap, 2)}, {solver.seconds:,.2f} s"
    if solver.balance != "time":
        return [("solver", f"{done}, balancing {solver.balance}")]
    what = {
        "cuts": "cuts of this mesh" if mesh.tp == 1 else "cuts of these shardings",
        "shardings": "shardings of this mesh",
        "shardings then cuts": "shardings and cuts of this mesh",
    }[solver.method]
    if solver.method == "cuts" and mesh.pp == 1:
        return [("solver", done), *others]
    least = text(plan.prediction.step_seconds * (1 - solver.gap), TIME)
    return [("solver", done), ("", f"no {what} take less than {least}"), *others]


def other_meshes_text(plan: PlanView) -> str:
    """Sentence about the meshes that the plan does not have: what is proven, and how many were given up without proof;
    empty where nothing is known."""
    others = plan.solver.other_meshes
    if others is None:
        return ""
    total, bound = others.num_slower + others.num_open, others.bound_seconds
    known = f", none takes less than {text(bound, TIME)}" if bound is not None else ""
    if not others.num_open:
        return f"{plural(total, 'other mesh', 'es')}: all proven slower{known}"
    slower = f"{others.num_slower} proven slower, " if others.num_slower else ""
    return f"{plural(total, 'other mesh', 'es')}: {slower}{others.num_open} given up without proof{known}"


def step_parts(step_seconds: float, reduce_seconds: float, optimizer_seconds: float) -> list[tuple[str, str]]:
    """Labelled line: the step as a sum of pipeline, reduction and optimizer; none if the last two are too short."""
    ends = reduce_seconds + optimizer_seconds
    if ends < NOTABLE_SHARE * step_seconds:
        return []
    parts = {"pipeline": step_seconds - ends, "reduction": reduce_seconds, "optimizer": optimizer_seconds}
    return [("", " + ".join(f"{name} {text(seconds, TIME)}" for name, seconds in parts.items() if seconds > 0))]


def alternative_table(plan: PlanView, numbered: bool = False) -> Table:
    """A row per plan that was considered and not chosen, with numbers from 1 on if ``numbered``."""
    table = plain_table(
        *(numeric("") if numbered else []), Column("rejected", no_wrap=True), *numeric("step", no_wrap=True),
        *numeric("against this plan"), Column("", overflow="fold"),
    )  # fmt: skip
    best = plan.prediction.step_seconds
    for number, alternative in enumerate(plan.alternatives, start=1):
        seconds = text(alternative.step_seconds, TIME) if alternative.step_seconds is not None else NONE
        first = [str(number)] if numbered else []
        table.add_row(*first, alternative.label, seconds, comparison_text(alternative, best), alternative.note)
    return table


def batch_text(plan: PlanView) -> str:
    """Microbatches of the batch: ``64 in 8 microbatches of 8``; with several replicas, of each replica."""
    dp = plan.mesh.dp
    cut = microbatches_text(plan.batch // dp, plan.microbatches)
    return f"{plan.batch:,} in {cut}" + (f" on each of {dp} replicas" if dp > 1 else "")


def stage_ends(stages: Sequence[Stage]) -> list[tuple[str, str]]:
    """First and last module of each stage; the operation itself where a cut lies inside that module."""
    ends = []
    for i, stage in enumerate(stages):
        before = module_of(stages[i - 1].last) if i else ""
        after = module_of(stages[i + 1].first) if i + 1 < len(stages) else ""
        first, last = module_of(stage.first), module_of(stage.last)
        ends.append((stage.first if inside(before, first) else first, stage.last if inside(after, last) else last))
    return ends


def module_of(op: str) -> str:
    """The module that an operation's name starts with; the operation itself where it is in no module."""
    return op.rpartition(".")[0] or op


def ranks_text(ranks: Sequence[int]) -> str:
    """``3``, or ``4–7`` for consecutive ranks."""
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}–{ranks[-1]}"


def time_bar(stage: Stage, slowest_seconds: float) -> str:
    """Forward and backward time against the slowest stage."""
    share = BAR_CELLS / slowest_seconds if slowest_seconds else 0.0
    both = round((stage.forward_seconds + stage.backward_seconds) * share)
    forward = min(both, round(stage.forward_seconds * share))
    return ("█" * forward + "░" * (both - forward)).ljust(BAR_CELLS)


def comparison_text(alternative: Alternative, best_seconds: float) -> str:
    """An alternative's step time relative to the chosen plan's."""
    if alternative.step_seconds is None or not best_seconds:
        return NONE
    ratio = alternative.step_seconds / best_seconds
    if ratio >= 2:
        return f"{ratio:.1f} × as long"
    return f"{percent(abs(ratio - 1))} {'slower' if ratio >= 1 else 'faster'}"
