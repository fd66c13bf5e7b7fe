"""The specs of all ranks: what each runs and which weights it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from autopar.api.options import Options
from autopar.api.program_cache import ProgramCache
from autopar.codegen.emit import graph_module
from autopar.errors import PlanError
from autopar.ir.graph import Graph, Weight
from autopar.ir.layout import REPLICATED
from autopar.ir.tensor_axes import axis_index
from autopar.measure.compile_ahead import compile_ahead
from autopar.ops.regions import parameter_blocks
from autopar.ops.registry import views_of_weights
from autopar.runtime.launch.devices import Machine
from autopar.runtime.optim.build import uncut_params
from autopar.runtime.params.flat_buckets import replica_owners
from autopar.runtime.spec import RankSpec, TrainingRecipe
from autopar.trace.passes.precision import mixed_dtype

MAX_NAMED = 5  # blocks that a message names


def rank_specs(programs: ProgramCache, machine: Machine, recipe: TrainingRecipe, options: Options) -> list[RankSpec]:
    """The spec of each rank, by rank."""
    mesh, stored, positions = programs.plan.mesh, programs.storage, programs.positions
    weights: list[list[Weight]] = [[] for _ in range(mesh.pp)]
    for weight in programs.example.weights:
        if weight.kind != "constant":
            for position in positions[weight.name]:
                weights[position].append(weight)

    def local(stage: int, shard: int) -> tuple[Weight, ...]:
        index = axis_index(mesh.axis_sizes, shard)
        layouts = ((w, stored.get(w.name, REPLICATED)) for w in weights[stage])
        return tuple(replace(w, shape=at.local_shape(w.shape, mesh.axis_sizes, index)) for w, at in layouts)

    pairs = {(e.src, e.dst) for v in programs.specializations.values() for p in v.programs for e in p.sends}
    pairs |= {(i, i + 1) for i in range(programs.num_stages - 1)}
    zero = programs.plan.zero
    sharing = parameter_sharing(programs, recipe) if zero == 3 else None
    owners: Mapping[str, int] = {}
    if zero:
        stages = [[w for w in local(s, 0) if sharing is None or w.name in sharing.owned] for s in range(mesh.pp)]
        owners = replica_owners(stages, positions, programs.plan.replicas.sharing)
    compiled = options.execution_mode(machine.device_type).compiled
    first = RankSpec(
        rank=0,
        mesh=mesh,
        device=machine.device_of(0),
        placement=programs.plan.placement,
        build=partial(graph_module, compiled=compiled, ahead=compile_ahead),
        compiled=compiled,
        weights=local(0, 0),
        holders={name: held_at for name, held_at in positions.items() if len(held_at) > 1},
        stage_edges=tuple(sorted(pairs | {(b, a) for a, b in pairs})),
        recipe=recipe,
        trainable=trained_weights(programs.example),
        storage=stored,
        whole_shapes={w.name: w.shape for w in programs.example.weights if stored.get(w.name, REPLICATED).ragged},
        zero=zero,
        dp_shard=programs.plan.dp_shard,
        reduce_dtype=programs.plan.reduce_dtype,
        owners=owners,
        blocks=sharing.blocks if sharing is not None else {},
        kept=sharing.kept if sharing is not None else frozenset(),
        autocast=mixed_dtype(programs.example, programs.plan.precision),
        order=programs.plan.order,
        cuda_graph=options.cuda_graph is not False,
        transport=options.transport,
        settings=programs.settings,
        checkpoint_seconds=options.checkpoint_seconds,
    )
    return [
        replace(
            first,
            rank=rank,
            device=machine.device_of(rank),
            weights=local(mesh.place(rank).stage, mesh.place(rank).shard),
            region=", ".join(f"{s.first} to {s.last}" for s in programs.plan.stages if rank in s.ranks),
            predicted_bytes=programs.plan.prediction.peak_bytes[rank],
        )
        for rank in range(mesh.devices)
    ]


def trained_weights(graph: Graph) -> tuple[Weight, ...]:
    """Trainable weights of a graph, in its order."""
    return tuple(weight for weight in graph.weights if weight.requires_grad)


@dataclass(frozen=True)
class ParameterSharing:
    """How replicas share the trainable weights of a model under ZeRO-3.

    Args:
        blocks: block of each weight.
        owned: weights that one replica updates whole, because the optimizer needs them so, or because other stages or
            shards add to their gradients.
        kept: weights whose gathered values stay allocated.
    """

    blocks: Mapping[str, str]
    owned: frozenset[str]
    kept: frozenset[str]


def parameter_sharing(programs: ProgramCache, recipe: TrainingRecipe) -> ParameterSharing:
    """Sharing of the weights under ZeRO-3."""
    graph, plan = programs.example, programs.plan
    weights = trained_weights(graph)
    trained = {weight.name for weight in weights}
    blocks = {name: name.partition(".")[0] for name in trained} | parameter_blocks(graph.ops, trained)
    summed = {
        name
        for name in trained
        if len(programs.positions[name]) > 1 or programs.storage.get(name, REPLICATED).partial_gradient
    }
    # A value that leaves a stage may be on its way while its slot is filled again.
    leaving = {
        views_of_weights(program.ops, trained).get(name, name)
        for specialization in programs.specializations.values()
        for program in specialization.programs
        for name in program.results
    }
    owned = summed | (uncut_params(recipe.optimizer, weights) if recipe.optimizer else set())
    unknown = [block for block in plan.param_blocks if block not in blocks.values()]
    if unknown:
        raise PlanError(
            f"The plan's field param_blocks names {unknown[0]!r}, which is no block of {plan.model.name}. It has "
            f"{', '.join(list(dict.fromkeys(blocks.values()))[:MAX_NAMED])}, …."
        )
    kept = {name for name, block in blocks.items() if plan.param_blocks.get(block) == "kept"}
    kept |= summed | (leaving & trained)
    return ParameterSharing(blocks, frozenset(owned), frozenset(kept))
