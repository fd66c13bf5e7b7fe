"""Recipe of an optimizer that the user has built: its class, its groups by parameter names, its options."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.errors import UsageError
from autopar.ir.units import of_type, plural
from autopar.runtime.optim.param_groups import ParamGroup, grouped, options_of, same_value
from autopar.runtime.spec import Parameters

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
LIMIT = "max_grad_norm"  # option of timm's LAMB and LION, which clip by the norm of the gradients that they see


@dataclass(frozen=True)
class OptimizerCopy:
    """Builds optimizers like the user's, over the parameters of a rank.

    Args:
        kind: class of the optimizer.
        arguments: of its constructor, by name.
        clip_grad_norm: limit that the optimizer itself would put on the norm of all gradients. A rank does not see all
            gradients, so `autopar.parallelize` clips.
    """

    kind: type[torch.optim.Optimizer]
    groups: tuple[ParamGroup, ...]
    arguments: Mapping[str, Any]
    clip_grad_norm: float | None = None

    def __call__(self, parameters: Parameters) -> torch.optim.Optimizer:
        return self.kind(grouped(dict(parameters.named_parameters()), self.groups), **self.arguments)


def optimizer_copy(optimizer: torch.optim.Optimizer, model: nn.Module) -> OptimizerCopy:
    """Recipe of optimizers like one that was built over a model's parameters.

    Raises:
        UsageError: the optimizer is none, has other tensors than the model's parameters or gradients of them, has made
            steps, or its constructor needs what its options do not tell.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"autopar.prepare takes an optimizer over the model's parameters, such as "
            f"torch.optim.AdamW(model.parameters()), not {of_type(optimizer)}. For several optimizers build one with a "
            "parameter group for each."
        )
    kind = type(optimizer)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    members = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = [p for p in members if id(p) not in names]
    if foreign:
        raise UsageError(
            f"{kind.__name__} has {plural(len(members), 'tensor')}, of which {len(foreign)} are no parameters of "
            f"{type(model).__name__}; the first one has shape {list(foreign[0].shape)}. Build it over the parameters "
            "of the model that is prepared."
        )
    takes = inspect.signature(kind.__init__).parameters
    arguments = {name: value for name, value in optimizer.defaults.items() if name in takes}
    limits = {group.get(LIMIT) for group in optimizer.param_groups}
    if len(limits) > 1:
        raise UsageError(f"Groups of {kind.__name__} differ in {LIMIT}: {limits}. Give all the same one.")
    unlimited = {LIMIT: None} if LIMIT in arguments else {}
    groups = tuple(
        ParamGroup(tuple(names[id(p)] for p in group["params"]), options_of(group) | unlimited)
        for group in optimizer.param_groups
    )
    missing = [
        name
        for name, parameter in list(takes.items())[2:]  # after self and the parameters
        if parameter.default is parameter.empty and parameter.kind in NAMED and name not in arguments
    ]
    if missing or "params" not in takes:
        lacking = f"its constructor needs {', '.join(missing)}" if missing else "its constructor takes no params"
        raise UsageError(
            f"An optimizer like this {kind.__name__} cannot be built on the ranks: {lacking}. Use autopar.parallelize "
            "with a callable that builds it from parameters: optimizer=lambda params: …"
        )
    recipe = OptimizerCopy(kind, groups, arguments | unlimited, limits.pop())
    if any(optimizer.state.get(p) for p in members) and has_made_steps(optimizer, recipe, model):
        raise UsageError(
            f"{kind.__name__} has made steps already, and the ranks start without its state. Prepare model and "
            "optimizer before the first step; then optimizer.load_state_dict resumes a run."
        )
    if any(p.grad is not None for p in members):
        raise UsageError(
            f"Parameters of {type(model).__name__} have gradients already, which the ranks would not get. Call "
            "optimizer.zero_grad() before autopar.prepare."
        )
    return recipe


def has_made_steps(optimizer: torch.optim.Optimizer, recipe: OptimizerCopy, model: nn.Module) -> bool:
    """Whether an optimizer's state differs from that of a new one like it; some have state from the start."""
    fresh = recipe(Parameters(dict(model.named_parameters())))
    members = [p for group in optimizer.param_groups for p in group["params"]]
    return not all(same_value(optimizer.state.get(p, {}), fresh.state.get(p, {})) for p in members)
