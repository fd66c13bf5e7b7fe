"""Load of a checkpoint on one rank.

Tensors are read into the rank's own memory: a copy of all ranks' parts would need as much host memory as all their GPUs
have. So everything that can be known is checked before the first tensor is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from autopar.errors import CheckpointError
from autopar.ir.checkpoint_header import Header
from autopar.ir.layout import REPLICATED
from autopar.runtime.checkpoint.rank_state import (
    EMA,
    MODEL,
    CheckpointedRank,
    OptionChange,
    ShardedTensor,
    Training,
    copied,
    named_groups,
    sharded_tensor,
    state_key,
)
from autopar.runtime.checkpoint.reshard_planners import read_training, saved_tensor
from autopar.runtime.random_state import generator_states, seed_generators, seed_of, set_generator_states

# Options that select an optimizer's kernels and do not change its results.
KERNEL_OPTIONS = frozenset({"capturable", "differentiable", "foreach", "fused"})
FIRST_LR = "initial_lr"  # what torch's schedulers add to groups, also after the optimizer is prepared


class Restore:
    """State that one rank reads. Weights and averages are complete once they are read, the rest after `apply`."""

    def __init__(self, rank: CheckpointedRank, data: Path, header: Header) -> None:
        """``data`` is the data folder of the checkpoint."""
        self.rank, self.data, self.header = rank, data, header
        self.training = Training()
        self.states: dict[str, dict[Any, torch.Tensor]] = {}

    def wanted(self, metadata: Metadata) -> list[ShardedTensor]:
        """Tensor parts to fill: the rank's own, and new ones for state that its optimizer does not have yet.

        Raises:
            CheckpointError: the checkpoint is damaged, or its optimizer is of another kind.
        """
        rank, updater = self.rank, self.rank.updater
        self.training = read_training(self.data)
        layouts = {weight.name: rank.spec.layout(weight.name) for weight in rank.spec.weights}
        pieces = [
            sharded_tensor(rank, f"{MODEL}.{name}", name, layout, rank.stored[name].detach())
            for name, layout in layouts.items()
            if name in rank.stored
        ]
        for name, tensor in rank.ema.tensors().items() if rank.ema is not None else ():
            start = EMA if name in self.training.ema else MODEL  # averages start as copies of the weights
            pieces.append(sharded_tensor(rank, f"{start}.{name}", name, layouts[name], tensor))
        if updater.optimizer is None or self.training.optimizer is None:
            return pieces
        self.check_optimizer()
        for name, parameter in updater.optimized.items():
            state = self.training.states.get(name)
            if state is None:
                continue
            current, own = updater.optimizer.state.get(parameter, {}), self.states.setdefault(name, {})
            for key in (*state.split, *state.whole):
                saved = saved_tensor(metadata, state_key(name, key))
                layout, shape = (
                    (updater.layout(name), parameter.shape) if key in state.split else (REPLICATED, saved.size)
                )
                own[key] = current.get(key)
                if own[key] is None or own[key].shape != shape:
                    # In the memory order of the parameter, as fused optimizers read both.
                    like = parameter if shape == parameter.shape else torch.empty(shape, device="meta")
                    own[key] = torch.empty_like(like, dtype=saved.properties.dtype, device=parameter.device)
                pieces.append(sharded_tensor(rank, state_key(name, key), name, layout, own[key].detach()))
        return pieces

    def check_optimizer(self) -> None:
        """Compare the optimizer with the saved one.

        Raises:
            CheckpointError: the optimizer is of another kind, or groups the parameters differently.
        """
        saved, optimizer = self.training, self.rank.updater.optimizer
        assert optimizer is not None
        kind, options = type(optimizer).__name__, tuple(sorted(optimizer.defaults))
        if kind != saved.optimizer and options != saved.options:
            raise CheckpointError(
                f"The checkpoint has the state of {saved.optimizer} ({', '.join(saved.options)}), the optimizer here "
                f"is {kind} ({', '.join(options)}). Pass the same optimizer; to take the weights alone, load it "
                "without an optimizer and hand its state_dict() on."
            )
        for names in named_groups(self.rank):
            known = [(name, saved.states[name].group) for name in names if name in saved.states]
            for name, group in known:
                if group != known[0][1]:
                    raise CheckpointError(
                        f"{known[0][0]} and {name} are in one parameter group here, in the checkpoint they have other "
                        f"options: {unlike(saved.groups[known[0][1]], saved.groups[group])}. Group the parameters "
                        "as in the run that saved."
                    )
        scheduled = self.rank.updater.scheduler is not None and saved.scheduler_state is not None
        if scheduled and len(optimizer.param_groups) != len(saved.order):
            raise CheckpointError(
                f"The optimizer here has {len(optimizer.param_groups)} parameter groups, in the checkpoint it has "
                f"{len(saved.order)}, and a scheduler for so many. Group the parameters as in the run that saved."
            )

    def option_changes(self) -> list[OptionChange]:
        """Initial options of this optimizer that differ from the saved one's; `apply` takes the saved options.

        Options that only one version of an optimizer has do not count, nor the rate that a scheduler of the caller
        keeps in the groups.
        """
        updater, changes = self.rank.updater, []
        if updater.optimizer is None or self.training.optimizer is None:
            return []
        for name in updater.made_options.keys() & self.training.states.keys():
            current, saved = updater.made_options[name], self.training.states[name].made
            options = [
                o
                for o in {**saved, **current}
                if (o in current and o in saved) or o not in {*updater.optimizer.defaults, FIRST_LR}
            ]
            values = [(option, repr(saved.get(option)), repr(current.get(option))) for option in options]
            changes += [OptionChange(name, option, was, now) for option, was, now in values if was != now]
        return changes

    def apply(self) -> None:
        """Replace the state that is no tensor, and give the optimizer its tensors."""
        updater, saved = self.rank.updater, self.training
        if updater.optimizer is not None and saved.optimizer is not None:
            updater.optimizer.load_state_dict(self.optimizer_state(updater.optimizer))
            known = updater.made_options.keys() & saved.states.keys()
            updater.made_options |= {name: copied(saved.states[name].made) for name in known}
        if updater.scheduler is not None and saved.scheduler_state is not None:
            updater.scheduler.load_state_dict(copied(saved.scheduler_state))
        if updater.scaler is not None and saved.scaler_state is not None:
            updater.scaler.load_state_dict(copied(saved.scaler_state))
        if self.rank.ema is not None:
            self.rank.ema.load_state(saved.ema_state)
        updater.zero_grad()
        self.apply_random()

    def apply_random(self) -> None:
        """Let generators continue as in the run that saved; under another mesh or seed, seed them.

        The seed depends on the number of updates, so that no resumed run repeats the numbers of an earlier one.
        """
        spec, saved = self.rank.spec, self.header
        place, device = (spec.place.stage, spec.place.replica), torch.device(spec.device)
        states = self.training.random.get(place, [])
        mesh = saved.plan.get("mesh", {})
        before = {**mesh, "tp_axes": tuple(mesh.get("tp_axes", ()))}  # a list in JSON, and not in older files
        as_saved = before == asdict(spec.mesh) and saved.seed == spec.recipe.seed
        if as_saved and len(states) == len(generator_states(device)):
            set_generator_states(states, device)
        else:
            seed_generators(seed_of(spec.recipe.seed, saved.updates, *place), device)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Argument of the optimizer's ``load_state_dict``, which moves each value to its device."""
        saved, state = self.training, {}
        target = optimizer.state_dict()
        for k, (group, names) in enumerate(zip(target["param_groups"], named_groups(self.rank), strict=True)):
            known = [saved.states[name].group for name in names if name in saved.states]
            if known:
                group.update(without_kernel_options(saved.groups[known[0]]))
            elif len(target["param_groups"]) == len(saved.order):  # a group whose parameters are all on other ranks
                group.update(without_kernel_options(saved.groups[saved.order[k]]))
            for index, name in zip(group["params"], names, strict=True):
                values: Mapping[Any, Any] = saved.states[name].values if name in saved.states else {}
                own = copied(values) | self.states.get(name, {})
                if own:
                    state[index] = own
        return {**target, "state": state}


def without_kernel_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a saved group without `KERNEL_OPTIONS`: the devices may have changed."""
    return {name: value for name, value in copied(options).items() if name not in KERNEL_OPTIONS}


def unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Differences between the options of two groups, as text: ``weight_decay 0.05 and 0.0``."""
    return ", ".join(f"{name} {one.get(name)} and {other.get(name)}" for name in one if one[name] != other.get(name))
