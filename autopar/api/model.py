"""The object that a user drives: train steps, forward passes, state."""

from __future__ import annotations

import inspect
import os
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf, isfinite
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.api.checkpoint import header_of, load, save
from autopar.api.dispatch import IN_FLIGHT, BatchRequest, Dispatcher
from autopar.api.program_cache import ProgramCache
from autopar.api.step_result import StepMetrics, StepResult
from autopar.errors import NonFiniteLossWarning, UsageError
from autopar.ir.checkpoint_header import Header
from autopar.ir.graph import Mode
from autopar.ir.layout import TP
from autopar.ir.mesh import Place
from autopar.ir.plan import Plan
from autopar.runtime.engine.metrics import resolve
from autopar.runtime.launch.devices import Machine
from autopar.runtime.launch.pool import WorkerPool
from autopar.runtime.launch.spmd import InProcessBackend, SpmdBackend
from autopar.runtime.spec import LazyMetrics, RankSpec, RankStats, RankStepResult, StepNumbers, UpdateResult
from autopar.sharding.tensors import assembled, part, summed
from autopar.trace.call import as_call
from autopar.trace.passes.counter_rng import RNG_COUNTERS


class ParallelModel:
    """A model split over ranks by a plan. Made by `autopar.parallelize`.

    Between calls it behaves like the model with its optimizer on one device: gradients accumulate until
    `optimizer_step`, state dicts have the original names and full tensors.

    With data parallelism each replica trains on an equal contiguous part of the global batch. In a plain script
    ``data_size`` is 1, and inputs, targets and outputs are those of the global batch. Under torchrun they are those of
    part ``data_rank`` of ``data_size``, the rank's own, and all parts are of one size; losses, gradients and state are
    of the whole in both cases. Batch norm uses the statistics of a replica's microbatches in training; running
    statistics are the first replica's, in evaluation and state dicts alike.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        programs: ProgramCache,
        ranks: InProcessBackend | SpmdBackend | WorkerPool,
        machine: Machine,
        spec: RankSpec,
    ) -> None:
        """Take over running ranks; ``spec`` is what any of them was told."""
        self.plan = plan
        self.machine = machine
        self._spec = spec
        self.lr_scheduler = SchedulerHandle(self)
        self._model, self._programs, self._ranks = model, programs, ranks
        self._dispatcher = Dispatcher(programs, ranks, spec.seed)
        self.data_size, self.data_rank = self._dispatcher.data_size, self._dispatcher.data_rank
        self._mode: Mode = "train"
        self._unread: deque[StepResult] = deque()
        self._aliases = {name: w.name for w in programs.example.weights for name in w.names}
        self._state_names = [n for n in model.state_dict() if n in self._aliases]

    # -- data --------------------------------------------------------------------------------------------------

    @property
    def needs_inputs(self) -> bool:
        """Whether this process has to pass real inputs; if not, tensors on the meta device do as well."""
        stages = {s for rank in self._ranks.numbers for s in self.plan.mesh.stages(rank, self.plan.chunks)}
        read = {v.name for variant in self._programs.known.values() for s in stages for v in variant.programs[s].inputs}
        return not read <= {RNG_COUNTERS}

    @property
    def needs_targets(self) -> bool:
        """Whether this process has to pass real targets; if not, tensors on the meta device do as well."""
        return any(self.plan.mesh.place(rank).stage == self.plan.mesh.pp - 1 for rank in self._ranks.numbers)

    def data_sum(self, numbers: Sequence[float]) -> list[float]:
        """Sums over data ranks of numbers that each has of its part; all ranks of torchrun make the call."""
        if not isinstance(self._ranks, SpmdBackend):
            return list(numbers)
        given = self._ranks.gathered(list(numbers))
        firsts = [given[self.plan.mesh.rank(Place(0, replica))] for replica in range(self.data_size)]
        return [sum(column) for column in zip(*firsts, strict=True)]

    def any_rank(self, flag: bool) -> bool:
        """Whether ``flag`` is true on any rank; all ranks of torchrun make the call, and wait for each other."""
        return any(self._ranks.gathered(flag)) if isinstance(self._ranks, SpmdBackend) else flag

    def broadcast_from_rank0(self, text: str) -> str:
        """What rank 0 passes here, on every rank; all ranks of torchrun make the call, and wait for each other."""
        return self._ranks.gathered(text)[0] if isinstance(self._ranks, SpmdBackend) else text

    def any_rank_so_far(self, flag: bool) -> bool:
        """Whether any rank's ``flag`` was true, of those that were passed here before the last batch; waits for nobody.

        Flags travel with the agreement on a batch, so under torchrun this answers one batch late, on all ranks alike.
        """
        return self._dispatcher.any_rank_so_far(flag)

    @property
    def num_updates(self) -> int:
        """Calls of `optimizer_step` and `train_step` so far."""
        return self._dispatcher.num_updates

    @property
    def num_drawn(self) -> int:
        """Samples since the last update that random operations have counted."""
        return self._dispatcher.num_drawn

    @property
    def autocast(self) -> str | None:
        """The low dtype of mixed precision; None where the model computes in its weights' own."""
        return self._spec.autocast

    # -- mode --------------------------------------------------------------------------------------------------

    @property
    def training(self) -> bool:
        return self._mode == "train"

    def train(self, mode: bool = True) -> ParallelModel:
        """Use the training graph (dropout, batch statistics) from now on."""
        self._mode = "train" if mode else "eval"
        return self

    def eval(self) -> ParallelModel:
        """Use the evaluation graph from now on."""
        return self.train(False)

    # -- steps -------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs for a batch, in order and without gradients, in the current mode.

        Raises:
            UsageError: as `forward_backward`, or an output depends on the batch and cannot be joined from microbatches.
        """
        call = self._programs.call(args, kwargs)
        request = BatchRequest("forward", self._mode, "forward-only", call, keep_outputs=True)
        results, outputs = self._dispatcher.carry_out(request)
        assert outputs is not None
        return self._dispatcher.joined_outputs(outputs, results)

    def forward_backward(self, x: Any, y: Any, return_outputs: bool = False, share: float = 1.0) -> StepResult:
        """Loss and gradients of a batch; gradients add to those that are there.

        To train on a batch in pieces, call it on all but the last one, and `train_step` on that, each with its share of
        the samples: what is updated by is the gradient of the mean loss of all of them.

        Args:
            x: the model's input: a tensor, a tuple of positional inputs or a dict of keyword inputs. The first dim of
                the first tensor is the batch. Every tensor with the same first size is cut into microbatches along
                that dim, whatever it means there; all others go whole to each microbatch.
            y: the target of ``loss_fn``; tensors in it have the batch as their first dim.
            share: factor of the gradients: the batch's part of all samples that the next update sees. The loss is
                always the mean of this batch.

        Raises:
            UsageError: inputs of another structure, dtype or shape than the model takes, or a batch that the
                data-parallel replicas cannot share evenly.
            WorkerError: a rank failed; all are ended.
        """
        return self._train("forward_backward", x, y, return_outputs, share)

    def _train(self, command: str, x: Any, y: Any, return_outputs: bool, share: float) -> StepResult:
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < inf:
            raise UsageError(
                f"share={share!r} must be a number above 0: this batch's part of all samples of the update, such as "
                "1 / 4 for each of four equal parts."
            )
        while len(self._unread) >= IN_FLIGHT:
            _ = self._unread.popleft().figures
        request = self._training(command, x, y, return_outputs, share)
        results: dict[int, RankStepResult]
        results, outputs = self._dispatcher.carry_out(request)
        seconds, step = self._ranks.call_seconds, self.num_updates
        if command == "train_step":
            self._dispatcher.updated()
        joined = None
        if outputs is not None:
            joined = self._dispatcher.joined_outputs(outputs, {rank: own.outputs for rank, own in results.items()})
        numbers = results[max(results)].numbers
        if isinstance(numbers, StepNumbers):
            return StepResult(self._figures(numbers, seconds, share, step), joined)
        result = StepResult(partial(self._figures, numbers, seconds, share, step), joined)
        self._unread.append(result)
        return result

    def _figures(self, numbers: StepNumbers | LazyMetrics, call_seconds: float, share: float, step: int) -> StepMetrics:
        """What the caller is told; waits for it, and warns of a loss that is not finite."""
        numbers = resolve(numbers)
        self._report_non_finite(numbers.losses, step)
        seconds = call_seconds if numbers.device_seconds is None else numbers.device_seconds
        return StepMetrics(sum(numbers.losses) / share, seconds, numbers.grad_norm, numbers.skipped)

    def _training(self, command: str, x: Any, y: Any, keep_outputs: bool = False, share: float = 1.0) -> BatchRequest:
        call = as_call(self._model, x)
        call = self._programs.call(call.args, call.kwargs)
        return BatchRequest(command, self._mode, self.plan.schedule, call, (y,), keep_outputs, share)

    def optimizer_step(self) -> UpdateResult:
        """Clip, update the weights, clear the gradients; their norm, and whether the update was skipped.

        Raises:
            UsageError: parallelize was given no optimizer.
        """
        self._check_optimizer()
        results = self._call("optimizer_step", self.num_updates)
        self._dispatcher.updated()
        return results[max(results)]

    def _check_optimizer(self) -> None:
        if self._spec.optimizer is None:
            raise UsageError(
                f"{self.plan.model.name} cannot be updated: parallelize was given no optimizer. "
                "Pass optimizer=functools.partial(torch.optim.AdamW, lr=1e-3)."
            )

    def train_step(self, x: Any, y: Any, return_outputs: bool = False, share: float = 1.0) -> StepResult:
        """`forward_backward` and `optimizer_step`; arguments and errors as there.

        With data parallelism it is the faster way: gradients are summed over the replicas while the last ones are still
        computed.
        """
        self._check_optimizer()
        return self._train("train_step", x, y, return_outputs, share)

    def zero_grad(self) -> None:
        """Drop accumulated gradients; random operations draw again what they drew for them."""
        self._call("zero_grad")
        self._dispatcher.num_drawn = 0

    def _report_non_finite(self, losses: list[float], step: int) -> None:
        bad = [i for i, loss in enumerate(losses) if not isfinite(loss)]
        if bad:
            warnings.warn(
                f"The loss of step {step} is {sum(losses)}: microbatches {bad} of {len(losses)}. "
                "Gradients are not finite either; lower the learning rate or check the inputs.",
                NonFiniteLossWarning,
                stacklevel=frames_here(),  # the caller of forward_backward or train_step, or whoever reads the loss
            )

    # -- state -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Full tensors on CPU under the original names: loads into the unmodified model."""
        merged = assembled(self._call("state"), self._spec.storage, self.plan.mesh)
        return {name: merged[self._aliases[name]] for name in self._state_names}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take the weights of a state dict of the unmodified model.

        Raises:
            UsageError: names are missing or unknown, or a shape differs; nothing was changed.
        """
        missing = [n for n in self._state_names if n not in state]
        unknown = [n for n in state if n not in self._aliases]
        if missing or unknown:
            raise UsageError(
                f"The state dict does not fit {self.plan.model.name}: {len(missing)} names missing {missing[:3]}, "
                f"{len(unknown)} unknown {unknown[:3]}. It must be one of the unmodified model."
            )
        weights = self._programs.example.weight
        for name in self._state_names:
            expected, got = weights[self._aliases[name]].shape, tuple(state[name].shape)
            if expected != got:
                raise UsageError(f"{name} in the state dict has shape {list(got)}, the model's is {list(expected)}.")
        by_weight = {self._aliases[n]: state[n] for n in self._state_names}
        arguments = {}
        for rank in self._ranks.numbers:
            place = self.plan.mesh.place(rank)
            held = [name for name in by_weight if place.stage in self._programs.positions[name]]
            index, sizes = {TP: place.shard}, {TP: self.plan.mesh.tp}
            arguments[rank] = ({n: part(by_weight[n], self._spec.layout(n), sizes, index) for n in held},)
        self._dispatcher.call("load", arguments)

    def ema_state_dict(self) -> dict[str, torch.Tensor]:
        """The averages of the weights, as `state_dict` gives the weights; of buffers those of the first replica.

        Raises:
            UsageError: parallelize was given no ema.
        """
        self._check_ema()
        merged = assembled(self._call("ema_state"), self._spec.storage, self.plan.mesh)
        return {name: merged[self._aliases[name]] for name in self._state_names}

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Within ``with``, the averages stand in for the weights: in `__call__` and `state_dict`.

        Raises:
            UsageError: parallelize was given no ema; or, within, training is asked for.
        """
        self._check_ema()
        self._call("swap_ema", True)
        self._dispatcher.averaged = True
        try:
            yield
        finally:
            self._dispatcher.averaged = False
            if self._ranks.failed is None:
                self._call("swap_ema", False)

    def _check_ema(self) -> None:
        if self._spec.ema is None:
            raise UsageError(
                f"The weights of {self.plan.model.name} are not averaged: parallelize was given no ema. Pass "
                "ema=functools.partial(timm.utils.ModelEmaV3, decay=0.999)."
            )

    def save_checkpoint(self, folder: str | PathLike[str], extra: Any = None) -> None:
        """Save all that training goes on from: weights, buffers, the state of optimizer and scheduler, counters, plan.

        Every rank writes its parts, and `load_checkpoint` takes them under any other mesh. The folder always holds one
        whole checkpoint, whenever the process is killed; while a new one is written it needs room for both. Gradients
        that no update has used yet are not saved. Under torchrun all ranks call this, with a folder that they share.

        Args:
            extra: the caller's own, such as the position in the data; anything that JSON can hold.

        Raises:
            UsageError: ``extra`` is not such a thing.
            CheckpointError: it cannot be written (the disk is full, say); the one that was there is as it was, and
                training can go on.
        """
        save(self._dispatcher, folder, self._header(extra))

    def load_checkpoint(self, folder: str | PathLike[str]) -> Any:
        """Go on from a checkpoint that was saved under any mesh; the ``extra`` that was saved with it.

        The options of parameter groups, learning rates among them, are those of the checkpoint. Where there is no
        optimizer here, the weights alone are taken. Gradients are dropped. A ResumeWarning says what is otherwise here
        than in the run that saved: seed, batch, precision, options, averages.

        Raises:
            CheckpointError: it is none, is damaged, or is of another model or optimizer; nothing was changed.
        """
        header = load(self._dispatcher, folder, self._header(None), self._spec)
        self._dispatcher.num_updates, self._dispatcher.num_drawn = header.updates, header.drawn
        return header.extra

    def _header(self, extra: Any) -> Header:
        counters = (self._spec.seed, self.num_updates, self.num_drawn)
        return header_of(self.plan, self._programs.example.weights, self._state_names, counters, extra)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Accumulated gradients on CPU by original name; parameters without one are left out."""
        total = summed(self._call("gradients"), self._spec.storage, self.plan.mesh)
        return {w.name: total[w.name] for w in self._programs.example.weights if w.name in total}

    def loss_scale(self) -> float:
        """The factor on the loss under ``precision="fp16"``, which gradients and losses shown are free of; else 1."""
        return max(self._call("loss_scale").values())

    def learning_rates(self) -> list[float]:
        """Learning rate of each of the optimizer's parameter groups."""
        return max(self._call("learning_rates").values(), key=len)

    def stats(self) -> dict[int, RankStats]:
        """What each rank measured in its last step."""
        return self._call("stats")

    def measure_memory(self, x: Any, y: Any) -> dict[int, int]:
        """Most bytes in tensors at once on each rank during a training step, which is done; slower than a plain one."""
        found, _ = self._dispatcher.carry_out(self._training("tensor_peak", x, y))
        self._dispatcher.updated()
        return found

    # -- end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the workers and free their memory. May be called again.

        Steps that are under way are waited for, so that what they came to can still be read.
        """
        try:
            while self._unread and self._ranks.failed is None:
                _ = self._unread.popleft().figures
        finally:
            self._ranks.close()

    def __enter__(self) -> ParallelModel:
        return self

    def __exit__(self, *exception: object) -> None:
        if any(exception):  # steps that are under way may never end
            self._unread.clear()
        self.close()

    def _call(self, name: str, *arguments: Any) -> dict[int, Any]:
        return self._dispatcher.call_all(name, *arguments)


ROOM = str(Path(__file__).parent) + os.sep


def frames_here() -> int:
    """How many frames above the caller's, itself included, are of this room; as `warnings.warn` counts levels."""
    frame, count = inspect.currentframe(), 0
    while frame is not None and frame.f_code.co_filename.startswith(ROOM):
        frame, count = frame.f_back, count + 1
    return count


class SchedulerHandle:
    """Steps the learning-rate schedulers of all ranks."""

    def __init__(self, owner: ParallelModel) -> None:
        self._owner = owner

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Call ``step`` of every rank's scheduler.

        Raises:
            UsageError: parallelize was given no lr_scheduler, or the scheduler refuses the arguments.
        """
        self._step("step", args, kwargs)

    def step_update(self, *args: Any, **kwargs: Any) -> None:
        """Call ``step_update`` of every rank's scheduler, which timm's have.

        Raises:
            UsageError: as `step`, or the scheduler has no such method.
        """
        self._step("step_update", args, kwargs)

    def _step(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._owner._spec.lr_scheduler is None:
            raise UsageError("There is no learning-rate scheduler to step. Pass lr_scheduler=, a callable(optimizer).")
        self._owner._call("scheduler_step", method, args, kwargs)

    def get_last_lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        return self._owner.learning_rates()
