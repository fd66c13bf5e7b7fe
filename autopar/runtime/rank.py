"""One rank: its weights, its programs, its optimizer, and the commands it obeys."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.ir import Program, Weight
from autopar.pytree import leaves
from autopar.runtime.executor import BoundStep, Chunk, Span, StepData
from autopar.runtime.memory import TensorPeak, peak_resident_bytes, resident_bytes
from autopar.runtime.transport import Transport
from autopar.schedule import generate

Build = Callable[[Program, Mapping[str, torch.Tensor], torch.device], nn.Module]


@dataclass(frozen=True)
class RankSpec:
    """What a rank needs to know before it is given weights; the same for all ranks but for ``rank`` and ``device``.

    Args:
        build: turns a program and its weights into a module.
        weights: the weights this rank holds, in the model's order.
        holders: for every weight held by several ranks, those ranks in order; the first one owns it.
        edges: every directed pair of ranks that exchanges tensors.
        loss_fn, optimizer, lr_scheduler: as given to `autopar.parallelize`.
        clip_grad_norm: largest global gradient norm, or None.
    """

    rank: int
    world: int
    device: str
    build: Build
    weights: tuple[Weight, ...]
    holders: Mapping[str, tuple[int, ...]]
    edges: tuple[tuple[int, int], ...]
    loss_fn: Callable[[Any, Any], torch.Tensor]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None
    lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    clip_grad_norm: float | None = None
    seed: int = 0

    @property
    def shared(self) -> tuple[tuple[int, ...], ...]:
        """Rank sets that all-reduce: those that hold one weight together, and everybody."""
        return tuple({*self.holders.values(), tuple(range(self.world))})


@dataclass(frozen=True)
class Work:
    """One call of a step: which schedule, which program for each microbatch, and this rank's data."""

    schedule: str
    programs: tuple[int, ...]
    data: StepData
    training: bool
    keep_outputs: bool


@dataclass(frozen=True)
class RankStats:
    """What a rank measured: seconds of compute per action and of the whole last step, and the most bytes ever in use.

    ``peak_bytes`` is the process's resident memory on CPU, less libraries and the batch itself, and the allocator's on
    a GPU.
    """

    spans: tuple[Span, ...]
    step_seconds: float
    peak_bytes: int


class Rank:
    """Holds one rank's part of the model and runs its part of every step."""

    def __init__(self, spec: RankSpec, tensors: Mapping[str, torch.Tensor], transport: Transport) -> None:
        """Take ``tensors``, this rank's weights by name: the caller gives them away."""
        self.spec, self.transport = spec, transport
        self.device = torch.device(spec.device)
        self.weights: dict[str, torch.Tensor] = {}
        for weight in spec.weights:
            tensor = tensors[weight.name].detach().to(self.device)
            is_parameter = weight.kind == "parameter"
            self.weights[weight.name] = nn.Parameter(tensor, weight.requires_grad) if is_parameter else tensor
        self.trainable = {w.name: self.parameter(w.name) for w in spec.weights if w.requires_grad}
        parameters = list(self.trainable.values())
        self.optimizer = spec.optimizer(parameters) if spec.optimizer and parameters else None
        self.scheduler = spec.lr_scheduler(self.optimizer) if spec.lr_scheduler and self.optimizer else None
        self.chunks: dict[int, Chunk] = {}
        self.bound: dict[tuple, BoundStep] = {}
        self.running: BoundStep | None = None
        self.step_seconds = 0.0
        self.data_bytes = 0
        # Libraries are not the model's: torch.optim alone imports over 100 MB.
        self.base_bytes = resident_bytes() - sum(t.nbytes for t in self.weights.values())

    def parameter(self, name: str) -> nn.Parameter:
        parameter = self.weights[name]
        assert isinstance(parameter, nn.Parameter)
        return parameter

    # -- programs ----------------------------------------------------------------------------------------------

    def add_program(self, key: int, program: Program, constants: Mapping[str, torch.Tensor]) -> None:
        """Build a program under a number that steps will name; ``constants`` are those it reads."""
        held = self.weights | {name: tensor.to(self.device) for name, tensor in constants.items()}
        self.chunks[key] = Chunk(program, self.spec.build(program, held, self.device))

    def step(self, work: Work) -> BoundStep:
        """The bound schedule for a step, made at its first use."""
        key = (work.schedule, work.programs, work.training)
        if key not in self.bound:
            schedule = generate(work.schedule, self.spec.world, len(work.programs))
            last = self.spec.rank == self.spec.world - 1
            loss_fn = self.spec.loss_fn if last and work.training else None
            chunks = [self.chunks[k] for k in work.programs]
            self.bound[key] = BoundStep(schedule, chunks, self.transport, self.device, loss_fn, work.training)
        return self.bound[key]

    # -- steps -------------------------------------------------------------------------------------------------

    def forward(self, work: Work) -> list[list[Any]]:
        """Flattened outputs per microbatch; empty lists except on the last stage."""
        return self.execute(work).outputs

    def forward_backward(self, work: Work) -> tuple[list[float], list[list[Any]]]:
        """Accumulate gradients; the loss of each microbatch (its part of the mean), known to all ranks, and outputs."""
        step = self.execute(work)
        losses = torch.zeros(len(work.programs), dtype=torch.float64, device=self.device)
        if self.spec.rank == self.spec.world - 1:
            losses += torch.stack([loss for loss in step.losses if loss is not None]).flatten()
        self.transport.all_reduce(losses, range(self.spec.world))
        return losses.tolist(), step.outputs

    def execute(self, work: Work) -> BoundStep:
        start = time.perf_counter()
        self.running = self.step(work)
        given = leaves((work.data.inputs, work.data.targets))
        self.data_bytes = sum(t.nbytes for t in given if isinstance(t, torch.Tensor))
        self.running.run(work.data, work.keep_outputs)
        self.step_seconds = time.perf_counter() - start
        return self.running

    def optimizer_step(self) -> float:
        """Clip, update, clear gradients; the global norm of the gradients before clipping."""
        self.sum_shared_gradients()
        norm = self.global_norm()
        gradients = [p for p in self.trainable.values() if p.grad is not None]
        if self.spec.clip_grad_norm is not None and gradients:
            nn.utils.clip_grads_with_norm_(gradients, self.spec.clip_grad_norm, norm)
        if self.optimizer is not None:
            self.optimizer.step()
        self.zero_grad()  # all of them, also those that the optimizer was not made for
        return norm.item()

    def tensor_peak(self, work: Work) -> int:
        """Most bytes in tensors at once during a training step, the batch itself not counted on CPU."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.train_step(work)
            return torch.cuda.max_memory_allocated(self.device)
        standing = self.standing_bytes()
        with TensorPeak() as peak:
            self.train_step(work)
        return standing + peak.bytes

    def train_step(self, work: Work) -> None:
        self.forward_backward(work)
        self.optimizer_step()

    def standing_bytes(self) -> int:
        """Bytes that stay between steps: weights and the optimizer's state."""
        states = leaves(self.optimizer.state_dict()["state"]) if self.optimizer else []
        return sum(t.nbytes for t in (*self.weights.values(), *states) if isinstance(t, torch.Tensor))

    def zero_grad(self) -> None:
        for parameter in self.trainable.values():
            parameter.grad = None

    def sum_shared_gradients(self) -> None:
        """Give every holder of a tied parameter the sum of all holders' gradients, or None where nobody has one."""
        for name, ranks in sorted(self.spec.holders.items()):
            if len(ranks) < 2 or name not in self.trainable:
                continue
            parameter = self.trainable[name]
            has_gradient = torch.tensor([float(parameter.grad is not None)], device=self.device)
            self.transport.all_reduce(has_gradient, ranks)
            if has_gradient.item() == 0:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self.transport.all_reduce(parameter.grad, ranks)

    def global_norm(self) -> torch.Tensor:
        """2-norm of all gradients of all ranks, tied parameters counted once."""
        own = [
            p.grad
            for name, p in self.trainable.items()
            if p.grad is not None and self.spec.holders.get(name, (self.spec.rank,))[0] == self.spec.rank
        ]
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        if own:
            square += nn.utils.get_total_norm(own).square()
        self.transport.all_reduce(square, range(self.spec.world))
        return square.sqrt().float()

    def scheduler_step(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if self.scheduler is not None:
            self.scheduler.step(*args, **kwargs)

    def learning_rates(self) -> list[float]:
        """Learning rate of each parameter group; empty on a rank that trains nothing."""
        return [float(group["lr"]) for group in self.optimizer.param_groups] if self.optimizer else []

    # -- state -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of the weights this rank owns, on CPU."""
        return {n: t.detach().cpu().clone() for n, t in self.weights.items() if self.owns(n)}

    def owns(self, name: str) -> bool:
        return self.spec.holders.get(name, (self.spec.rank,))[0] == self.spec.rank

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Overwrite the weights named; those that other ranks hold are ignored."""
        with torch.no_grad():
            for name in self.weights.keys() & tensors.keys():
                self.weights[name].copy_(tensors[name])

    def gradients(self) -> dict[str, torch.Tensor]:
        """Copies of this rank's own part of each gradient, on CPU: tied parameters' parts add up over their holders."""
        return {n: p.grad.detach().cpu().clone() for n, p in self.trainable.items() if p.grad is not None}

    def stats(self) -> RankStats:
        """Measurements of the last step."""
        return RankStats(
            self.running.spans() if self.running else (),
            self.step_seconds,
            self.peak_bytes(),
        )

    def peak_bytes(self) -> int:
        """Most bytes in use so far, beyond the base and the batch that was handed over."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return peak_resident_bytes() - self.base_bytes - self.data_bytes
