"""What a rank has of a checkpoint's contents: its parts of tensors, and what training needs beside them."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from autopar.errors import CheckpointError
from autopar.ir.layout import REPLICATED, TP, Layout
from autopar.sharding.tensors import Chunk, chunks, whole_shape

if TYPE_CHECKING:
    from autopar.runtime.rank import Rank

MODEL, OPTIMIZER, EMA = "model", "optimizer", "ema"  # what the keys of tensors begin with
RANK_LOCAL_KEYS = frozenset({"params", "param_names"})  # in a parameter group; everything else is an option


@dataclass(frozen=True)
class ShardedTensor:
    """A rank's part of a tensor of the checkpoint; ``shape`` is that of the whole."""

    key: str
    shape: tuple[int, ...]
    chunks: Sequence[Chunk]
    tensor: torch.Tensor


@dataclass(frozen=True)
class OptionChange:
    """An option of a weight's parameter group that was another when the run began that saved; values as text."""

    weight: str
    option: str
    saved: str
    here: str


@dataclass(frozen=True)
class ParameterState:
    """An optimizer's state of one parameter.

    ``group`` is its place in `Training.groups`; ``values`` what is no tensor, or one number; ``split`` the names of
    tensors shaped like the parameter, which lie as it does; ``whole`` those of all other tensors; ``made`` its group's
    options when training began, before a scheduler or the optimizer itself changed any.
    """

    group: int
    values: dict[Any, Any]
    split: tuple[Any, ...]
    whole: tuple[Any, ...]
    made: dict[str, Any]


@dataclass(frozen=True)
class Training:
    """What training needs beside tensors, on one rank or on all together.

    Args:
        optimizer, scheduler: class names.
        options: names of the optimizer's options, which tell one kind of optimizer from another.
        groups: options of parameter groups.
        order: which of ``groups`` the optimizer's groups have, on the rank that has most.
        states: by parameter.
        scheduler_state, scaler_state: what their ``state_dict()`` returned.
        ema: weights that have an average.
    """

    optimizer: str | None = None
    scheduler: str | None = None
    options: tuple[str, ...] = ()
    groups: tuple[dict[str, Any], ...] = ()
    order: tuple[int, ...] = ()
    states: dict[str, ParameterState] = field(default_factory=dict)
    scheduler_state: dict[str, Any] | None = None
    scaler_state: dict[str, Any] | None = None
    ema: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankState:
    """All that a rank could write; other ranks may have copies of it."""

    tensors: list[ShardedTensor]
    training: Training


def rank_state(rank: Rank) -> RankState:
    """What a rank has.

    Raises:
        CheckpointError: the optimizer's state cannot be told apart into parts of weights.
    """
    pieces: list[ShardedTensor] = []
    spec, updater = rank.spec, rank.updater
    averages = rank.ema.tensors() if rank.ema is not None else {}
    for weight in spec.weights:
        name, layout = weight.name, spec.layout(weight.name)
        if weight.kind != "parameter" and not (rank.place.replica == 0 and spec.has_first_copy(name)):
            continue  # each replica has buffers of its own, and the first one's count
        pieces.append(sharded_tensor(rank, f"{MODEL}.{name}", layout, rank.weights[name]))
        if name in averages:
            pieces.append(sharded_tensor(rank, f"{EMA}.{name}", layout, averages[name]))
    states, groups = optimizer_states(rank, pieces)
    optimizer, scheduler, scaler = updater.optimizer, updater.scheduler, updater.scaler
    training = Training(
        optimizer=type(optimizer).__name__ if optimizer else None,
        scheduler=type(scheduler).__name__ if scheduler else None,
        options=tuple(sorted(optimizer.defaults)) if optimizer else (),
        groups=groups,
        order=tuple(range(len(groups))),
        states=states,
        scheduler_state=plain_data(scheduler.state_dict()) if scheduler else None,
        scaler_state=plain_data(scaler.state_dict()) if scaler else None,
        ema=tuple(averages),
    )
    return RankState(pieces, training)


def sharded_tensor(rank: Rank, key: str, layout: Layout, tensor: torch.Tensor) -> ShardedTensor:
    """A rank's part of a tensor that lies so."""
    ranks = {TP: rank.mesh.tp}
    shape = whole_shape(tensor.shape, layout, ranks)
    return ShardedTensor(key, shape, chunks(shape, layout, ranks, {TP: rank.place.shard}), tensor)


def named_groups(rank: Rank) -> list[list[str]]:
    """The names of the parameters in each group of a rank's optimizer."""
    updater = rank.updater
    return names_in_groups(updater.optimizer, updater.optimized) if updater.optimizer is not None else []


def names_in_groups(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """The names of the parameters in each group."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def options_by_name(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]
) -> dict[str, dict[str, Any]]:
    """The options of each parameter's group."""
    groups = zip(optimizer.param_groups, names_in_groups(optimizer, parameters), strict=True)
    return {name: options_of(group) for group, names in groups for name in names}


def optimizer_states(
    rank: Rank, pieces: list[ShardedTensor]
) -> tuple[dict[str, ParameterState], tuple[dict[str, Any], ...]]:
    """The optimizer's state of each parameter, and the options of each group; tensors are added to ``pieces``."""
    updater = rank.updater
    if updater.optimizer is None:
        return {}, ()
    saved = updater.optimizer.state_dict()
    states: dict[str, ParameterState] = {}
    for number, (group, names) in enumerate(zip(saved["param_groups"], named_groups(rank), strict=True)):
        for index, name in zip(group["params"], names, strict=True):
            layout, shape = updater.layout(name), updater.optimized[name].shape
            values, split, whole = {}, [], []
            for key, value in saved["state"].get(index, {}).items():
                if not isinstance(value, torch.Tensor) or value.ndim == 0:
                    values[key] = plain_data(value)
                    continue
                alike = value.shape == shape
                if not alike and layout.splits:
                    raise CheckpointError(
                        f"{type(updater.optimizer).__name__} keeps {key!r} of shape {list(value.shape)} for its part "
                        f"of {name}, of shape {list(shape)}: how the parts make a whole is not known. Train with "
                        "tp=1, or with an optimizer whose state is shaped like its parameters."
                    )
                (split if alike else whole).append(key)
                pieces.append(sharded_tensor(rank, state_key(name, key), layout if alike else REPLICATED, value))
            states[name] = ParameterState(number, values, tuple(split), tuple(whole), updater.made_options[name])
    return states, tuple(options_of(group) for group in saved["param_groups"])


def state_key(name: str, key: Any) -> str:
    """What a tensor of an optimizer's state is called in a checkpoint."""
    return f"{OPTIMIZER}.{name}.{key}"


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a parameter group, as plain data."""
    return plain_data({name: value for name, value in group.items() if name not in RANK_LOCAL_KEYS})


def plain_data(value: Any) -> Any:
    """The same without what a file of plain data cannot hold: numpy's numbers, and tensors on devices."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (dict, list, tuple):
        return type(value)(
            {key: plain_data(item) for key, item in value.items()} if type(value) is dict else map(plain_data, value)
        )
    return value


def merged(parts: Sequence[Training]) -> Training:
    """What all ranks have together: of every parameter the first rank's state, of equal groups one."""
    groups: dict[str, dict[str, Any]] = {}
    states: dict[str, ParameterState] = {}
    places = [[place_of(options, groups) for options in part.groups] for part in parts]
    for part, place in zip(parts, places):
        for name, state in part.states.items():
            states.setdefault(name, replace(state, group=place[state.group]))
    first = max(parts, key=lambda part: len(part.groups))  # the first of those with most groups
    scheduling = next((part for part in parts if part.scheduler and len(part.groups) == len(first.groups)), first)
    scaling = next((part.scaler_state for part in parts if part.scaler_state is not None), None)
    return Training(
        optimizer=first.optimizer,
        scheduler=scheduling.scheduler,
        options=first.options,
        groups=tuple(groups.values()),
        order=tuple(max(places, key=len)),
        states=states,
        scheduler_state=scheduling.scheduler_state,
        scaler_state=scaling,
        ema=tuple(dict.fromkeys(name for part in parts for name in part.ema)),
    )


def place_of(options: dict[str, Any], groups: dict[str, dict[str, Any]]) -> int:
    """The place of equal options among those of ``groups``, at whose end they are put if they are new."""
    groups.setdefault(repr(options), options)
    return list(groups).index(repr(options))


def encoded_training(training: Training) -> bytes:
    """As bytes that need no trust to be read.

    Raises:
        CheckpointError: an object in it is no plain data.
    """
    for what, value in asdict(training).items():
        try:
            torch.load(as_bytes(value), weights_only=True)
        except Exception as error:  # whatever pickling or the user's class raises
            raise CheckpointError(
                f"The {what.replace('_', ' ')} cannot be saved: {described(error)}. A checkpoint holds tensors, "
                "numbers, texts, and lists and dicts of them: keep other objects out of state_dict()."
            ) from error
    return as_bytes(asdict(training)).getvalue()


def described(error: Exception) -> str:
    """One line on what went wrong, without torch's advice to trust a file that it refuses."""
    refused = re.search(r"GLOBAL ([\w.]+) was not an allowed", str(error))
    if isinstance(error, pickle.UnpicklingError):
        return f"it has a {refused[1]}" if refused else "it is not plain data"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def as_bytes(value: Any) -> BytesIO:
    file = BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def decoded_training(data: bytes) -> Training:
    """Inverse of `encoded_training`."""
    fields = torch.load(BytesIO(data), weights_only=True)
    states = {name: ParameterState(**state) for name, state in fields.pop("states").items()}
    return Training(**fields, states=states)


def copied(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options for one group alone: groups must not share what is in them."""
    return copy.deepcopy(dict(options))
