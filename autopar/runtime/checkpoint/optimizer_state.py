"""Optimizer state as torch's state dicts have it, whole: taken from a rank's parts, and cut into them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import CheckpointError
from autopar.runtime.checkpoint.rank_state import (
    CheckpointedRank,
    ShardedTensor,
    copied,
    named_groups,
    optimizer_states,
    state_key,
)
from autopar.runtime.optim.param_groups import NamedState
from autopar.sharding.tensors import contiguous_copy, narrowed


@dataclass(frozen=True)
class StateBox:
    """Box of a whole state tensor of a parameter: its start per dim, and its values on the CPU."""

    name: str
    key: Any
    shape: tuple[int, ...]
    start: tuple[int, ...]
    values: torch.Tensor


@dataclass(frozen=True)
class OptimizerPart:
    """Part of an optimizer's state on one rank: boxes of tensors, and other values by parameter name."""

    boxes: Sequence[StateBox]
    values: NamedState


def optimizer_part(rank: CheckpointedRank) -> OptimizerPart | CheckpointError:
    """State of a rank's optimizer, of which no other rank returns the same, or why it cannot be joined."""
    pieces: list[ShardedTensor] = []
    try:
        states, _ = optimizer_states(rank, pieces)
    except CheckpointError as error:
        return error
    owned = {name for name in states if rank.updater.owns_for_norm(name)}
    keys = {state_key(n, k): (n, k) for n in owned for k in (*states[n].split, *states[n].whole)}
    boxes = [
        StateBox(*keys[piece.key], piece.shape, chunk.whole, contiguous_copy(view))
        for piece in pieces
        if piece.key in keys
        for chunk, view in zip(piece.chunks, piece.views, strict=True)
    ]
    return OptimizerPart(boxes, {name: states[name].values for name in owned})


def joined_state(parts: Sequence[OptimizerPart]) -> NamedState:
    """Whole optimizer state by parameter name, from the parts of all ranks."""
    state: dict[str, dict[Any, Any]] = {}
    for part in parts:
        for name, values in part.values.items():
            state.setdefault(name, {}).update(values)
        for box in part.boxes:
            own = state.setdefault(box.name, {})
            if box.key not in own:
                own[box.key] = torch.zeros(box.shape, dtype=box.values.dtype, device="cpu")
            narrowed(own[box.key], box.start, box.values.shape).copy_(box.values)
    return state


def load_optimizer(rank: CheckpointedRank, state: NamedState, options: Sequence[Mapping[str, Any]]) -> None:
    """Replace a rank's optimizer state.

    Args:
        state: whole state by parameter name; names of other ranks are ignored.
        options: of each parameter group.
    """
    updater = rank.updater
    assert updater.optimizer is not None
    target, found = updater.optimizer.state_dict(), {}
    for group, names, own in zip(target["param_groups"], named_groups(rank), options, strict=True):
        group.update(copied(own))
        for index, name in zip(group["params"], names, strict=True):
            if name in state:
                found[index] = {key: local_state(rank, name, value) for key, value in state[name].items()}
    updater.optimizer.load_state_dict({**target, "state": found})


def local_state(rank: CheckpointedRank, name: str, value: Any) -> Any:
    """A rank's part of a whole state of a parameter; values that are not shaped like the parameter are whole."""
    spec, sharded, parameter = rank.spec, rank.updater.sharded, rank.updater.optimized[name]
    whole = next(tuple(weight.shape) for weight in spec.trainable if weight.name == name)
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != whole or parameter.shape == value.shape:
        return value
    part = spec.local_part(name, value) if rank.updater.layout(name).splits else value
    if part.shape != parameter.shape and sharded is not None:
        part = sharded.piece_of(name, part)
    return contiguous_copy(part)
