"""A rank's whole training step as one CUDA graph: captured once for each batch signature, then replayed.

After `WARM_UP_STEPS` eager steps of a signature (shapes, shares, programs) the same Python code runs once more under
capture. From then on the graph is replayed, on all ranks or on none. Flags between hosts are recorded in eager steps
and replayed (`recorded_flags`); the Python values that ``loss_fn`` reads are checked (`closure_guard`).
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from autopar.errors import CaptureWarning, UsageError
from autopar.ir.pytree import leaves, tree_map
from autopar.runtime.engine.closure_guard import closure_fingerprint
from autopar.runtime.engine.executor import BoundStep
from autopar.runtime.engine.loss import LossFunction
from autopar.runtime.engine.recorded_flags import FlagRecorder
from autopar.runtime.engine.records import StepData
from autopar.runtime.optim.probe import nested
from autopar.runtime.optim.step import Updater
from autopar.runtime.spec import DeviceStepResult, RankSpec, StepRequest

WARM_UP_STEPS = 2  # eager steps before a capture: they compile and load kernels and connect communicators
MAX_GRAPHS = 4  # graphs that are kept
EVICT_AFTER_STEPS = 100  # steps without use after which a graph gives way to another one
MAX_CACHED_STEPS = 64  # signatures that are remembered


@dataclass
class CachedStep:
    """State of one step signature: its eager steps so far, and its graph once it is captured.

    Args:
        eager_steps: number of eager steps so far.
        last_used: number of the last step with this signature.
        recorded_flags: flags that peers' hosts sent in the last eager step.
        closure: fingerprint of the Python values that ``loss_fn`` read in the last step that was not a replay.
        unstable_reason: difference between two eager steps that forbids a capture, or empty.
        with_optimizer: whether the graph updates the weights.
        capture_error: why the step is not captured, or empty.
        options: optimizer options that the graph has fixed, as text.
        data: tensors that the graph reads; each replay overwrites them.
        result: tensors that the graph writes; each replay overwrites them.
        gradients: gradients that the graph leaves for an optimizer outside of it, by name.
    """

    eager_steps: int = 0
    last_used: int = 0
    recorded_flags: list[list[int]] = field(default_factory=list)
    closure: Mapping[str, str] = field(default_factory=dict)
    unstable_reason: str = ""
    with_optimizer: bool = True
    capture_error: str = ""
    options: str = ""
    graph: torch.cuda.CUDAGraph | None = None
    data: StepData | None = None
    result: DeviceStepResult | None = None
    step: BoundStep | None = None
    marks: list[Any] = field(default_factory=list)
    gradients: Mapping[str, Tensor] = field(default_factory=dict)


class CapturableRank(Protocol):
    """Attributes of a `Rank` that capturing its training steps needs."""

    spec: RankSpec
    device: torch.device
    stream: torch.cuda.Stream | None
    updater: Updater
    flag_recorder: FlagRecorder
    loss_fn: LossFunction
    current_step: BoundStep | None
    has_pending_grads: bool

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes losses."""
        ...

    def compute(self, request: StepRequest) -> DeviceStepResult:
        """A training step up to the update."""
        ...

    def abandon_step(self) -> None:
        """Leave nothing of a step that raised."""
        ...


class CudaGraphCache:
    """Runs a rank's training steps: eager at first, then as CUDA graphs.

    No step runs twice: the first steps of a signature are eager, the next one is captured, which computes nothing, and
    then replayed. All ranks take the same decision at the same step. A step that cannot be captured stays eager, and a
    `CaptureWarning` says why.
    """

    def __init__(self, rank: CapturableRank) -> None:
        self.rank = rank
        self.cached_steps: OrderedDict[tuple[Any, ...], CachedStep] = OrderedDict()
        self.num_steps = 0
        self.learning_rates: list[
            Tensor
        ] = []  # learning rate of each parameter group, a device scalar that graphs read
        self.pool: Any = None

    def forget(self) -> None:
        """Drop all graphs; needed before the tensors that they use are replaced."""
        self.cached_steps.clear()
        self.learning_rates, self.pool = [], None

    def forget_shape(self, shape_signature: tuple[int, ...]) -> None:
        """Drop the steps of one batch shape, on all ranks."""
        for key in [key for key in self.cached_steps if key[-1] == shape_signature]:
            del self.cached_steps[key]

    def run(self, request: StepRequest) -> DeviceStepResult:
        """Run a training step up to the update; a graph may include the update."""
        if self.rank.has_pending_grads:
            return self.rank.compute(request)  # a graph begins without gradients
        cached = self.cached_step(request)
        if cached.capture_error:
            return self.rank.compute(request)
        if cached.graph is not None and cached.with_optimizer and cached.options != self.fixed_options():
            # A scheduler changes more than the learning rate: keep the optimizer outside of the graph.
            cached.graph, cached.with_optimizer = None, False
        if cached.graph is None and cached.eager_steps < WARM_UP_STEPS:
            return self.run_eager(cached, request)
        if cached.graph is None and self.make_room():
            self.capture(cached, request)
        return self.replay(cached, request) if cached.graph is not None else self.rank.compute(request)

    def cached_step(self, request: StepRequest) -> CachedStep:
        """Cached state of a step's signature; a new signature evicts the least recently used one."""
        key = (request.schedule, request.programs, request.signature, request.shape_signature)
        if key not in self.cached_steps and len(self.cached_steps) == MAX_CACHED_STEPS:
            self.cached_steps.popitem(last=False)
        cached = self.cached_steps.setdefault(key, CachedStep())
        self.cached_steps.move_to_end(key)
        self.num_steps += 1
        cached.last_used = self.num_steps
        return cached

    def make_room(self) -> bool:
        """Whether another graph may be captured; evicts a graph that has been idle for long."""
        captured = [key for key, kind in self.cached_steps.items() if kind.graph is not None]
        if len(captured) < MAX_GRAPHS:
            return True
        if self.num_steps - self.cached_steps[captured[0]].last_used <= EVICT_AFTER_STEPS:
            return False
        del self.cached_steps[captured[0]]
        return True

    def run_eager(self, cached: CachedStep, request: StepRequest) -> DeviceStepResult:
        """Run an eager step, and record the flags between hosts."""
        make_capturable(self.rank.updater.optimizer)
        self.rank.flag_recorder.record()
        try:
            computed = self.rank.compute(request)
        finally:
            flags = self.rank.flag_recorder.stop()
        closure = self.read_closure()
        if cached.eager_steps and flags != cached.recorded_flags:
            cached.unstable_reason = "which gradients there are differs from step to step"
        elif cached.eager_steps and closure != cached.closure:
            cached.unstable_reason = f"loss_fn changes {first_change(cached.closure, closure)} from step to step"
        cached.eager_steps, cached.recorded_flags, cached.closure = cached.eager_steps + 1, flags, closure
        return computed

    def read_closure(self) -> Mapping[str, str]:
        """Fingerprint of the Python values that this rank's loss function reads; empty without one."""
        return closure_fingerprint(self.rank.loss_fn) if self.rank.is_last_stage else {}

    def capture(self, cached: CachedStep, request: StepRequest) -> None:
        """Capture the graph, on all ranks or none; weights and state do not change."""
        rank = self.rank
        optimizer = rank.updater.optimizer
        cached.with_optimizer &= optimizer is not None and is_capturable(optimizer)
        cached.options = self.fixed_options()
        reason = cached.unstable_reason
        try:
            if not reason:
                self.capture_step(cached, request)
        except Exception as error:  # raised by the user's loss, an optimizer or an operation under capture
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            end_random_capture(rank.device)
        all_ranks = range(rank.spec.mesh.devices)
        failed = rank.flag_recorder.sum_flags([bool(reason)], all_ranks)[0] if len(all_ranks) > 1 else bool(reason)
        if failed:
            cached.graph = cached.data = cached.result = cached.step = None
            cached.marks, cached.gradients = [], {}
            cached.capture_error = reason or "another rank cannot capture it"
            rank.abandon_step()  # on all ranks, which bind their schedules together
        if reason:
            warnings.warn(
                f"Steps are run without CUDA graphs, which is slower: {reason}. Pass cuda_graph=False to do without "
                "this attempt.",
                CaptureWarning,
                stacklevel=1,
            )

    def capture_step(self, cached: CachedStep, request: StepRequest) -> None:
        """Capture a step on static copies of its tensors."""
        rank, graph = self.rank, torch.cuda.CUDAGraph()
        if all(other.graph is None for other in self.cached_steps.values()):
            self.pool = None  # a memory pool ends with its last graph
        cached.data = StepData(
            [[static_like(t, rank.device) for t in ts] for ts in request.data.inputs],
            [tree_map(lambda leaf: static_like(leaf, rank.device), target) for target in request.data.targets],
            request.data.shares,
        )
        optimizer = rank.updater.optimizer if cached.with_optimizer else None
        if optimizer is not None and not self.learning_rates:
            self.learning_rates = [torch.zeros((), device=rank.device) for _ in optimizer.param_groups]
        rank.flag_recorder.replay(cached.recorded_flags)
        cached.closure = self.read_closure()
        try:
            with torch.cuda.graph(graph, self.pool, rank.stream, capture_error_mode="thread_local"):
                computed = rank.compute(replace(request, data=cached.data))
                if optimizer is not None:
                    with tensor_learning_rates(optimizer, self.learning_rates):
                        rank.updater.update(computed.norm)
                else:
                    cached.gradients = {n: p.grad for n, p in rank.updater.updated.items() if p.grad is not None}
                    rank.updater.zero_grad()
        finally:
            rank.flag_recorder.stop()
        cached.result = DeviceStepResult(computed.losses, computed.norm, computed.outputs, optimizer is not None)
        cached.graph, self.pool = graph, graph.pool()
        cached.step = rank.current_step
        cached.marks = rank.current_step.marks if rank.current_step is not None else []

    def replay(self, cached: CachedStep, request: StepRequest) -> DeviceStepResult:
        """Replay the graph on a step's tensors."""
        rank, optimizer = self.rank, self.rank.updater.optimizer
        assert cached.graph is not None and cached.data is not None and cached.result is not None
        if (closure := self.read_closure()) != cached.closure:
            raise UsageError(
                f"loss_fn reads {first_change(cached.closure, closure)}, and the CUDA graph of this step has the "
                "earlier value. Let it come with the target, or pass cuda_graph=False."
            )
        copy_step_data(cached.data, request.data)
        if cached.with_optimizer and optimizer is not None:
            for rate, group in zip(self.learning_rates, optimizer.param_groups, strict=True):
                rate.fill_(float(group["lr"]))
        cached.graph.replay()
        for name, gradient in cached.gradients.items():
            rank.updater.updated[name].grad = gradient
        rank.current_step = cached.step
        if cached.step is not None:
            cached.step.marks = cached.marks
        result = cached.result  # the next replay overwrites this memory
        outputs = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, result.outputs)
        return DeviceStepResult(result.losses.clone(), result.norm.clone(), outputs, result.updated)

    def fixed_options(self) -> str:
        """Options of the optimizer's groups that a graph fixes: all but parameters and learning rates."""
        optimizer = self.rank.updater.optimizer
        groups = optimizer.param_groups if optimizer is not None else []
        return repr([{k: v for k, v in g.items() if k not in ("params", "lr")} for g in groups])


def first_change(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Text on the first difference between two fingerprints."""
    places = (place for place in {**before, **after} if before.get(place) != after.get(place))
    place = next(places)
    return f"`{place}` (was {before.get(place, 'not there')}, is {after.get(place, 'not there')})"


def end_random_capture(device: torch.device) -> None:
    """Have a GPU's default generator draw outside of graphs again: torch (2.11) leaves it in a capture that failed."""
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index]
        generator.graphsafe_set_state(generator.clone_state())  # the clone is not in capture


# -- data ----------------------------------------------------------------------------------------------------------


def static_like(leaf: Any, device: torch.device) -> Any:
    """An empty tensor like ``leaf`` on a device; other values unchanged."""
    return torch.empty_like(leaf, device=device) if isinstance(leaf, Tensor) else leaf


def copy_step_data(static: StepData, source: StepData) -> None:
    """Copy a step's tensors into those that its graph reads."""
    static_leaves, source_leaves = (leaves((data.inputs, data.targets)) for data in (static, source))
    for target, leaf in zip(static_leaves, source_leaves, strict=True):
        if isinstance(target, Tensor):
            target.copy_(leaf, non_blocking=True)


# -- optimizers ----------------------------------------------------------------------------------------------------


def is_capturable(optimizer: Optimizer) -> bool:
    """Whether a graph can hold the optimizer's whole step, without Python code that each step has to run again.

    Every group has torch's ``capturable``: the optimizer keeps no changing number on the host. This says nothing of
    hooks on the step, or of a subclass that overrides ``step``.
    """
    is_single = list(nested(optimizer)) == [optimizer]
    return (
        is_single
        and not optimizer._optimizer_step_pre_hooks
        and not optimizer._optimizer_step_post_hooks
        and not overrides_step(type(optimizer))
        and all(group.get("capturable") for group in optimizer.param_groups)
    )


def overrides_step(kind: type[Optimizer]) -> bool:
    """Whether a subclass of one of torch's optimizers has its own ``step``."""
    bases = kind.__mro__[: kind.__mro__.index(Optimizer)]
    # Not "step" in vars(kind): torch wraps the step of each class and sets it on that class, and keeps its module.
    return any(map(is_of_torch, bases)) and not is_of_torch(kind.step)


def is_of_torch(thing: Any) -> bool:
    """Whether a class or function comes from torch.optim."""
    return thing.__module__.startswith("torch.optim.")


def make_capturable(optimizer: Optimizer | None) -> None:
    """Have a torch optimizer keep step counts and other scalars on the device, if it has ``capturable``."""
    if optimizer is None or any("capturable" not in group for group in optimizer.param_groups):
        return
    for group in optimizer.param_groups:
        group["capturable"] = True
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            numbers = {key: t for key, t in state.items() if isinstance(t, Tensor) and t.ndim == 0}
            state.update({key: number.to(parameter.device) for key, number in numbers.items()})


@contextmanager
def tensor_learning_rates(optimizer: Optimizer, rates: Sequence[Tensor]) -> Iterator[None]:
    """Context in which the groups' learning rates are these tensors, each []."""
    before = [group["lr"] for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = rate
