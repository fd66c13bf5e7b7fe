"""`ParallelModel`, the object that a user drives: training steps, forward passes, state, checkpoints."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf, isfinite
from os import PathLike
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from autopar.api.autograd import moved_to_inputs, outputs_with_graph
from autopar.api.batch_agreement import check_not_refused
from autopar.api.checkpoint import check_folder, check_keep, header_of, load_on_ranks, save_on_ranks
from autopar.api.dispatch import BatchRequest, Dispatcher
from autopar.api.module_attributes import OF_MODEL, missing_attribute
from autopar.api.precision import warn_of_autocast
from autopar.api.program_cache import ProgramCache
from autopar.api.scheduler_handle import SchedulerHandle
from autopar.api.state_dict import (
    load_on_workers,
    load_whole_optimizer_state,
    misfit,
    whole_optimizer_state,
    with_versions,
)
from autopar.api.step_result import MAX_STEPS_IN_FLIGHT, StepMetrics, StepResult
from autopar.errors import NonFiniteLossWarning, UsageError, caller_level
from autopar.ir.checkpoint_header import Header
from autopar.ir.graph import Mode
from autopar.ir.mesh import Place
from autopar.ir.plan import Plan
from autopar.ir.units import plural
from autopar.runtime.engine.metrics import resolve
from autopar.runtime.launch.devices import Machine
from autopar.runtime.launch.pool import WorkerPool
from autopar.runtime.launch.recipe_text import call_text
from autopar.runtime.launch.spmd import InProcessBackend, SpmdBackend
from autopar.runtime.optim.param_groups import NamedState, plain_data
from autopar.runtime.spec import LazyMetrics, RankSpec, RankStats, RankStepResult, StepNumbers, UpdateResult
from autopar.sharding.tensors import assembled, summed_gradients
from autopar.trace.call import as_call
from autopar.trace.passes.random_ops import RNG_COUNTERS


class ParallelModel:
    """A model split over ranks by a plan, as returned by `autopar.parallelize`.

    Between calls it behaves like the model with its optimizer on one device: gradients accumulate until
    `optimizer_step`, and state dicts have the original names and full tensors.

    With data parallelism each replica trains on an equal contiguous part of the global batch. In a plain script
    ``data_size`` is 1: inputs, targets and outputs are those of the global batch. Under torchrun each rank passes part
    ``data_rank`` of ``data_size`` of the global batch and gets the outputs of that part; all parts have one size.
    Losses, gradients and state belong to the global batch in both cases. In training, batch norm uses the statistics of
    a replica's microbatches. Running statistics, in evaluation and in state dicts, are those of the first replica.
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
        """Take over running ranks; ``spec`` is the spec of any of them."""
        self.plan = plan
        self.machine = machine
        self._spec = spec
        self._model, self._programs, self._ranks = model, programs, ranks
        self._dispatcher = Dispatcher(programs, ranks, spec.recipe)
        self.lr_scheduler: SchedulerHandle = SchedulerHandle(self._dispatcher, spec.recipe.lr_scheduler is not None)
        self.data_size: int = self._dispatcher.data_size
        self.data_rank: int = self._dispatcher.data_rank
        self._mode: Mode = "train" if model.training else "eval"
        self._keeps_graphs = spec.recipe.loss_over == "caller"
        # Called before `save_checkpoint` and after `load_checkpoint`; set by `PreparedOptimizer`.
        self.before_save: Callable[[], Any] = lambda: None
        self.after_load: Callable[[], Any] = lambda: None
        self._unread: deque[StepResult] = deque()
        self._warned_of_autocast = False
        self._aliases = {name: w.name for w in programs.example.weights for name in w.names}
        state = model.state_dict()
        self._state_names = [name for name in state if name in self._aliases]
        # What the modules' get_extra_state() returned: no tensors of the graph, so no rank has them.
        self._extra_state = {name: value for name, value in state.items() if name not in self._aliases}
        self._versioned = with_versions({}, state)

    def __repr__(self) -> str:
        return f"ParallelModel({self.plan.model.name}, {self.plan.mesh}{'' if self.is_open else ', closed'})"

    # -- data --------------------------------------------------------------------------------------------------

    @property
    def needs_inputs(self) -> bool:
        """Whether this process has to pass real inputs; if not, tensors on the meta device are enough."""
        stages = {s for rank in self._ranks.numbers for s in self.plan.stages_of(rank)}
        programs = [own.programs[stage] for own in self._programs.specializations.values() for stage in stages]
        read = {value.name for program in programs for value in program.inputs}
        return not read <= {RNG_COUNTERS}

    @property
    def needs_targets(self) -> bool:
        """Whether this process has to pass real targets; if not, tensors on the meta device are enough."""
        return self._keeps_graphs or any(map(self.plan.has_last_stage, self._ranks.numbers))

    def data_sum(self, numbers: Sequence[float]) -> list[float]:
        """Sums over the data ranks of the numbers that each passes for its part; all ranks of torchrun call it."""
        if not isinstance(self._ranks, SpmdBackend):
            return list(numbers)
        with self._dispatcher.compared(f"data_sum of {plural(len(numbers), 'number')}"):
            by_rank = self._ranks.gathered(list(numbers))
        firsts = [by_rank[self.plan.mesh.rank(Place(0, replica))] for replica in range(self.data_size)]
        return [sum(column) for column in zip(*firsts, strict=True)]

    def any_rank(self, flag: bool) -> bool:
        """Whether ``flag`` is true on any rank; all ranks of torchrun call it and wait for each other."""
        if not isinstance(self._ranks, SpmdBackend):
            return flag
        with self._dispatcher.compared("any_rank"):
            return any(self._ranks.gathered(flag))

    def broadcast_from_rank0(self, text: str) -> str:
        """The text that rank 0 passes, on every rank; all ranks of torchrun call it and wait for each other.

        They wait as long as for a checkpoint: rank 0 may have copied or removed files.
        """
        if not isinstance(self._ranks, SpmdBackend):
            return text
        with self._dispatcher.compared("broadcast_from_rank0", uses_files=True):
            return self._ranks.gathered(text, uses_files=True)[0]

    def any_rank_so_far(self, flag: bool) -> bool:
        """Whether any rank passed a true ``flag`` before the last batch; does not wait.

        Flags travel with the agreement on a batch. Under torchrun the answer is therefore one batch late, and the same
        on all ranks.
        """
        return self._dispatcher.any_rank_so_far(flag)

    @property
    def is_open(self) -> bool:
        """Whether the ranks run: neither closed, nor ended by a failure."""
        return self._ranks.failed is None

    @property
    def num_updates(self) -> int:
        """Calls of `optimizer_step` and `train_step` so far."""
        return self._dispatcher.num_updates

    @property
    def has_gradients(self) -> bool:
        """Whether gradients have accumulated that no update has used."""
        return self._dispatcher.has_gradients

    @property
    def num_drawn(self) -> int:
        """Samples that random operations have counted since the last update."""
        return self._dispatcher.num_drawn

    @property
    def autocast(self) -> str | None:
        """Low dtype of mixed precision; None if the model computes in the dtype of its weights."""
        return self._spec.autocast

    @property
    def compiled(self) -> bool:
        """Whether ranks run code of torch.compile, which their first step and each new shape compile."""
        return self._spec.compiled

    # -- mode --------------------------------------------------------------------------------------------------

    @property
    def training(self) -> bool:
        return self._mode == "train"

    def train(self, mode: bool = True) -> ParallelModel:
        """Use the training graph (dropout, batch statistics) from now on; the evaluation graph if ``mode`` is false."""
        self._mode = "train" if mode else "eval"
        return self

    def eval(self) -> ParallelModel:
        """Use the evaluation graph from now on."""
        return self.train(False)

    # -- steps -------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs for a batch, in the current mode.

        They have no graph, except under ``loss_over="caller"`` where gradients are enabled: then ``loss.backward()`` of
        a loss that is computed from them accumulates the gradients of the ranks. Under torchrun the gradients are those
        of the mean of the ranks' losses, as DistributedDataParallel computes them.

        Outputs of microbatches are joined: samples are concatenated in the dim in which they lie, sums over samples are
        added, and means are weighted by samples. The first call with a batch of a new size traces the model at that
        size, which shows how. Batch norm in training uses the statistics of each microbatch.

        Raises:
            UsageError: as `forward_backward`, or an output for the batch does not follow from those for the
                microbatches, as a maximum over samples.
        """
        self._warn_of_autocast()
        with self._dispatcher.checking():
            call = self._programs.bind_call(args, kwargs)
        if self._keeps_graphs and torch.is_grad_enabled():
            return outputs_with_graph(self._dispatcher, self._mode, call)
        request = BatchRequest("forward", self._mode, "forward-only", call, keep_outputs=True)
        results, outputs = self._dispatcher.carry_out(request)
        assert outputs is not None
        joined = self._dispatcher.joined_outputs(outputs, results)
        return moved_to_inputs(joined, call) if self._keeps_graphs else joined

    def forward_backward(self, x: Any, y: Any, return_outputs: bool = False, share: float = 1.0) -> StepResult:
        """Loss and gradients of a batch; gradients accumulate.

        To train on a batch in parts, call this on all but the last part and `train_step` on the last one. Pass each
        its share of the samples: the update then uses the gradient of the mean loss over all parts.

        Args:
            x: the model's input: a tensor, a tuple of positional inputs or a dict of keyword inputs. The first dim of
                the first tensor is the batch. Every tensor with the same first size is cut into microbatches along
                that dim, whatever it means there; each microbatch gets all other tensors whole.
            y: the target of ``loss_fn``: a tensor, or a tuple or dict of tensors, whose first dim is the batch. Each
                microbatch gets everything else in it whole.
            return_outputs: whether the result has the model's outputs too, as `__call__` returns them.
            share: factor of the gradients: the batch's part of all samples of the next update. The loss is always the
                mean over this batch.

        Raises:
            UsageError: structure, dtype or shape of the inputs differ from the example inputs, the data-parallel
                replicas cannot share the batch evenly, a tensor requires grad, or outputs are wanted that cannot be
                joined.
            WorkerError: a rank failed; all are ended.
        """
        return self._train("forward_backward", x, y, return_outputs, share)

    def _train(self, command: str, x: Any, y: Any, return_outputs: bool, share: float) -> StepResult:
        self._warn_of_autocast()
        self._read_oldest(MAX_STEPS_IN_FLIGHT - 1)
        request = self._training_request(command, x, y, return_outputs, share)
        results: dict[int, RankStepResult]
        results, outputs = self._dispatcher.carry_out(request)
        seconds, step = self._ranks.call_seconds, self.num_updates
        if command == "train_step":
            self._dispatcher.updated()
        else:
            self._dispatcher.has_gradients = True
        joined = None
        if outputs is not None:
            joined = self._dispatcher.joined_outputs(outputs, {rank: own.outputs for rank, own in results.items()})
        numbers = results[max(results)].numbers
        if isinstance(numbers, StepNumbers):
            return StepResult(self._metrics(numbers, seconds, share, step), joined)
        result = StepResult(partial(self._metrics, numbers, seconds, share, step), joined)
        self._unread.append(result)
        return result

    def _warn_of_autocast(self) -> None:
        """Warn once of an autocast region around a call, in which the caller may expect its precision."""
        if not self._warned_of_autocast:
            self._warned_of_autocast = warn_of_autocast(self.plan.precision, self.machine.device_type)

    def _read_oldest(self, num_kept: int) -> None:
        """Read the results of the oldest unread steps, until at most ``num_kept`` are unread."""
        while len(self._unread) > num_kept:
            try:
                oldest = self._unread.popleft()
            except IndexError:  # another thread, which closes the model, has taken it
                return
            _ = oldest.figures

    def _metrics(self, numbers: StepNumbers | LazyMetrics, call_seconds: float, share: float, step: int) -> StepMetrics:
        """Metrics of a step; waits for its numbers and warns of a loss that is not finite."""
        numbers = resolve(numbers)
        self._report_non_finite(numbers.losses, step)
        seconds = call_seconds if numbers.device_seconds is None else numbers.device_seconds
        return StepMetrics(sum(numbers.losses) / share, seconds, numbers.grad_norm, numbers.skipped)

    def _training_request(
        self, command: str, x: Any, y: Any, keep_outputs: bool = False, share: float = 1.0
    ) -> BatchRequest:
        with self._dispatcher.checking():
            check_share(share)
            call = as_call(self._model, x)
            call = self._programs.bind_call(call.args, call.kwargs)
        return BatchRequest(command, self._mode, self.plan.schedule, call, (y,), keep_outputs, share)

    def clip_gradients(self, max_norm: float | None = None, max_value: float | None = None) -> float:
        """Clip the accumulated gradients before `optimizer_step`; returns their global norm before clipping.

        No gradients can be added or read afterwards. A limit given to parallelize applies as well.

        Args:
            max_norm: largest 2-norm of all gradients together.
            max_value: largest absolute value of a gradient's element.
        """
        self._dispatcher.note("clip_gradients", (max_norm, max_value))
        self._dispatcher.clipped = True
        return max(self._call("clip_gradients", max_norm, max_value).values())

    def set_group_options(self, changes: Sequence[Mapping[str, Any]]) -> None:
        """Change options of the optimizer's parameter groups, such as ``[{"lr": 1e-4}, {}]``, one dict per group."""
        self._check_optimizer()
        changes = [plain_data(dict(own)) for own in changes]
        self._dispatcher.note("set_group_options", (changes,))
        self._call("set_options", changes)

    def group_options(self) -> list[dict[str, Any]]:
        """Present options of each of the optimizer's parameter groups; none of a group without trained parameters.

        Some optimizers change options in each step, such as the number of steps. All ranks of torchrun call it.
        """
        self._check_optimizer()
        with self._dispatcher.compared("group_options", reads_only=True):
            by_rank = self._call("group_options").values()
        return [next((own for own in column if own is not None), {}) for column in zip(*by_rank, strict=True)]

    def optimizer_state(self) -> NamedState:
        """Whole state of the optimizer on CPU, by original name of the parameter; all ranks of torchrun call it.

        Raises:
            UsageError: parallelize was given no optimizer.
            CheckpointError: the optimizer keeps tensors of which parts make no whole that is known.
        """
        self._check_optimizer()
        return whole_optimizer_state(self._dispatcher)

    def load_optimizer_state(self, state: NamedState, options: Sequence[Mapping[str, Any]]) -> None:
        """Replace the state of the optimizer by one that `optimizer_state` returned under any mesh.

        Args:
            options: of each parameter group. Under torchrun all ranks pass the same.

        Raises:
            UsageError: parallelize was given no optimizer, or names are not of trained parameters.
        """
        self._check_optimizer()
        load_whole_optimizer_state(self._dispatcher, state, options)

    def optimizer_step(self) -> UpdateResult:
        """Clip gradients, update the weights and clear the gradients.

        Raises:
            UsageError: parallelize was given no optimizer.
        """
        self._check_optimizer()
        self._dispatcher.note("optimizer_step")
        results = self._call("optimizer_step", self.num_updates)
        self._dispatcher.updated()
        return results[max(results)]

    def _check_optimizer(self) -> None:
        if self._spec.recipe.optimizer is None:
            raise UsageError(
                f"{self.plan.model.name} cannot be updated: parallelize was given no optimizer. "
                "Pass optimizer=functools.partial(torch.optim.AdamW, lr=1e-3)."
            )

    def train_step(self, x: Any, y: Any, return_outputs: bool = False, share: float = 1.0) -> StepResult:
        """`forward_backward` and `optimizer_step`; arguments and errors as there.

        With data parallelism it is faster than the two calls: gradients are reduced over the replicas while the last
        backward still runs.
        """
        with self._dispatcher.checking():
            self._check_optimizer()
        return self._train("train_step", x, y, return_outputs, share)

    def zero_grad(self) -> None:
        """Drop accumulated gradients; random operations repeat the numbers that they drew for them."""
        self._dispatcher.note("zero_grad")
        self._call("zero_grad")
        self._dispatcher.set_counters(self.num_updates)

    def _report_non_finite(self, losses: list[float], step: int) -> None:
        bad = [i for i, loss in enumerate(losses) if not isfinite(loss)]
        if bad:
            warnings.warn(
                f"The loss of step {step} is {sum(losses)}: microbatches {bad} of {len(losses)}. "
                "Gradients are not finite either; lower the learning rate or check the inputs.",
                NonFiniteLossWarning,
                stacklevel=caller_level(),  # the line that called the step or reads the loss
            )

    # -- state -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Full tensors on CPU under the original names, for ``load_state_dict`` of the unmodified model.

        What ``get_extra_state`` of its modules returned is that of `parallelize`, or of the last ``load_state_dict``.
        """
        with self._dispatcher.compared("state_dict", reads_only=True):
            merged = assembled(self._call("state"), self._spec.storage, self.plan.mesh)
        found = {name: merged[self._aliases[name]] for name in self._state_names}
        return with_versions(found | self._extra_state, self._versioned)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state dict of the unmodified model. Under torchrun all ranks call this, and load rank 0's tensors.

        Raises:
            UsageError: names are missing or unknown, or a shape differs, on any rank; nothing was loaded.
        """
        weights = {name: self._programs.example.weight[alias] for name, alias in self._aliases.items()}
        refusal = misfit(state, weights, self._state_names, self._extra_state, self.plan.model.name)
        tensors = {} if refusal else {self._aliases[name]: state[name] for name in self._state_names}
        dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        with self._dispatcher.compared("load_state_dict"):
            by_rank = self._ranks.gathered((refusal, dtypes)) if isinstance(self._ranks, SpmdBackend) else []
        check_not_refused([text for text, _ in by_rank], UsageError(refusal) if refusal else None, "its state dict")
        self._extra_state |= {name: state[name] for name in self._extra_state if name in state}
        if isinstance(self._ranks, SpmdBackend):
            if self._ranks.numbers[0] != 0:
                tensors = {name: t.to("meta", by_rank[0][1][name]) for name, t in tensors.items()}
            self._dispatcher.call("load", {self._ranks.numbers[0]: (self._ranks.parts_of_rank0(tensors),)})
        else:
            load_on_workers(self._dispatcher, self._spec, tensors)

    def ema_state_dict(self) -> dict[str, torch.Tensor]:
        """As `state_dict`, for the averages of the weights; buffers are those of the first replica.

        Raises:
            UsageError: parallelize was given no ema.
        """
        self._check_ema()
        with self._dispatcher.compared("ema_state_dict", reads_only=True):
            merged = assembled(self._call("ema_state"), self._spec.storage, self.plan.mesh)
        found = {name: merged[self._aliases[name]] for name in self._state_names}
        return with_versions(found | self._extra_state, self._versioned)

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Within ``with``, `__call__` and `state_dict` use the averages of the weights.

        Raises:
            UsageError: parallelize was given no ema; or, within, a call trains, loads or saves.
        """
        self._check_ema()
        with self._dispatcher.compared("ema_weights"):
            self._call("swap_ema", True)
        self._dispatcher.averaged = True
        try:
            yield
        finally:
            self._dispatcher.averaged = False
            if self._ranks.failed is None:
                self._dispatcher.note("end of ema_weights")  # also after an exception that only this rank has
                self._call("swap_ema", False)

    def _check_ema(self) -> None:
        if self._spec.recipe.ema is None:
            raise UsageError(
                f"The weights of {self.plan.model.name} are not averaged: parallelize was given no ema. Pass "
                "ema=functools.partial(timm.utils.ModelEmaV3, decay=0.999)."
            )

    def save_checkpoint(self, folder: str | PathLike[str], extra: Any = None, keep: int = 1) -> None:
        """Save everything that training resumes from: weights, buffers, optimizer, scheduler, averages, counters, plan.

        Every rank writes its shards; `load_checkpoint` reads them under any other mesh. The folder holds one whole
        checkpoint at any moment, even if the process is killed; while a new one is written it needs room for one more.
        Gradients that no update has used are not saved. Under torchrun all ranks call this, with a shared folder.

        Args:
            extra: the caller's data, such as the position in the data set; anything that JSON can represent.
            keep: number of checkpoints to keep in the folder, with this one. Each older one is a folder in it, such as
                ``data-6``, that is loaded like any other checkpoint.

        Raises:
            UsageError: JSON cannot represent ``extra``, or ``keep`` is no whole number of at least 1.
            CheckpointError: the checkpoint cannot be written, for example because the disk is full. The previous
                checkpoint is unchanged, and training can go on.
        """
        self.before_save()
        with self._dispatcher.checking():
            check_folder(folder)
            check_keep(keep)
            header = self._header(extra)
        call = call_text("save_checkpoint", (str(folder),), {"keep": keep})
        with self._dispatcher.compared(call, reads_only=True, uses_files=True):
            save_on_ranks(self._dispatcher, folder, header, keep)

    def load_checkpoint(self, folder: str | PathLike[str]) -> Any:
        """Resume from a checkpoint that was saved under any mesh, and return the ``extra`` that was saved with it.

        Options of parameter groups, such as learning rates, become those of the checkpoint. Without an optimizer only
        the weights are loaded. Gradients are dropped. A ResumeWarning lists what differs from the run that saved: seed,
        batch, precision, options, averages.

        Random operations go on as in the run that saved. What cannot be counted (`PlanDependentRandomWarning`) does so
        under the same mesh and seed; under another one it draws numbers that no run has drawn.

        Raises:
            CheckpointError: the folder has no checkpoint, or it is damaged or of another model or optimizer; nothing
                was loaded. Names the other checkpoints that are kept in the folder. If a file cannot be read any more
                after its hash was checked, the model is closed.
        """
        with self._dispatcher.compared("load_checkpoint", uses_files=True):
            header = load_on_ranks(self._dispatcher, folder, self._header(None), self._spec)
        self._dispatcher.set_counters(header.updates, header.drawn)
        self.after_load()
        return header.extra

    def _header(self, extra: Any) -> Header:
        drawn = 0 if self._dispatcher.has_gradients else self.num_drawn  # a load drops gradients, as `zero_grad`
        counters = (self._spec.recipe.seed, self.num_updates, drawn)
        return header_of(self.plan, self._programs.example.weights, self._state_names, counters, extra)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Accumulated gradients on CPU by original name; parameters without one are left out."""
        self._dispatcher.check_not_clipped()
        with self._dispatcher.compared("gradients", reads_only=True):
            total = summed_gradients(self._call("gradients"), self._spec.storage, self.plan.mesh)
        return {w.name: total[w.name] for w in self._programs.example.weights if w.name in total}

    def loss_scale(self) -> float:
        """Factor on the loss under ``precision="fp16"``, else 1; reported losses and gradients do not contain it."""
        return max(self._call("loss_scale").values())

    def learning_rates(self) -> list[float]:
        """Learning rate of each of the optimizer's parameter groups."""
        return self.lr_scheduler.get_last_lr()

    def stats(self) -> dict[int, RankStats]:
        """Measurements of each rank in its last step."""
        with self._dispatcher.compared("stats", reads_only=True):
            return self._call("stats")

    def check_evaluates(self) -> None:
        """Raise a TraceError if the model cannot be called in eval mode, because that could not be traced."""
        self._programs.check_evaluates()

    def measure_memory(self, x: Any, y: Any) -> dict[int, int]:
        """Peak bytes of tensors on each rank during a training step; does the step, more slowly than `train_step`.

        Raises:
            UsageError: stages are compiled for the CPU; tensors inside of compiled code cannot be counted there.
        """
        if self.compiled and self.machine.device_type == "cpu":
            raise UsageError("Tensors inside of compiled stages cannot be counted on CPU. Pass compile=False.")
        peaks, _ = self._dispatcher.carry_out(self._training_request("tensor_peak", x, y))
        self._dispatcher.updated()
        return peaks

    # -- end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the workers and free their memory; may be called again.

        Waits for steps that are running, so that their results can still be read.
        """
        try:
            if self._ranks.failed is None:
                self._read_oldest(0)
        finally:
            self._ranks.close()

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "A ParallelModel cannot be pickled or copied: its weights are on running ranks. Save pm.state_dict(), or "
            "all of the training by pm.save_checkpoint(folder)."
        )

    if not TYPE_CHECKING:  # type checkers report unknown attributes themselves

        def __getattr__(self, name: str) -> NoReturn:
            raise missing_attribute(self, name, OF_MODEL)

    def __enter__(self) -> ParallelModel:
        return self

    def __exit__(self, *exception: object) -> None:
        if any(exception):  # steps that are running may never end
            self._unread.clear()
        self.close()

    def _call(self, name: str, *arguments: Any) -> dict[int, Any]:
        return self._dispatcher.call_all(name, *arguments)


def check_share(share: float) -> None:
    """Raise a UsageError unless ``share`` is a number above 0."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < inf:
        raise UsageError(
            f"share={share!r} must be a number above 0: this batch's part of all samples of the update, such as "
            "1 / 4 for each of four equal parts."
        )
