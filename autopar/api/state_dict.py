"""State dicts of weights and optimizers: whether a user's fits the model, versions of modules, loads on ranks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar.api.dispatch import Dispatcher
from autopar.errors import CheckpointError, UsageError
from autopar.ir.graph import Weight
from autopar.ir.units import of_type, plural
from autopar.runtime.checkpoint.optimizer_state import joined_state
from autopar.runtime.optim.param_groups import NamedState, plain_data
from autopar.runtime.spec import RankSpec


def misfit(
    state: Any, weights: Mapping[str, Weight], required: Sequence[str], optional: Collection[str], model: str
) -> str:
    """How a state dict does not fit a model, as a message; empty if it fits.

    Args:
        weights: by each of their names in a state dict.
        required: names that the state dict must have.
        optional: names of other things that it may have.
        model: name of the model.
    """
    if not isinstance(state, Mapping):
        return f"The state dict of {model} is {of_type(state)}, expected a dict of tensors by name."
    missing = [name for name in required if name not in state]
    unknown = [name for name in state if name not in weights and name not in optional]
    if missing or unknown:
        return (
            f"The state dict does not fit {model}: {len(missing)} names missing {missing[:3]}, "
            f"{len(unknown)} unknown {unknown[:3]}. It must be one of the unmodified model."
        )
    for name in required:
        tensor, shape = state[name], list(weights[name].shape)
        if not isinstance(tensor, torch.Tensor):
            return f"{name} in the state dict is {of_type(tensor)}, expected a tensor of shape {shape}."
        if tensor.layout != torch.strided or tensor.is_quantized:
            return (
                f"{name} in the state dict is of layout {tensor.layout}, dtype {tensor.dtype}; expected a dense tensor."
            )
        if list(tensor.shape) != shape:
            return f"{name} in the state dict has shape {list(tensor.shape)}, the model's is {shape}."
        if tensor.is_meta:
            return f"{name} in the state dict is on the meta device and holds no numbers."
    return ""


def with_versions(state: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with the versions of modules that another one has; torchvision's MNASNet loads none without.

    They are its attribute ``_metadata``, which is not public in torch 2.11 to 2.15; a file of safetensors has none.
    """
    versioned = OrderedDict(state)
    versioned._metadata = getattr(like, "_metadata", OrderedDict())  # type: ignore[attr-defined]
    return versioned


def load_on_workers(dispatcher: Dispatcher, spec: RankSpec, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give each rank of this process its parts of whole weights; ``spec`` is that of any rank."""
    specs = [replace(spec, rank=rank) for rank in dispatcher.ranks.numbers]
    # One at a time, since each rank gets a copy; the largest first, so that a lack of memory changes nothing.
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].nbytes):
        readers = [own for own in specs if own.place.stage in dispatcher.programs.positions[name]]
        parts = {own.rank: {name: own.local_part(name, tensor)} for own in readers}
        dispatcher.call("load", {own.rank: (parts.get(own.rank, {}),) for own in specs})


def whole_optimizer_state(dispatcher: Dispatcher) -> NamedState:
    """As `ParallelModel.optimizer_state`."""
    with dispatcher.compared("optimizer_state", reads_only=True):
        parts = dispatcher.call_all("optimizer_state").values()
    for part in parts:
        if isinstance(part, CheckpointError):
            raise part
    return joined_state(list(parts))


def load_whole_optimizer_state(dispatcher: Dispatcher, state: NamedState, options: Sequence[Mapping[str, Any]]) -> None:
    """As `ParallelModel.load_optimizer_state`."""
    trained = {weight.name for weight in dispatcher.programs.example.weights if weight.requires_grad}
    unknown = [name for name in state if name not in trained]
    if unknown:
        raise UsageError(f"The optimizer's state has {plural(len(unknown), 'unknown parameter')}: {unknown[:3]}.")
    dispatcher.note("load_optimizer_state")
    arguments = {}
    for rank in dispatcher.ranks.numbers:  # each gets the state of its stages alone
        stage = dispatcher.mesh.place(rank).stage
        own = {name: values for name, values in state.items() if stage in dispatcher.programs.positions[name]}
        arguments[rank] = (own, [plain_data(dict(group)) for group in options])
    dispatcher.call("load_optimizer", arguments)
