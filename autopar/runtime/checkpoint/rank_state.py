"""Contents of a checkpoint on one rank: the rank's parts of tensors, and other state of the training."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from io import BytesIO
from typing import Any, Protocol

import torch

from autopar.errors import CheckpointError
from autopar.ir.layout import REPLICATED, Layout
from autopar.runtime.optim.ema import Average
from autopar.runtime.optim.param_groups import names_in_groups, options_of, plain_data
from autopar.runtime.optim.step import Updater
from autopar.runtime.random_state import generator_states
from autopar.runtime.spec import RankSpec
from autopar.sharding.tensors import Box, boxes, boxes_of_piece

MODEL, OPTIMIZER, EMA = "model", "optimizer", "ema"  # first words of tensor keys


class CheckpointedRank(Protocol):
    """The state of a rank that checkpoints hold."""

    spec: RankSpec
    stored: dict[str, torch.Tensor]
    updater: Updater
    ema: Average | None

    @property
    def checkpoint_group(self) -> Any:
        """Process group in which the ranks exchange plans of saves and loads; None for a single rank."""
        ...


@dataclass(frozen=True)
class ShardedTensor:
    """Part of a checkpoint's tensor on one rank.

    Args:
        shape: of the whole tensor.
        chunks: boxes of the part.
        tensor: that holds the part, for its dtype.
        views: view of each box in memory.
    """

    key: str
    shape: tuple[int, ...]
    chunks: Sequence[Box]
    tensor: torch.Tensor
    views: Sequence[torch.Tensor]


def whole_tensor(key: str, tensor: torch.Tensor) -> ShardedTensor:
    """A tensor of which one rank has all."""
    chunks = boxes(tensor.shape, REPLICATED, {}, {})
    return ShardedTensor(key, tuple(tensor.shape), chunks, tensor, [chunk.of_part(tensor) for chunk in chunks])


@dataclass(frozen=True)
class OptionChange:
    """Option of a weight's parameter group that differs from its value at the saved run's start. Values as text."""

    weight: str
    option: str
    saved: str
    here: str


@dataclass(frozen=True)
class ParameterState:
    """State of one parameter in an optimizer.

    Args:
        group: index into `Training.groups`.
        values: state entries that are no tensors, or tensors with one number.
        split: names of tensors with the parameter's shape; they have its layout.
        whole: names of all other tensors.
        made: options of the parameter's group at the start of training, before a scheduler or optimizer changed any.
    """

    group: int
    values: dict[Any, Any]
    split: tuple[Any, ...]
    whole: tuple[Any, ...]
    made: dict[str, Any]


@dataclass(frozen=True)
class Training:
    """State of the training other than tensors, on one rank or merged over all ranks.

    Args:
        optimizer, scheduler: class names.
        options: names of the optimizer's options; they identify the kind of optimizer.
        groups: options of parameter groups.
        order: for each of the optimizer's groups, its index in ``groups``; on the rank with the most groups.
        states: optimizer state by parameter name.
        scheduler_state, scaler_state: results of their ``state_dict()``.
        ema: names of weights that have a moving average.
        ema_state: state of the averaging other than the averages, such as a number of updates; as `Average.state`.
        random: random states of each stage and replica, whose ranks draw the same numbers.
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
    ema_state: dict[str, Any] = field(default_factory=dict)
    random: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class RankState:
    """All state that a rank can write; other ranks may have copies of parts of it."""

    tensors: list[ShardedTensor]
    training: Training


def rank_state(rank: CheckpointedRank) -> RankState:
    """State of a rank for a checkpoint.

    Raises:
        CheckpointError: the optimizer keeps tensors of split weights whose layout is unknown.
    """
    pieces: list[ShardedTensor] = []
    spec, updater = rank.spec, rank.updater
    averages = rank.ema.tensors() if rank.ema is not None else {}
    for weight in spec.weights:
        name, layout = weight.name, spec.layout(weight.name)
        if weight.kind != "parameter" and not (spec.place.replica == 0 and spec.has_first_copy(name)):
            continue  # each replica has its own buffers; the first replica's are saved
        if name in spec.cut and not spec.has_first_copy(name):
            continue  # shards may cut their copies elsewhere
        if name in rank.stored:
            pieces.append(sharded_tensor(rank, f"{MODEL}.{name}", name, layout, rank.stored[name]))
        if name in averages:
            pieces.append(sharded_tensor(rank, f"{EMA}.{name}", name, layout, averages[name]))
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
        ema_state=rank.ema.state() if rank.ema is not None else {},
        random={(spec.place.stage, spec.place.replica): generator_states(torch.device(spec.device))},
    )
    return RankState(pieces, training)


def sharded_tensor(rank: CheckpointedRank, key: str, name: str, layout: Layout, tensor: torch.Tensor) -> ShardedTensor:
    """Part of a weight, or of a state in the layout of a weight, on a rank.

    Args:
        name: of the weight.
        layout: of the tensor: the weight's, or replicated.
        tensor: the local part, [*local], or this replica's piece of it, flat.
    """
    spec, sharded = rank.spec, rank.updater.sharded
    like, elements = tensor, range(tensor.numel())
    if sharded is not None and name in spec.cut and tensor.shape == sharded.pieces[name].shape:
        like, elements = sharded.like[name], sharded.elements_of(name)
    shape = spec.whole_shape(name, like.shape) if layout.splits else tuple(like.shape)
    chunks = boxes(shape, layout, spec.mesh.axis_sizes, spec.axis_index)
    if like.shape == tensor.shape:
        return ShardedTensor(key, shape, chunks, tensor, [chunk.of_part(tensor) for chunk in chunks])
    found = [pair for chunk in chunks for pair in boxes_of_piece(chunk, like, elements, tensor)]
    return ShardedTensor(key, shape, [box for box, _ in found], tensor, [view for _, view in found])


def named_groups(rank: CheckpointedRank) -> list[list[str]]:
    """Names of the parameters in each group of a rank's optimizer."""
    updater = rank.updater
    return names_in_groups(updater.optimizer, updater.optimized) if updater.optimizer is not None else []


def optimizer_states(
    rank: CheckpointedRank, pieces: list[ShardedTensor]
) -> tuple[dict[str, ParameterState], tuple[dict[str, Any], ...]]:
    """Optimizer state by parameter name, and the options of each group. Tensors are appended to ``pieces``."""
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
                if not alike and (layout.splits or name in rank.spec.cut):
                    raise CheckpointError(
                        f"{type(updater.optimizer).__name__} keeps {key!r} of shape {list(value.shape)} for its part "
                        f"of {name}, of shape {list(shape)}: how the parts make a whole is not known. Train with "
                        "tp=1 and zero=1, or with an optimizer whose state is shaped like its parameters."
                    )
                (split if alike else whole).append(key)
                stored = layout if alike else REPLICATED
                pieces.append(sharded_tensor(rank, state_key(name, key), name, stored, value))
            states[name] = ParameterState(number, values, tuple(split), tuple(whole), updater.made_options[name])
    return states, tuple(options_of(group) for group in saved["param_groups"])


def state_key(name: str, key: Any) -> str:
    """Key of an optimizer state's tensor in a checkpoint."""
    return f"{OPTIMIZER}.{name}.{key}"


def merged(parts: Sequence[Training]) -> Training:
    """State merged over all ranks: for each parameter the first rank's state, and equal groups only once."""
    groups: dict[str, dict[str, Any]] = {}
    states: dict[str, ParameterState] = {}
    places = [[place_of(options, groups) for options in part.groups] for part in parts]
    for part, place in zip(parts, places):
        for name, state in part.states.items():
            states.setdefault(name, replace(state, group=place[state.group]))
    first = max(parts, key=lambda part: len(part.groups))  # first of the ranks with the most groups
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
        ema_state=next((part.ema_state for part in parts if part.ema_state), {}),
        random={place: states for part in parts for place, states in part.random.items()},
    )


def place_of(options: dict[str, Any], groups: dict[str, dict[str, Any]]) -> int:
    """Index of equal options in ``groups``. New options are appended."""
    groups.setdefault(repr(options), options)
    return list(groups).index(repr(options))


def encoded_training(training: Training) -> bytes:
    """Bytes of the state, which `torch.load` reads with ``weights_only=True``.

    Raises:
        CheckpointError: an object in the state is not plain data.
    """
    for what, value in asdict(training).items():
        try:
            torch.load(as_bytes(value), weights_only=True)
        except Exception as error:  # pickling and the user's classes raise anything
            raise CheckpointError(
                f"The {what.replace('_', ' ')} cannot be saved: {described(error)}. A checkpoint holds tensors, "
                "numbers, texts, and lists and dicts of them: keep other objects out of state_dict()."
            ) from error
    return as_bytes(asdict(training)).getvalue()


def described(error: Exception) -> str:
    """Description of an error in one line, without torch's advice to trust a file that it refuses."""
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
    """Deep copy of options for one group: groups must not share objects."""
    return copy.deepcopy(dict(options))
