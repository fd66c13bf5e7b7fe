"""Commands: the methods of a rank that the driver of a model calls by name, on all ranks, and how they are handled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.runtime.rank import Rank


@dataclass(frozen=True)
class Command:
    """Properties of a command.

    Args:
        replicated: whether every rank of a launcher already has the result, or the part of it that its caller needs, so
            that no gather follows. Kept outputs are sent by the rank that has them.
        borrows_inputs: whether the command only reads its tensors; on a GPU it copies them to the device.
        is_step: whether a worker on a GPU replies as soon as the command is launched; its numbers are read later.
        allowed_under_averages: whether the command is valid while averages stand in for the weights. It neither reads
            nor writes the weights which an optimizer updates, or it shows the weights or averages in place.
        uses_files: whether ranks write or read files, so that they may wait for each other longer than in a step.
        changes_weights: whether a backward after it, of a forward before it, would read other weights than the forward.
        reads_only: whether weights, gradients and optimizer stay as they are, so that nothing is lost if the caller
            never gets the result. A first Ctrl-C waits for the end of such a command, and the model stays usable.
    """

    replicated: bool = False
    borrows_inputs: bool = False
    is_step: bool = False
    allowed_under_averages: bool = False
    uses_files: bool = False
    changes_weights: bool = False
    reads_only: bool = False


COMMANDS: Mapping[str, Command] = {
    "add_programs": Command(replicated=True, allowed_under_averages=True, reads_only=True),
    "forget_programs": Command(replicated=True, allowed_under_averages=True, reads_only=True),
    "forward": Command(replicated=True, borrows_inputs=True, allowed_under_averages=True, reads_only=True),
    "forward_backward": Command(replicated=True, borrows_inputs=True, is_step=True),
    "forward_graph": Command(replicated=True, borrows_inputs=True, allowed_under_averages=True, reads_only=True),
    "backward": Command(replicated=True),
    "drop_graphs": Command(replicated=True, allowed_under_averages=True, reads_only=True),
    "train_step": Command(replicated=True, borrows_inputs=True, is_step=True, changes_weights=True),
    "tensor_peak": Command(changes_weights=True),
    "clip_gradients": Command(replicated=True),
    "set_options": Command(replicated=True),
    "optimizer_step": Command(replicated=True, changes_weights=True),
    "zero_grad": Command(replicated=True, allowed_under_averages=True),
    "scheduler_step": Command(replicated=True, allowed_under_averages=True),
    "learning_rates": Command(replicated=True, allowed_under_averages=True, reads_only=True),
    "group_options": Command(allowed_under_averages=True, reads_only=True),
    "loss_scale": Command(replicated=True, allowed_under_averages=True, reads_only=True),
    "state": Command(allowed_under_averages=True, reads_only=True),
    "ema_state": Command(allowed_under_averages=True, reads_only=True),
    "optimizer_state": Command(allowed_under_averages=True, reads_only=True),
    "load_optimizer": Command(replicated=True),
    "gradients": Command(allowed_under_averages=True, reads_only=True),
    "stats": Command(allowed_under_averages=True, reads_only=True),
    "load": Command(replicated=True, changes_weights=True),
    "swap_ema": Command(replicated=True, changes_weights=True),
    "save_checkpoint": Command(uses_files=True, reads_only=True),
    "inspect_checkpoint": Command(uses_files=True, reads_only=True),
    "load_checkpoint": Command(uses_files=True, changes_weights=True),
}


def command_named(name: str) -> Command:
    """Properties of a command; a name that is not in the table is a bug of the driver."""
    assert name in COMMANDS, f"{name!r} is no command of a rank"
    return COMMANDS[name]


def run_command(rank: Rank, name: str, arguments: tuple[Any, ...]) -> Any:
    """Result of a command on a rank."""
    command_named(name)
    return getattr(rank, name)(*arguments)
