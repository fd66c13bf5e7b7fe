"""Side effects of operations as ATen's schemas declare them, and the out-of-place counterparts of operations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import OpOverload

# Composite operations whose schema does not declare that they update running statistics: positions of those arguments,
# and position of the flag that turns the update on.
STATISTICS: Mapping[str, tuple[tuple[int, ...], int]] = {
    "aten.batch_norm.default": ((3, 4), 5),
    "aten.instance_norm.default": ((3, 4), 5),
}


def written_arguments(target: OpOverload) -> tuple[str, ...]:
    """Names of the arguments that an operation updates in place."""
    return tuple(a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


def aliased_arguments(target: OpOverload) -> tuple[int, ...]:
    """Positions of the arguments whose memory an output may share."""
    if all(r.alias_info is None for r in target._schema.returns):
        return ()
    return tuple(i for i, a in enumerate(target._schema.arguments) if a.alias_info is not None)


def out_of_place(target: OpOverload) -> OpOverload | None:
    """``aten.relu`` for ``aten.relu_``: the overload with equal arguments that returns a new tensor, if any."""
    packet_name = target._schema.name.removeprefix("aten::")
    if not packet_name.endswith("_") or packet_name == "copy_":  # aten::copy has no derivative
        return None
    packet = getattr(torch.ops.aten, packet_name[:-1], None)
    if packet is None:
        return None
    wanted = [(a.name, str(a.type)) for a in target._schema.arguments]
    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        if [(a.name, str(a.type)) for a in candidate._schema.arguments] == wanted and not written_arguments(candidate):
            return candidate
    return None


def missing_defaults(
    target: OpOverload, functional: OpOverload, args: tuple, kwargs: tuple
) -> tuple[tuple[str, Any], ...]:
    """Arguments for which ``target`` uses its defaults and ``functional`` has no default, such as bernoulli's p."""
    defaults = {a.name: a.default_value for a in target._schema.arguments if a.has_default_value()}
    given = {name for name, _ in kwargs}
    required = (a.name for a in functional._schema.arguments[len(args) :] if not a.has_default_value())
    return tuple((name, defaults[name]) for name in required if name not in given)
