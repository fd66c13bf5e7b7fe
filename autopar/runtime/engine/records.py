"""Records of a step: a chunk's module, its data, what it returns, and the time of its actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from autopar.ir.program import Program
from autopar.runtime.comm.protocols import RecvHandle
from autopar.runtime.engine.deferred_wgrads import Captured, DeferredWgrads
from autopar.runtime.engine.send_lifetimes import SendKey
from autopar.schedule.actions import Action


@dataclass(frozen=True)
class ChunkModule:
    """A program and its module, for microbatches of one shape; ``wgrads`` of a split backward."""

    program: Program
    module: nn.Module
    wgrads: DeferredWgrads | None = None

    def gradients_of(self, action: Action) -> list[str]:
        """Names of the weights whose gradients an action computes, in the program's order."""
        deferred = self.wgrads.names if self.wgrads is not None and action.kind != "B" else frozenset()
        names = [weight.name for weight in self.program.weights]
        return [] if action.kind == "F" else [name for name in names if (name in deferred) == (action.kind == "W")]


@dataclass(frozen=True)
class ActionTiming:
    """Measured compute of one action, without the wait for its inputs; seconds since the rank's first action."""

    action: Action
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class StepData:
    """One rank's data for a step, one list entry per microbatch.

    Args:
        inputs: tensors in the order of `input_names` of the rank's programs.
        targets: second argument of ``loss_fn``; read on the last stage. The first one is that of all
            microbatches, where the batch has one loss.
        shares: weight of the microbatch's loss in the mean over the batch, or of the batch's one loss; read on the last
            stage.
    """

    inputs: list[list[torch.Tensor]]
    targets: list[Any]
    shares: list[float]


NO_DATA = StepData([], [], [])


@dataclass(frozen=True)
class StepTensors:
    """Tensors that a step returns, one list entry per microbatch.

    Args:
        losses: each as its part of the mean, []; None on ranks that compute no loss.
        outputs: flattened outputs of the model; empty lists except where they are kept.
    """

    losses: list[torch.Tensor | None]
    outputs: list[list[Any]]


class SavedForward(NamedTuple):
    """Tensors that the backward of a microbatch needs from its forward.

    They are received tensors with gradients, gradient edges of results, and the list that the backward fills for
    `DeferredWgrads`.
    """

    inputs: list[torch.Tensor]
    edges: list[Any]
    captured: Captured


@dataclass(frozen=True)
class BoundAction:
    """An action of this rank with everything that its run needs.

    Args:
        post_receives: posts the receives of its inputs; returns a handle for each.
        compute: computes it from the received tensors, and starts its sends.
        reaches: weights of a backward.
        completes: weights whose last backward this is: after it their gradients are complete.
        releases: sends that are known to be taken before it, so that their memory can be freed.
    """

    action: Action
    post_receives: Callable[[], list[RecvHandle]]
    compute: Callable[[list[torch.Tensor]], None]
    reaches: frozenset[str]
    completes: tuple[str, ...]
    releases: list[SendKey]
