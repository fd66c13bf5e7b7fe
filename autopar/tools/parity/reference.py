"""The model on one device, doing a plan's microbatches with gradient accumulation.

Batch norm uses microbatch statistics as under the plan; running statistics are those of the first replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.api.batch import partition, split_targets
from autopar.api.model import ParallelModel
from autopar.api.program_cache import enter_mode
from autopar.ir.graph import Mode
from autopar.ir.pytree import flatten, leaves, unflatten
from autopar.runtime.optim.build import use_fused_kernels
from autopar.tools.parity.difference import Named
from autopar.trace.call import Call, split_leaves
from autopar.trace.copy_model import copy_model
from autopar.trace.passes.bf16_params import cast_leaf, params_to_lower

LossFunction = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class StepOutcome:
    """The mean loss of a batch, the outputs by name, and the gradients so far."""

    loss: float
    outputs: Named
    gradients: Named


class Reference:
    """The model on one device, trained plainly or as torch.amp's examples do."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        optimizer: Callable[..., torch.optim.Optimizer],
        pm: ParallelModel,
        call: Call,
        low: str | None = None,
        low_params: torch.dtype | None = None,
    ) -> None:
        """Copy the model.

        Args:
            call: is like all that will follow.
            low: dtype of autocast, None without.
            low_params: dtype of copies of the parameters that it computes with; then only the loss is under autocast.
        """
        self.device = torch.device(pm.machine.device_of(0))
        self.low, self.low_params = getattr(torch, low) if low else None, low_params
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=low == "float16")
        self.model = copy_model(model).to(self.device)
        self.modes = {module: module.training for module in self.model.modules()}
        here = self.parts_of(call, [call.batch])[0]
        modes: tuple[Mode, ...] = ("train", "eval")
        self.whole = {mode: shapes_of(output_in(self.model, here, mode)) for mode in modes}
        self.loss_fn, self.microbatches, self.replicas = loss_fn, pm.plan.microbatches, pm.plan.mesh.dp
        first = [buffer.detach().clone() for buffer in self.model.buffers()]
        self.buffers = dict.fromkeys(range(1, self.replicas), first)  # of the replicas that the model does not show
        self.optimizer = optimizer([p for p in self.model.parameters() if p.requires_grad])
        use_fused_kernels(self.optimizer)  # as ranks do: what other kernels round otherwise flips rectifiers

    def parts(self, call: Call) -> tuple[list[Call], list[int]]:
        """The call of each microbatch of each replica, and its samples."""
        sizes = partition(call.batch, self.replicas, self.microbatches)
        return self.parts_of(call, sizes), sizes

    def parts_of(self, call: Call, sizes: list[int]) -> list[Call]:
        """The call cut into parts, on the model's device."""
        calls = []
        for part in split_leaves(call.leaves, call.batch, sizes):
            here = [leaf.to(self.device) if isinstance(leaf, torch.Tensor) else leaf for leaf in part]
            calls.append(Call(*unflatten(here, call.spec)))
        return calls

    def outputs(self, call: Call) -> Named:
        """What the model returns in eval mode for a batch, by name."""
        enter_mode(self.model, self.modes, "eval")
        calls, sizes = self.parts(call)
        with torch.no_grad():
            outputs = [self.output(part) for part in calls]
        return named_outputs(joined(outputs, sizes, self.whole["eval"]))

    def forward_backward(self, call: Call, y: Any) -> StepOutcome:
        """Accumulate the gradients of a batch, microbatch by microbatch."""
        enter_mode(self.model, self.modes, "train")
        calls, sizes = self.parts(call)
        targets = split_targets(y, call.batch, sizes)
        count = len(sizes) // self.replicas
        total, outputs = 0.0, []
        for i, (part, target, size) in enumerate(zip(calls, targets, sizes, strict=True)):
            here, spec = flatten(target)
            moved = [leaf.to(self.device) if isinstance(leaf, torch.Tensor) else leaf for leaf in here]
            with self.replica(i // count):
                output = self.output(part)
                with self.autocast():
                    loss = self.loss_fn(output, unflatten(moved, spec)) * (size / call.batch)
                self.scaler.scale(loss).backward()
            total += loss.item()
            outputs.append(output)
        return StepOutcome(total, named_outputs(joined(outputs, sizes, self.whole["train"])), self.gradients())

    def output(self, call: Call) -> Any:
        """What the model makes of a microbatch, in the precision asked for."""
        if self.low_params is None:
            with self.autocast():
                return self.model(*call.args, **call.kwargs)
        copies = {name: p.to(self.low_params) for name, p in params_to_lower(self.model).items()}
        leaves = [cast_leaf(leaf, self.low_params) for leaf in call.leaves]
        args, kwargs = unflatten(leaves, call.spec)
        return torch.func.functional_call(self.model, copies, args, kwargs)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.low, enabled=self.low is not None)

    @contextmanager
    def replica(self, number: int) -> Iterator[None]:
        """Within ``with`` the model has the buffers of a replica, outside those of the first one."""
        own = list(self.model.buffers())
        first = [buffer.detach().clone() for buffer in own]
        for buffer, kept in zip(own, self.buffers.get(number, first), strict=True):
            buffer.data.copy_(kept)
        yield
        if number:
            self.buffers[number] = [buffer.detach().clone() for buffer in own]
            for buffer, kept in zip(own, first, strict=True):
                buffer.data.copy_(kept)

    def gradients(self) -> Named:
        scale = self.scaler.get_scale()
        return [(n, p.grad.detach().cpu() / scale) for n, p in self.model.named_parameters() if p.grad is not None]

    def optimizer_step(self, wanted: bool = True) -> None:
        """Update the weights; without autocast only if that is wanted: overflows happen in float16 alone."""
        if wanted or self.low is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, torch.Tensor]:
        return {name: tensor.cpu() for name, tensor in self.model.state_dict().items()}


def output_in(model: nn.Module, call: Call, mode: Mode) -> Any:
    """What a copy of the model returns in a mode; the model's statistics and the random numbers to come stay."""
    twin = copy_model(model)
    enter_mode(twin, {module: module.training for module in twin.modules()}, mode)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return twin(*call.args, **call.kwargs)


def shapes_of(output: Any) -> list[torch.Size | None]:
    """The shape of each leaf of an output, None for what is not a tensor."""
    return [leaf.shape if isinstance(leaf, torch.Tensor) else None for leaf in leaves(output)]


def joined(outputs: list[Any], sizes: list[int], whole: list[torch.Size | None]) -> list[Any]:
    """The leaves of the output for the batch from those of its microbatches.

    Args:
        whole: shapes of what the model returns for the batch at once. They tell what grows with the batch, and so this
            does not rely on the traced graph, which tells the parallel model.
    """
    result = []
    for shape, *column in zip(whole, *map(leaves, outputs), strict=True):
        first = column[0]
        if shape is not None and shape != first.shape:
            result.append(torch.cat(column))
        elif shape is not None and first.is_floating_point() and not shape:
            equal = all(torch.equal(first, leaf) for leaf in column)
            mean = sum(leaf * (size / sum(sizes)) for leaf, size in zip(column, sizes, strict=True))
            result.append(first if equal else mean)
        else:
            result.append(first)
    return result


def named_outputs(output: Any) -> Named:
    """The tensors of an output, numbered."""
    found = [leaf for leaf in leaves(output) if isinstance(leaf, torch.Tensor)]
    return [(f"output {i}", leaf.detach().cpu().clone()) for i, leaf in enumerate(found)]
