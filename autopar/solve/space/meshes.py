"""Meshes of pipeline, tensor and data parallelism that a number of devices allows, and why not others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from autopar.errors import InfeasibleError, UsageError
from autopar.ir.hardware import Hardware
from autopar.ir.mesh import Mesh
from autopar.ir.plan_constraints import MAX_TENSOR_AXES, PlanConstraints
from autopar.ir.plan_parts import OF_PIPELINES
from autopar.ir.units import plural
from autopar.solve.space.constraints import Constraints, microbatch_candidates


@dataclass(frozen=True)
class Meshes:
    """Meshes to consider, and for each that is not why."""

    allowed: tuple[Mesh, ...]
    refused: Mapping[Mesh, str]


def possible_meshes(constraints: Constraints, hardware: Hardware) -> Meshes:
    """All factorisations pp · tp · dp of the number of devices under the given sizes.

    A tensor-parallel group lies inside one node, as its collectives run many times per microbatch; one that crosses
    nodes must be asked for. What the model itself forbids is not known yet.

    Raises:
        UsageError: the given sizes do not make the number of devices, dp does not divide the batch, a replica has
            fewer samples than microbatches are given, or a pin's stage is one that no mesh has.
        HardwareError: the devices fill several nodes and the machine has no network.
    """
    check_sizes(constraints)
    hardware.transfer_seconds(0, 0, constraints.devices - 1)
    allowed: list[Mesh] = []
    refused: dict[Mesh, str] = {}
    for mesh in factorisations(constraints):
        reason = why_not(mesh, constraints, hardware)
        if reason:
            refused[mesh] = reason
        else:
            allowed.append(mesh)
    return Meshes(tuple(allowed), refused)


def check_sizes(constraints: Constraints) -> None:
    """Refuse sizes and pins that contradict the devices or the batch, on any machine. Raises as `possible_meshes`."""
    check_product(constraints)
    check_replicas(constraints)
    check_pinned_stages(constraints)


def factorisations(constraints: Constraints) -> list[Mesh]:
    """Meshes of the number of devices with the given sizes; small tp first, then few tensor axes, then small pp.

    There are several tensor axes only where tp is given, as their sizes or as a number.
    """
    devices = constraints.devices
    return [
        Mesh(pp, tp, devices // tp // pp, axes)
        for tp in divisors(devices)
        if constraints.tp_ranks in (None, tp)
        for axes in arrangements(constraints.tp, tp)
        for pp in divisors(devices // tp)
        if constraints.pp in (None, pp) and constraints.dp in (None, devices // tp // pp)
    ]


def arrangements(given: int | tuple[int, ...] | None, tp: int) -> list[tuple[int, ...]]:
    """Sizes of the tensor axes of ``tp`` ranks that a constraint allows, as in `Mesh`."""
    if given is None:
        return [()]
    if isinstance(given, tuple):
        return [given if len(given) > 1 else ()]
    return tensor_factorisations(tp)


def tensor_factorisations(tp: int) -> list[tuple[int, ...]]:
    """Sizes of the tensor axes of ``tp`` ranks, as in `Mesh`: a single axis first, then two, …."""
    several = [
        (*outer, size)
        for size in divisors(tp)
        if 1 < size < tp
        for outer in ((own or (tp // size,)) for own in tensor_factorisations(tp // size))
        if len(outer) < MAX_TENSOR_AXES
    ]
    return [(), *sorted(several, key=lambda sizes: (len(sizes), sizes))]


def why_not(mesh: Mesh, constraints: Constraints, hardware: Hardware) -> str:
    """Reason why a mesh is not considered, in a few words, or an empty string."""
    per_node, local = hardware.devices_per_node, constraints.batch // mesh.dp
    if constraints.batch % mesh.dp:
        return f"{mesh.dp} replicas cannot share a batch of {constraints.batch:,} evenly"
    if constraints.tp is None and mesh.devices > per_node and per_node % mesh.tp:
        return f"groups of {mesh.tp} ranks cross nodes of {plural(per_node, 'device')}"
    if constraints.dp is None and mesh.dp > 1 and local < constraints.least_samples:
        least = constraints.least_samples
        return f"a replica has {plural(local, 'sample')}, of at least {least} for batch norm unless dp= asks"
    if constraints.microbatches is not None and constraints.microbatches > local:
        return f"a replica has {plural(local, 'sample')} for {constraints.microbatches:,} microbatches"
    if constraints.zero and mesh.dp == 1:
        return "no replicas to share the optimizer's state"
    if constraints.dp_shard is not None and mesh.dp % constraints.dp_shard:
        return f"groups of {constraints.dp_shard} do not divide {mesh.dp} replicas"
    if constraints.zero == 2 and (smallest := min(microbatch_candidates(constraints, mesh.dp))) > 1:
        return f"a replica has {smallest} microbatches, and ZeRO-2 is for one"
    if (constraints.chunks or 1) > 1 and mesh.pp == 1:
        return "no pipeline, in which alone ranks have several stages"
    if constraints.schedule in OF_PIPELINES and mesh.pp == 1:
        return f"no pipeline for {constraints.schedule}"
    pinned = max(constraints.pins, key=constraints.pins.__getitem__, default=None)
    if pinned is not None and constraints.pins[pinned] >= mesh.pp * constraints.chunks_with_pins:
        return f"{pinned} is pinned to stage {constraints.pins[pinned]}"
    return ""


def check_product(constraints: Constraints) -> None:
    """Refuse given sizes that do not multiply to the number of devices.

    Raises:
        UsageError: names the product and what would fit.
    """
    devices = constraints.devices
    sizes_given = {"pp": constraints.pp, "tp": constraints.tp_ranks, "dp": constraints.dp}
    given = {name: size for name, size in sizes_given.items() if size is not None}
    product = prod(given.values())
    if product == devices or (len(given) < 3 and devices % product == 0):
        return
    sizes = " × ".join(f"{name}={size}" for name, size in given.items())
    makes = f"make {product} devices" if len(given) > 1 else f"needs a multiple of {product} devices"
    remedies = [f"devices={product}"]
    for name, size in given.items():
        rest = product // size
        if len(given) == 1:
            remedies += [f"{name}={d}" for d in nearest(size, divisors(devices))]
        elif devices % rest == 0:
            remedies.append(f"{name}={devices // rest}")
    raise UsageError(f"{sizes} {makes}, not {devices}. Use {' or '.join(dict.fromkeys(remedies))}.")


def check_replicas(constraints: Constraints) -> None:
    """Refuse a number of replicas that cannot share the batch, or whose share is too small.

    Raises:
        UsageError: names the nearest numbers that can.
    """
    dp, batch = constraints.dp, constraints.batch
    if dp is None:
        return
    if batch % dp:
        able = " or ".join(f"dp={d}" for d in nearest(dp, divisors(batch)))
        near = " or ".join(f"{b:,}" for b in (batch // dp * dp, (batch // dp + 1) * dp) if b)
        raise UsageError(
            f"dp={dp}: {dp} replicas cannot share a batch of {plural(batch, 'sample')} evenly. Use {able}, or "
            f"a batch of {near}."
        )
    if constraints.microbatches is not None and constraints.microbatches > batch // dp:
        raise UsageError(
            f"microbatches={constraints.microbatches}, but each of {plural(dp, 'replica')} has "
            f"{plural(batch // dp, 'sample')} of the batch of {batch:,}. Use microbatches={batch // dp} or less, or "
            "fewer replicas."
        )


def check_pinned_stages(constraints: Constraints) -> None:
    """Refuse a pin to a stage that no mesh has.

    Raises:
        UsageError: names the stages that there can be.
    """
    most = constraints.pp or constraints.devices // (constraints.tp_ranks or 1) // (constraints.dp or 1)
    most *= constraints.chunks_with_pins
    for name, stage in constraints.pins.items():
        if not 0 <= stage < most:
            if constraints.pp is not None:
                raise UsageError(
                    f"{name} is pinned to stage {stage}, stages are 0 to {most - 1}. Pin it to one of these."
                )
            raise UsageError(
                f"{name} is pinned to stage {stage}, but {plural(constraints.devices, 'device')} make "
                f"{plural(most, 'stage')} at most, stages are counted from 0. Pin it to an earlier stage."
            )


def no_mesh(
    model: str, constraints: Constraints, refused: Mapping[Mesh, str], in_the_way: Sequence[str] = ()
) -> InfeasibleError:
    """The error where no mesh is left: each with its reason, the first few of them.

    Args:
        in_the_way: what was asked for and would leave one if it were not.
    """
    listed = "; ".join(f"{mesh}: {reason}" for mesh, reason in list(refused.items())[:MAX_LISTED])
    more = f"; and {len(refused) - MAX_LISTED} more" if len(refused) > MAX_LISTED else ""
    fewer = "fewer chunks, " if (constraints.chunks or 1) > 1 else ""
    remedy = (
        f"Leave out {' or '.join(in_the_way)}"
        if in_the_way
        else f"Use {fewer}another number of devices or another batch"
    )
    return InfeasibleError(
        f"No mesh of {plural(constraints.devices, 'device')} works for {model} and a batch of {constraints.batch:,}. "
        f"{listed}{more}. {remedy}."
    )


def in_the_way(constraints: Constraints, hardware: Hardware, refused: Mapping[Mesh, str]) -> list[str]:
    """Constraints each of which alone leaves no mesh, with a mesh that exists without it.

    Args:
        refused: all meshes with their reasons; some are the model's, which leaving out changes nothing about.
    """
    of_model = {mesh for mesh in refused if not why_not(mesh, constraints, hardware)}
    found = []
    for name, asked in asked_of_meshes(constraints).items():
        looser = replace(constraints, **{name: getattr(PlanConstraints(), name)})
        able = [mesh for mesh in factorisations(looser) if not why_not(mesh, looser, hardware)]
        # Where the model can be neither split nor cut as its meshes ask, only replicas are certain to work.
        able = [mesh for mesh in able if not of_model or mesh.pp * mesh.tp == 1]
        if able:
            found.append(f"{asked} (for {able[0]})")
    return found


def asked_of_meshes(constraints: Constraints) -> Mapping[str, str]:
    """The fields of constraints that refuse meshes and were given, and how they are written."""
    sizes = {name: getattr(constraints, name) for name in ("pp", "tp", "dp", "dp_shard", "chunks", "microbatches")}
    asked = {name: f"{name}={size}" for name, size in sizes.items() if size is not None}
    return (
        asked
        | ({"zero": f"zero={constraints.zero}"} if constraints.zero else {})
        | ({"schedule": f"schedule={constraints.schedule!r}"} if constraints.schedule in OF_PIPELINES else {})
        | ({"pins": "the pins"} if constraints.pins else {})
    )


MAX_LISTED = 4


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d != number]


def nearest(wanted: int, numbers: list[int]) -> list[int]:
    """The numbers next to ``wanted``, one on each side where there is one."""
    below, above = [n for n in numbers if n < wanted], [n for n in numbers if n > wanted]
    return below[-1:] + above[:1]
