"""The plan: the operations of each stage, their predicted cost, and how the plan was found. Saved as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path

from pydantic import TypeAdapter, ValidationError, with_config

from autopar.errors import PlanError
from autopar.ir.files import replacing
from autopar.ir.graph import Graph
from autopar.ir.mesh import STRICT, Mesh
from autopar.ir.microbatches import microbatch_size
from autopar.ir.placement import Placement, placement_of
from autopar.ir.plan_invariants import check_invariants
from autopar.ir.plan_parts import (
    Alternative,
    BlockCost,
    BlockParams,
    BlockSharding,
    HardwareInfo,
    ListOrder,
    Message,
    ModelInfo,
    Precision,
    Prediction,
    ReduceDtype,
    Replicas,
    ScheduleName,
    SolverInfo,
    Stage,
    ZeroStage,
    recomputing_text,
    replica_text,
)
from autopar.ir.plan_stages import stage_of_ops
from autopar.ir.units import TIME, plural, text

SCHEMA_VERSION = 4


@with_config(STRICT)
@dataclass(frozen=True)
class Plan:
    """A complete, runnable decision for one model, batch and machine.

    Args:
        microbatches: per data-parallel replica.
        exceptions: operations of parallel branches that lie inside another stage's range in execution order, and the
            stage that runs them.
        shardings: layouts (`Layout.parse`) in which ranks store weights; a weight that is not listed is replicated.
        strategies: the factor that is split when an operation runs (`autopar.sharding`), on several tensor axes
            ``axis:factor`` for each; an operation that is not listed, or has none on an axis, follows the layouts that
            it reads.
        blocks: the shardings for people.
        block_costs: times and parameters of the model's blocks, stage by stage in execution order, for pictures. Empty
            in plans made by hand and in older files.
        zero: what the replicas divide among them: 0 nothing, 1 the optimizer's state, 2 that and the gradients, 3 that
            and the parameters.
        order: of a searched schedule, what list scheduling makes it from.
        dp_shard: replicas, one after the other, that divide these; each such group has a copy of all. 0 for all.
        param_blocks: under ZeRO-3, whether the parameters of a block (`autopar.ops.regions.parameter_blocks`) are
            gathered before each use, in forwards and backwards, or once a step, and kept. Others are gathered.
        reduce_dtype: dtype in which gradients travel between replicas.
        channels_last: whether the model's images are copied to channels_last for its convolutions.
        seconds_without_limit: the step without the memory limit; None where that is hardly shorter, in plans made by
            hand and in older files.

    In ``shardings`` and ``strategies``, ``*`` stands for any number in a name, and a full name outranks a pattern. Both
    are empty when tp is 1.
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
    order: ListOrder | None = None
    precision: Precision = "fp32"
    exceptions: Mapping[str, int] = field(default_factory=dict)
    shardings: Mapping[str, str] = field(default_factory=dict)
    strategies: Mapping[str, str] = field(default_factory=dict)
    zero: ZeroStage = 0
    dp_shard: int = 0
    param_blocks: Mapping[str, BlockParams] = field(default_factory=dict)
    reduce_dtype: ReduceDtype = "float32"
    channels_last: bool = False
    blocks: tuple[BlockSharding, ...] = ()
    block_costs: tuple[BlockCost, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    bound_by: str = ""
    seconds_without_limit: float | None = None
    messages: tuple[Message, ...] = ()
    schema_version: int = SCHEMA_VERSION

    @property
    def microbatch_size(self) -> int:
        """Samples of a replica's largest microbatch."""
        return microbatch_size(self.batch, self.mesh.dp * self.microbatches)

    @property
    def replicas(self) -> Replicas:
        return Replicas(self.mesh.dp, self.zero, self.dp_shard)

    @property
    def placement(self) -> Placement:
        """Where the stages lie."""
        return placement_of(self.schedule, self.mesh.pp, self.chunks)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank runs."""
        return self.placement.stages(self.mesh.place(rank).stage)

    def has_last_stage(self, rank: int) -> bool:
        """Whether a rank runs the last stage, which computes losses."""
        return self.mesh.place(rank).stage == self.placement.last_position

    @property
    def transfer_seconds(self) -> Mapping[tuple[int, int], float]:
        """Seconds of a microbatch's message by (source stage, destination stage)."""
        return {(message.src, message.dst): message.seconds for message in self.messages}

    @property
    def decision(self) -> str:
        """The plan's effect on ranks, on one line, without predictions and without how it was found."""
        cuts = " | ".join(f"{stage.first} … {stage.last}" for stage in self.stages)
        moved = "".join(f", {name} on {stage}" for name, stage in sorted(self.exceptions.items()))
        sharded = sorted([*self.shardings.items(), *self.strategies.items()])
        split = f"; sharded {', '.join(f'{name} {text}' for name, text in sharded)}" if sharded else ""
        chunks = f", {self.chunks} chunks a rank" if self.chunks > 1 else ""
        kept = sorted(name for name, own in self.param_blocks.items() if own == "kept")
        split += f"; gathered once a step {', '.join(kept)}" if kept else ""
        again = recomputing_text(self.stages)
        recompute = f"; recomputing on {again}" if again else ""
        return (
            f"{self.model.fingerprint}: {self.mesh}{replica_text(self)}; {cuts}{moved}; {self.schedule}{chunks}, "
            f"{plural(self.microbatches, 'microbatch', 'es')}{split}{recompute}"
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan as JSON. A file is replaced atomically; a device (/dev/null) is written to."""
        with replacing(Path(path)) as file:
            file.write_text(self.to_json())

    @staticmethod
    def load(path: str | PathLike[str]) -> Plan:
        """The plan in a JSON file.

        Raises:
            PlanError: the file is missing, no JSON, or of another schema, or a field is missing or wrong.
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
        """Check the invariants that the fields' types cannot express; ``where`` names the plan in errors.

        Raises:
            PlanError: an invariant is broken; names the field.
        """
        check_invariants(self, where)

    def stage_of(self, graph: Graph) -> Mapping[str, int]:
        """The stage of every operation of the training graph that the plan was made for.

        Raises:
            PlanError: the plan belongs to another model, or its stages do not cover the graph in order.
        """
        return stage_of_ops(self, graph)

    def __repr__(self) -> str:
        return f"Plan({self.model.name}, {self.mesh}, {text(self.prediction.step_seconds, TIME)})"

    def __str__(self) -> str:
        from autopar.ir.table import plan_text  # slow: imports rich, which workers do without

        return plan_text(self)

    def _repr_html_(self) -> str:
        """The printed plan, as notebooks show it."""
        from autopar.ir.table import plan_html  # slow: imports rich, which workers do without

        return plan_html(self)
