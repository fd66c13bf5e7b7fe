"""The specs of all ranks: what each runs and which weights it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from autopar.api.options import Options
from autopar.api.program_cache import ProgramCache
from autopar.codegen.emit import graph_module
from autopar.ir.graph import Weight
from autopar.ir.layout import REPLICATED, TP
from autopar.measure.compile_ahead import compile_ahead
from autopar.runtime.launch.devices import Machine
from autopar.runtime.params.flat_buckets import replica_owners
from autopar.runtime.spec import RankSpec, TrainingRecipe
from autopar.trace.passes.precision import mixed_dtype


def rank_specs(programs: ProgramCache, machine: Machine, recipe: TrainingRecipe, options: Options) -> list[RankSpec]:
    """The spec of each rank, by rank."""
    mesh, stored, positions = programs.plan.mesh, programs.storage, programs.positions
    weights: list[list[Weight]] = [[] for _ in range(mesh.pp)]
    for weight in programs.example.weights:
        if weight.kind != "constant":
            for position in positions[weight.name]:
                weights[position].append(weight)

    def local(stage: int, shard: int) -> tuple[Weight, ...]:
        layouts = ((w, stored.get(w.name, REPLICATED)) for w in weights[stage])
        return tuple(replace(w, shape=at.local_shape(w.shape, {TP: mesh.tp}, {TP: shard})) for w, at in layouts)

    pairs = {(e.src, e.dst) for v in programs.specializations.values() for p in v.programs for e in p.sends}
    pairs |= {(i, i + 1) for i in range(programs.num_stages - 1)}
    owners: Mapping[str, int] = {}
    if programs.plan.zero:
        owners = replica_owners([local(stage, 0) for stage in range(mesh.pp)], positions, mesh.dp)
    compiled = options.execution_mode(machine.device_type).compiled
    first = RankSpec(
        rank=0,
        mesh=mesh,
        device=machine.device_of(0),
        build=partial(graph_module, compiled=compiled, ahead=compile_ahead),
        compiled=compiled,
        weights=local(0, 0),
        holders={name: held_at for name, held_at in positions.items() if len(held_at) > 1},
        stage_edges=tuple(sorted(pairs | {(b, a) for a, b in pairs})),
        recipe=recipe,
        trainable=tuple(weight for weight in programs.example.weights if weight.requires_grad),
        storage=stored,
        whole_shapes={w.name: w.shape for w in programs.example.weights if stored.get(w.name, REPLICATED).ragged},
        zero=programs.plan.zero,
        reduce_dtype=programs.plan.reduce_dtype,
        owners=owners,
        autocast=mixed_dtype(programs.example, programs.plan.precision),
        chunks=programs.plan.chunks,
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
