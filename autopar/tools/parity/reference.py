"""The model on one device, which runs a plan's microbatches with gradient accumulation.

Batch norm uses microbatch statistics as under the plan; its running statistics come from the first replica.
"""

from __future__ import annotations

import copy
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
from autopar.runtime.spec import LossOver
from autopar.tools.parity.difference import Named
from autopar.trace.call import Call, split_leaves
from autopar.trace.copy_model import copy_model
from autopar.trace.passes.bf16_params import cast_leaf, params_to_lower

LossFunction = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class StepOutcome:
    """Mean loss of a batch, its named outputs, and the gradients accumulated so far."""

    loss: float
    outputs: Named
    gradients: Named


class Reference:
    """The model on one device, trained in its own precision or as in the examples of torch.amp."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        optimizer: Callable[..., torch.optim.Optimizer],
        pm: ParallelModel,
        call: Call,
        low: str | None = None,
        low_params: torch.dtype | None = None,
        loss_over: LossOver = "microbatch",
    ) -> None:
        """Copy the model.

        Args:
            call: an example of later calls, with the same structure.
            low: dtype of autocast, None without.
            low_params: dtype of the parameters' copies in forward and backward; then only the loss is under autocast.
            loss_over: as for `autopar.parallelize`.
        """
        self.device = torch.device(pm.machine.device_of(0))
        self.low, self.low_params = getattr(torch, low) if low else None, low_params
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=low == "float16")
        self.model = copy_model(model).to(self.device)
        self.modes = {module: module.training for module in self.model.modules()}
        batch = self.parts_of(call, [call.batch])[0]
        modes: tuple[Mode, ...] = ("train", "eval")
        self.whole = {mode: shapes_of(output_in(self.model, batch, mode)) for mode in modes}
        self.loss_fn, self.loss_over = loss_fn, loss_over
        self.microbatches, self.replicas = pm.plan.microbatches, pm.plan.mesh.dp
        self.buffers = [self.own_buffers(), *(copy.deepcopy(self.own_buffers()) for _ in range(1, self.replicas))]
        self.optimizer = optimizer([p for p in self.model.parameters() if p.requires_grad])
        use_fused_kernels(self.optimizer)  # as ranks do: rounding differences of other kernels flip rectifiers

    def parts(self, call: Call) -> tuple[list[Call], list[int]]:
        """Call and number of samples of each microbatch, replica by replica."""
        sizes = partition(call.batch, self.replicas, self.microbatches)
        return self.parts_of(call, sizes), sizes

    def parts_of(self, call: Call, sizes: list[int]) -> list[Call]:
        """The call cut into parts, on the model's device."""
        calls = []
        for part in split_leaves(call.leaves, call.batch, sizes):
            moved = [leaf.to(self.device) if isinstance(leaf, torch.Tensor) else leaf for leaf in part]
            calls.append(Call(*unflatten(moved, call.spec)))
        return calls

    def outputs(self, call: Call) -> Named:
        """Named outputs of the model in eval mode for a batch."""
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
            with self.replica(i // count):
                outputs.append(self.output(part))
                if self.loss_over == "microbatch":
                    total += self.backward(outputs[-1], target, size / call.batch)
        whole = joined(outputs, sizes, self.whole["train"])
        if self.loss_over == "batch":
            total = self.backward(unflatten(whole, flatten(outputs[0])[1]), y, 1.0)
        return StepOutcome(total, named_outputs(whole), self.gradients())

    def backward(self, output: Any, target: Any, share: float) -> float:
        """Run the backward of a share of the loss of an output, and return that share."""
        target_leaves, spec = flatten(target)
        moved = [leaf.to(self.device) if isinstance(leaf, torch.Tensor) else leaf for leaf in target_leaves]
        with self.autocast():
            loss = self.loss_fn(output, unflatten(moved, spec)) * share
        self.scaler.scale(loss).backward()
        return loss.item()

    def output(self, call: Call) -> Any:
        """Output of the model for a microbatch, in the reference's precision."""
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
        """Within ``with``, the model has the buffers of a replica; outside it has the first replica's."""
        self.set_buffers(self.buffers[number])
        yield
        self.buffers[number] = self.own_buffers()  # a forward may have made new ones, of another shape
        self.set_buffers(self.buffers[0])

    def own_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that the model has now, by all of their names."""
        return dict(self.model.named_buffers(remove_duplicate=False))

    def set_buffers(self, buffers: dict[str, torch.Tensor]) -> None:
        for name, buffer in buffers.items():
            path, _, attribute = name.rpartition(".")
            setattr(self.model.get_submodule(path), attribute, buffer)

    def gradients(self) -> Named:
        scale = self.scaler.get_scale()
        return [(n, p.grad.detach().cpu() / scale) for n, p in self.model.named_parameters() if p.grad is not None]

    def optimizer_step(self, wanted: bool = True) -> None:
        """Update the weights.

        Args:
            wanted: whether the parallel model updated its weights. A reference without autocast follows it. Under
                autocast the reference's own scaler decides, which only float16 can make skip.
        """
        if wanted or self.low is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, torch.Tensor]:
        return {name: tensor.cpu() for name, tensor in self.model.state_dict().items()}


def output_in(model: nn.Module, call: Call, mode: Mode) -> Any:
    """Output of a copy of the model in a mode; the model's statistics and the random generator do not change."""
    twin = copy_model(model)
    enter_mode(twin, {module: module.training for module in twin.modules()}, mode)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return twin(*call.args, **call.kwargs)


def shapes_of(output: Any) -> list[torch.Size | None]:
    """Shape of each leaf of an output, None for a leaf that is not a tensor."""
    return [leaf.shape if isinstance(leaf, torch.Tensor) else None for leaf in leaves(output)]


def joined(outputs: list[Any], sizes: list[int], whole: list[torch.Size | None]) -> list[Any]:
    """Leaves of the output for the batch, joined from the outputs of its microbatches.

    Args:
        whole: shapes of the leaves when the model runs the batch in one call. Leaves that grow with the batch have
            another shape there. The parallel model learns this from the traced graph, on which a reference must not
            rely.
    """
    result = []
    for shape, *column in zip(whole, *map(leaves, outputs), strict=True):
        first = column[0]
        if shape is not None and shape != first.shape:
            grown = next(dim for dim, (size, part) in enumerate(zip(shape, first.shape)) if size != part)
            result.append(torch.cat(column, grown))
        elif shape is not None and first.is_floating_point() and not shape:
            equal = all(torch.equal(first, leaf) for leaf in column)
            mean = sum(leaf * (size / sum(sizes)) for leaf, size in zip(column, sizes, strict=True))
            result.append(first if equal else mean)
        else:
            result.append(first)
    return result


def named_outputs(output: Any) -> Named:
    """Tensors of an output, named by their number."""
    found = [leaf for leaf in leaves(output) if isinstance(leaf, torch.Tensor)]
    return [(f"output {i}", leaf.detach().cpu().clone()) for i, leaf in enumerate(found)]
