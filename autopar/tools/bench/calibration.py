"""Errors of predictions: the chosen plan and the best plan of every other mesh, predicted against measured."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path

from pydantic import TypeAdapter, ValidationError, with_config

from autopar.errors import InfeasibleError, UsageError
from autopar.ir.mesh import STRICT, Mesh
from autopar.ir.plan import Plan
from autopar.ir.plan_parts import COMMUNICATION, PriceSource
from autopar.ir.units import plural
from autopar.tools.bench.baselines.registry import BASELINES, BaselineVariant
from autopar.tools.bench.calibration_point import CalibrationPoint, ErrorBand
from autopar.tools.bench.description import outcome_text, plan_label
from autopar.tools.bench.request import BenchRequest, machine_for
from autopar.tools.bench.row import BenchRow
from autopar.tools.bench.run import Bench

SCHEMA_VERSION = 1
MIN_BAND = 0.001  # nothing measured is exact


@with_config(STRICT)
@dataclass(frozen=True)
class Calibration:
    """Measured plans of one machine under one cost model; a JSON file.

    Args:
        cost: whether operations were priced by the cost model's formulas or by measurements.
        memory: what the measured bytes count.
        commands: that measured the points.
    """

    machine: str
    hardware: str
    cost: PriceSource
    memory: str
    commands: tuple[str, ...]
    points: tuple[CalibrationPoint, ...]
    schema_version: int = SCHEMA_VERSION

    @property
    def time(self) -> ErrorBand:
        return ErrorBand.of([point.time_error for point in self.points])

    @property
    def peaks(self) -> ErrorBand:
        return ErrorBand.of([error for point in self.points for error in point.memory_errors])

    def merged_with(self, later: Calibration) -> Calibration:
        """This calibration with the points of a later one; a later point replaces an earlier one of the same plan.

        Raises:
            UsageError: the later one is of another machine or cost model.
        """
        for what, earlier, now in (
            ("machine", self.machine, later.machine), ("cost model", self.hardware, later.hardware),
            ("source of costs", self.cost, later.cost),
        ):  # fmt: skip
            if earlier != now:
                raise UsageError(
                    f"The calibration so far is of another {what}: {earlier} there, {now} here. Write to another file."
                )
        points = {point.key: point for point in (*self.points, *later.points)}
        commands = tuple(dict.fromkeys((*self.commands, *later.commands)))
        return replace(later, commands=commands, points=tuple(points.values()))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    def _repr_html_(self) -> str:
        """The printed calibration, as notebooks show it."""
        from autopar.ir.html import html_of
        from autopar.tools.report.bench_table import calibration_parts

        return html_of(calibration_parts(self))

    @staticmethod
    def load(path: Path) -> Calibration:
        """The calibration in a file.

        Raises:
            UsageError: the file cannot be read, or holds something else.
        """
        try:
            data = json.loads(path.read_text())
            calibration = TypeAdapter(Calibration).validate_python(data)
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, ValidationError) as error:
            first = str(error).splitlines()[0]
            raise UsageError(f"{path} is no calibration to add to: {first}. Write to another file.") from error
        if calibration.schema_version != SCHEMA_VERSION:
            raise UsageError(
                f"{path} has schema_version {calibration.schema_version}, this autopar adds to {SCHEMA_VERSION}. Write "
                "to another file."
            )
        return calibration


def calibrate(
    request: BenchRequest,
    progress: Callable[[str], None] = lambda text: None,
    keep: Callable[[Calibration], None] = lambda calibration: None,
    earlier: Calibration | None = None,
) -> Calibration:
    """Run the chosen plan and the best plan of every other mesh, each in its own processes.

    Prices are the cost model's, or with ``cost="measured"`` measurements; never some of each.

    Args:
        progress: called with a line of text when a plan starts and ends.
        keep: called with the points so far after every plan.
        earlier: a calibration to which the new points are added.

    Raises:
        UsageError, InfeasibleError, TraceError: there is no plan.
        UsageError: ``earlier`` is of another machine, or no plan ran; the message has the first plan's reason.
    """
    machine = machine_for(request)
    cost = "measured" if request.constraints.get("cost") == "measured" else "analytic"
    request = replace(request, only=("autopar",), constraints={**request.constraints, "cost": cost})
    with tempfile.TemporaryDirectory(prefix="autopar-bench-") as folder:
        bench = Bench(request, machine, Path(folder), progress, lambda result: None)
        empty = bench.result()
        memory = empty.memory if machine.device_type == "cuda" else "most bytes in tensors"
        priced = bench.plan.hardware
        calibration = Calibration(empty.machine, priced.name, priced.cost, memory, (request.command,), ())
        if earlier is not None:
            calibration = earlier.merged_with(calibration)
        plans = [bench.plan, *other_meshes(bench, progress)]
        failures: list[str] = []
        for number, plan in enumerate(plans, start=1):
            head = f"[{number}/{len(plans)}] {plan_label(plan)}"
            progress(f"{head}: running")
            row = bench.run_variant(BASELINES["autopar"], BaselineVariant("", {}), plan)
            progress(f"{head}: {outcome_text(row)}")
            if row.median_seconds is None:
                failures.append(f"{plan_label(plan)}: {row.reason}")
            elif plan.hardware.cost != calibration.cost:
                failures.append(f"{plan_label(plan)}: its operations are not priced as the first plan's were")
                progress(f"{head}: left out, its operations are priced differently")
            else:
                point = calibration_point(plan, row, row.median_seconds)
                calibration = calibration.merged_with(replace(calibration, points=(point,)))
                keep(calibration)
        if len(failures) == len(plans):
            raise UsageError(f"No plan ran, so there is nothing to compare. {failures[0]}")
        return calibration


def other_meshes(bench: Bench, progress: Callable[[str], None]) -> Iterator[Plan]:
    """The best plan of every mesh but the chosen one's, under the same constraints.

    ``progress`` is called with the reason if a mesh has no plan.
    """
    devices, constraints = bench.plan.mesh.devices, bench.constraints
    for tp in range(1, devices + 1):
        for pp in range(1, devices // tp + 1):
            mesh = Mesh(pp, tp, devices // tp // pp)
            axes = {"pp": mesh.pp, "tp": mesh.tp, "dp": mesh.dp}
            is_allowed = all(constraints.get(axis, size) in (None, size) for axis, size in axes.items())
            if mesh.devices != devices or mesh == bench.plan.mesh or not is_allowed:
                continue
            try:
                yield bench.make_plan(devices, **{**constraints, **axes})
            except (InfeasibleError, UsageError) as error:
                progress(f"{mesh}: left out, {error}")


def calibration_point(plan: Plan, row: BenchRow, seconds: float) -> CalibrationPoint:
    """The point of a plan and its row.

    Args:
        seconds: the row's median step time.
    """
    assert row.pipeline is not None
    return CalibrationPoint(
        model=plan.model.name,
        batch=plan.batch,
        precision=plan.precision,
        plan=plan_label(plan),
        mesh=plan.mesh,
        predicted_seconds=plan.prediction.step_seconds,
        measured_seconds=seconds,
        predicted_bytes=plan.prediction.peak_bytes,
        measured_bytes=row.pipeline.tensor_bytes or row.peak_bytes,
        parts=tuple(part.name for part in plan.prediction.parts if part.name not in COMMUNICATION),
    )


def band_text(calibration: Calibration, day: date) -> str:
    """The [calibration] table of a cost model, with which plans know the largest error of these step times."""
    plans = plural(len(calibration.points), "plan")
    worst = max(calibration.time.worst, MIN_BAND)
    covers = sorted({name for point in calibration.points for name in point.parts})
    return (
        f"[calibration]\ncovers = {json.dumps(covers)}\n"
        f'{calibration.cost} = {{ value = {worst:.3g}, unit = "1", error = 0.0, '
        f'date = {day.isoformat()}, source = "measured: autopar bench --calibrate, worst of {plans}" }}'
    )
