"""The plan: which stage runs what, what that is predicted to cost, and how it was found. Saved as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError, with_config

from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.ir.layout import Layout
from autopar.ir.mesh import STRICT, Mesh
from autopar.ir.microbatches import microbatch_size
from autopar.ir.units import plural

SCHEMA_VERSION = 3

ScheduleName = Literal["forward-only", "gpipe", "1f1b", "interleaved", "interleaved-overlap"]
# The schedules of a training step under which a rank may have several chunks, the one that keeps least first.
INTERLEAVED: tuple[ScheduleName, ...] = ("interleaved", "interleaved-overlap")
RequestedSchedule = ScheduleName | Literal["auto"]
Precision = Literal["fp32", "fp64", "bf16", "fp16", "bf16-params"]
Balance = Literal["time", "params", "flops", "uniform"]
Recompute = Literal["none", "all", "auto"]  # what may be asked for; a stage has one of the first two
PriceSource = Literal["analytic", "measured"]
CostSource = PriceSource | Literal["auto"]  # what may be asked for


@with_config(STRICT)
@dataclass(frozen=True)
class InputInfo:
    """One model input at the global batch."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@with_config(STRICT)
@dataclass(frozen=True)
class ModelInfo:
    """Which model the plan is for. ``fingerprint`` must equal that of the traced graph."""

    name: str
    fingerprint: str
    num_params: int
    inputs: tuple[InputInfo, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@with_config(STRICT)
@dataclass(frozen=True)
class StageMemory:
    """What a stage takes of its rank: weights with gradients and optimizer state all the time, ``microbatch_bytes`` for
    each microbatch from its forward to its backward, and ``transient_bytes`` while it runs (0 where another stage of
    the rank takes more), with gradients that are there only while a step's one backward runs. On GPUs
    ``buffer_bytes`` are a step's inputs, memory that peers write into and read, and what libraries take, all the
    time."""

    weight_bytes: int
    microbatch_bytes: int
    transient_bytes: int
    buffer_bytes: int = 0


@with_config(STRICT)
@dataclass(frozen=True)
class Stage:
    """One pipeline stage: every operation from ``first`` to ``last`` in execution order, on ``ranks``.

    ``forward_seconds``, ``backward_seconds`` (tensor-parallel collectives included) and ``send_bytes`` (forward, to
    later stages) are of one rank and per microbatch. ``params`` counts whole parameters, however they are sharded.

    With ``recompute`` "all" the stage's operations form segments (`autopar.cost.groups.checkpoint_segments`); only what
    enters a segment is kept for the backward, which runs the segment again first: that is part of ``backward_seconds``.

    ``collective_seconds`` are what tensor-parallel collectives take of both; ``optimizer_seconds`` the update once a
    step. ``memory`` is None in plans made by hand.
    """

    first: str
    last: str
    ranks: tuple[int, ...]
    params: int
    forward_seconds: float
    backward_seconds: float
    send_bytes: int
    peak_bytes: int
    recompute: Literal["none", "all"] = "none"
    collective_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    memory: StageMemory | None = None


@with_config(STRICT)
@dataclass(frozen=True)
class Message:
    """What stage ``src`` sends straight to stage ``dst`` for each microbatch: activations to a later stage, gradients
    to an earlier one."""

    src: int
    dst: int
    num_bytes: int
    seconds: float


@with_config(STRICT)
@dataclass(frozen=True)
class Prediction:
    """Predicted cost of one training step; ``error`` is the relative band of its times.

    The step is the pipeline, then what of the gradients' reduction over replicas the last backward does not hide, then
    the optimizer with what follows it. ``peak_bytes`` has an entry per rank.
    """

    step_seconds: float
    samples_per_second: float
    bubble_fraction: float
    peak_bytes: tuple[int, ...]
    error: float
    reduce_seconds: float = 0.0
    optimizer_seconds: float = 0.0


@with_config(STRICT)
@dataclass(frozen=True)
class Collective:
    """A tensor-parallel collective of a repeated block, as often as it runs there for one microbatch.

    ``op`` is the operation (as a pattern) that it belongs to.
    """

    op: str
    kind: str
    direction: Literal["forward", "backward"]
    num_bytes: int
    seconds: float


@with_config(STRICT)
@dataclass(frozen=True)
class BlockSharding:
    """How one block of the model is sharded, for people: ``name`` is a pattern that ``count`` blocks fit.

    ``rows`` maps modules to what happens to them, such as ``rows by head / 2``.
    """

    name: str
    count: int
    rows: Mapping[str, str]
    collectives: tuple[Collective, ...] = ()


@with_config(STRICT)
@dataclass(frozen=True)
class SolverInfo:
    """How the plan was found. ``gap`` is certified: (found − bound) / found of the solver's own model.

    ``method`` says what was solved for: cuts alone, shardings and then cuts, or both at once. ``moved_share`` is by how
    much of it the simulated step became shorter when cuts were moved after that.
    """

    name: str
    status: str
    gap: float
    seconds: float
    balance: Balance = "time"
    method: str = "cuts"
    moved_share: float = 0.0


@with_config(STRICT)
@dataclass(frozen=True)
class Alternative:
    """A plan that was considered and not chosen; ``step_seconds`` is None where it does not fit."""

    label: str
    step_seconds: float | None
    note: str = ""


@with_config(STRICT)
@dataclass(frozen=True)
class HardwareInfo:
    """The machine that the plan was priced for, and whether operations were timed."""

    name: str
    device: str
    link: str
    memory_bytes: int
    cost: PriceSource = "analytic"
    device_type: str = "cpu"


@with_config(STRICT)
@dataclass(frozen=True)
class Plan:
    """A complete, runnable decision for one model, batch and machine.

    ``exceptions`` names operations that lie inside another stage's range in execution order (parallel branches).
    ``microbatches`` counts per data-parallel replica.

    ``shardings`` maps weights to the layouts (`Layout.parse`) in which ranks hold them, ``strategies`` operations to
    the factor that is split when they run (`autopar.sharding`). In both, ``*`` stands for any number in a name and a
    full name outranks a pattern; a weight that is not listed is replicated, an operation follows what it reads. Both
    are empty when tp is 1. ``blocks`` says the same for people. ``zero1``: each replica keeps the optimizer's state of
    a part of the parameters.
    """

    model: ModelInfo
    batch: int
    mesh: Mesh
    schedule: ScheduleName
    microbatches: int
    stages: tuple[Stage, ...]
    prediction: Prediction
    solver: SolverInfo
    hardware: HardwareInfo
    chunks: int = 1
    precision: Precision = "fp32"
    exceptions: Mapping[str, int] = field(default_factory=dict)
    shardings: Mapping[str, str] = field(default_factory=dict)
    strategies: Mapping[str, str] = field(default_factory=dict)
    zero1: bool = False
    blocks: tuple[BlockSharding, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    bound_by: str = ""
    messages: tuple[Message, ...] = ()
    schema_version: int = SCHEMA_VERSION

    @property
    def microbatch_size(self) -> int:
        """Samples of a replica's largest microbatch."""
        return microbatch_size(self.batch, self.mesh.dp * self.microbatches)

    @property
    def decision(self) -> str:
        """What the plan makes ranks do, on one line; without what it predicts and how it was found."""
        cuts = " | ".join(f"{stage.first} … {stage.last}" for stage in self.stages)
        moved = "".join(f", {name} on {stage}" for name, stage in sorted(self.exceptions.items()))
        sharded = sorted([*self.shardings.items(), *self.strategies.items()])
        split = f"; sharded {', '.join(f'{name} {text}' for name, text in sharded)}" if sharded else ""
        zero1 = ", ZeRO-1" if self.zero1 else ""
        chunks = f", {self.chunks} chunks a rank" if self.chunks > 1 else ""
        again = ", ".join(str(i) for i, stage in enumerate(self.stages) if stage.recompute == "all")
        recompute = f"; recomputing on stages {again}" if again else ""
        return (
            f"{self.model.fingerprint}: {self.mesh}{zero1}; {cuts}{moved}; {self.schedule}{chunks}, "
            f"{plural(self.microbatches, 'microbatch', 'es')}{split}{recompute}"
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan as JSON; a file is replaced in one piece, a link or a device (/dev/null) is written to."""
        target = Path(path)
        if target.is_symlink() or (target.exists() and not target.is_file()):
            target.write_text(self.to_json())
            return
        temporary = target.with_name(target.name + ".tmp")
        temporary.write_text(self.to_json())
        temporary.replace(target)

    @staticmethod
    def load(path: str | PathLike[str]) -> Plan:
        """The plan in a JSON file.

        Raises:
            PlanError: the file is missing, no JSON, of another schema, or a field is missing or wrong.
        """
        try:
            text = Path(path).read_text()
        except OSError as error:
            raise PlanError(f"Cannot read plan file {path}: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise PlanError(f"Plan file {path} is not text: {error.reason} at byte {error.start}.") from error
        return Plan.from_json(text, str(path))

    @staticmethod
    def from_json(text: str, where: str = "plan") -> Plan:
        """The plan in a JSON text; ``where`` names it in errors. Raises as `load`."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(
                f"{where} is not a complete JSON file: {error.msg} at line {error.lineno}, column {error.colno}. "
                "It may have been cut off; write it again with `autopar plan … -o`."
            ) from error
        if not isinstance(data, dict) or not {"mesh", "stages"} & data.keys():
            raise PlanError(
                f"{where} is JSON but not a plan: it has neither a mesh nor stages. Give a file that "
                "`autopar plan … -o` wrote."
            )
        version = data.get("schema_version")
        if version != SCHEMA_VERSION:
            raise PlanError(
                f"{where}: field schema_version is {version!r}, this autopar reads {SCHEMA_VERSION}. "
                "Plan again with this version."
            )
        try:
            plan = TypeAdapter(Plan).validate_python(data)
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
            raise PlanError(f"{where} is not a valid plan. Field " + "; field ".join(problems[:5]) + ".") from error
        plan.validate(where)
        return plan

    def validate(self, where: str = "plan") -> None:
        """Check what the fields' types cannot say.

        Raises:
            PlanError: names the field.
        """

        def fail(name: str, problem: str) -> None:
            raise PlanError(f"{where}: field {name}: {problem}")

        num_stages = self.mesh.pp * self.chunks
        mesh = self.mesh
        numbers = {"batch": self.batch, "microbatches": self.microbatches, "chunks": self.chunks}
        for name, number in (numbers | {"mesh.pp": mesh.pp, "mesh.tp": mesh.tp, "mesh.dp": mesh.dp}).items():
            if number < 1:
                fail(name, f"is {number}, must be at least 1.")
        if len(self.stages) != num_stages:
            fail("stages", f"has {len(self.stages)} entries, mesh.pp × chunks asks for {num_stages}.")
        if self.schedule == "forward-only":
            fail(
                "schedule", f"is forward-only, which has no training step; use 1f1b, {', '.join(INTERLEAVED)} or gpipe."
            )
        if self.schedule not in INTERLEAVED and self.chunks > 1:
            several = " and ".join(INTERLEAVED)
            fail("chunks", f"is {self.chunks}; under {self.schedule} each rank has one. Only {several} have several.")
        for name, table in (("shardings", self.shardings), ("strategies", self.strategies)):
            if table and mesh.tp == 1:
                fail(name, "must be empty while mesh.tp is 1.")
        for name, text in self.shardings.items():
            try:
                Layout.parse(text)
            except ValueError as error:
                fail(f"shardings.{name}", f"{error}.")
        if self.zero1 and mesh.dp == 1:
            fail("zero1", "needs replicas to share the optimizer's state; mesh.dp is 1.")
        if len(self.prediction.peak_bytes) != mesh.devices:
            fail(
                "prediction.peak_bytes",
                f"has {len(self.prediction.peak_bytes)} entries for {plural(mesh.devices, 'rank')}.",
            )
        if self.prediction.step_seconds <= 0:
            fail("prediction.step_seconds", f"is {self.prediction.step_seconds}, must be above 0.")
        if self.batch % mesh.dp:
            fail("mesh.dp", f"{mesh.dp} replicas cannot share a batch of {self.batch} evenly.")
        if self.microbatches > self.batch // mesh.dp:
            whose = "a replica's batch" if mesh.dp > 1 else "a batch"
            fail("microbatches", f"{self.microbatches} microbatches of {whose} of {self.batch // mesh.dp}.")
        for i, stage in enumerate(self.stages):
            numbers = {f.name: getattr(stage, f.name) for f in fields(stage)}
            if stage.memory is not None:
                numbers |= {f"memory.{f.name}": getattr(stage.memory, f.name) for f in fields(stage.memory)}
            for name, number in numbers.items():
                if isinstance(number, int | float) and number < 0:
                    fail(f"stages.{i}.{name}", f"is {number}, must not be negative.")
            if stage.ranks != (ranks := mesh.ranks(i % mesh.pp)):
                fail(f"stages.{i}.ranks", f"is {list(stage.ranks)}, must be {ranks[0]} to {ranks[-1]}.")
        for i, message in enumerate(self.messages):
            if message.src == message.dst or not {message.src, message.dst} <= {*range(num_stages)}:
                fail(f"messages.{i}", f"goes from stage {message.src} to {message.dst} of {num_stages}.")
            if message.num_bytes < 0 or message.seconds < 0:
                fail(f"messages.{i}", f"has {message.num_bytes} bytes and {message.seconds} s; none may be negative.")
        for name, stage_number in self.exceptions.items():
            if not 0 <= stage_number < num_stages:
                fail(f"exceptions.{name}", f"names stage {stage_number} of {num_stages}.")

    def stage_of(self, graph: Graph) -> Mapping[str, int]:
        """The stage of every operation of the training graph the plan was made for.

        Raises:
            PlanError: the plan belongs to another model, or its stages do not cover the graph in order.
        """
        if self.model.fingerprint != graph.fingerprint:
            raise PlanError(
                f"The plan is for another model: field model.fingerprint is {self.model.fingerprint} "
                f"({self.model.name}, {self.model.num_params:,} parameters), this model's is {graph.fingerprint} "
                f"({graph.model}, {graph.num_params:,} parameters). Plan again for this model."
            )
        position = {op.name: i for i, op in enumerate(graph.ops)}
        for i, stage in enumerate(self.stages):
            for name in ("first", "last"):
                if getattr(stage, name) not in position:
                    raise PlanError(
                        f"Plan field stages.{i}.{name}: the model has no operation {getattr(stage, name)!r}."
                    )
        bounds = [(position[s.first], position[s.last]) for s in self.stages]
        if bounds[0][0] != 0 or bounds[-1][1] != len(graph.ops) - 1:
            raise PlanError("Plan field stages: the first stage must start at the model's first operation "
                            f"({graph.ops[0].name}) and the last end at its last ({graph.ops[-1].name}).")  # fmt: skip
        for i, (low, high) in enumerate(bounds):
            if low > high:
                raise PlanError(f"Plan field stages.{i}: first ({self.stages[i].first}) comes after last.")
        for i, (here, there) in enumerate(pairwise(bounds)):
            if there[0] != here[1] + 1:
                raise PlanError(
                    f"Plan field stages.{i + 1}.first: {self.stages[i + 1].first} does not follow "
                    f"stages.{i}.last ({self.stages[i].last}); the next operation is {graph.ops[here[1] + 1].name}."
                    if here[1] + 1 < len(graph.ops)
                    else f"Plan field stages.{i}.last: nothing is left for stage {i + 1}."
                )
        stage_of = {op.name: i for i, (low, high) in enumerate(bounds) for op in graph.ops[low : high + 1]}
        for name, number in self.exceptions.items():
            if name not in stage_of:
                raise PlanError(f"Plan field exceptions: the model has no operation {name!r}.")
            stage_of[name] = number
        for op in graph.ops:
            for read in op.reads:
                source = graph.producer.get(read)
                if source is not None and stage_of[source.name] > stage_of[op.name]:
                    raise PlanError(
                        f"Plan fields stages and exceptions: {op.name} on stage {stage_of[op.name]} reads {read}, "
                        f"which stage {stage_of[source.name]} makes later."
                    )
        for names in graph.colocated:
            if len({stage_of[n] for n in names}) > 1:
                raise PlanError(f"Plan field stages: {', '.join(names[:4])} update the same state and need one stage.")
        return stage_of

    def __str__(self) -> str:
        from autopar.ir.table import plan_text

        return plan_text(self)
