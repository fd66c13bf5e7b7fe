"""Proof that a plan computes what one device computes: the same steps twice, every tensor compared.

The reference is the unmodified model in this process, doing the plan's microbatches with gradient accumulation. Batch
norm uses microbatch statistics in both; running statistics are those of the first data-parallel replica. In mixed
precision the reference runs under torch.autocast, and a second one in float32 says how much rounding matters.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autopar.api import parallelize
from autopar.batching import Call, as_call, partition, split_leaves, split_targets
from autopar.errors import TrainingError, UsageError
from autopar.ir import Mode, Plan
from autopar.ir.units import plural
from autopar.model import ParallelModel
from autopar.precision.noise import NO_ROUNDING, Rounding, rounding_of, update_rounding
from autopar.programs import enter
from autopar.pytree import flatten, leaves, unflatten
from autopar.randomness import LEAST_SAMPLES, quiet_copy, random_operations

ABSOLUTE, RELATIVE = 1e-5, 1e-4
# Below this 2-norm, 1e-5 would hide a wrong tensor: the absolute tolerance becomes 1e-4 of the norm, at least 1e-7.
SMALL_NORM, LEAST_ABSOLUTE = 0.1, 1e-7
LEARNING_RATE = 1e-3
# AdamW divides a gradient by its own size plus this. Rounding of δ in a gradient becomes up to lr·δ/ε in a weight, and
# where the true gradient is zero (the key bias of attention) rounding is all there is: sums made in another order leave
# 1e-6, of which the usual 1e-8 would make a full step.
EPSILON = 1e-3

MOST_SKIPPED = 24  # updates until the loss scale is as small as 2^-8, where float16 gradients are lost

LossFunction = Callable[[Any, Any], torch.Tensor]
Named = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Row:
    """One quantity compared.

    ``max_absolute`` is the largest difference of an element, ``max_relative`` the largest 2-norm of a tensor's
    difference over the tensor's own. ``worst`` names the tensor that is nearest to its tolerance, or furthest beyond.
    """

    quantity: str
    num_tensors: int
    max_absolute: float
    max_relative: float
    bitwise: bool
    ok: bool
    worst: str


@dataclass(frozen=True)
class Parity:
    """What was compared, and what could not be. ``loss`` and ``notes`` are for people.

    ``autocast`` is the low dtype of mixed precision, None without.
    """

    plan: Plan
    steps: int
    loss: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    autocast: str | None = None

    @property
    def ok(self) -> bool:
        """Whether everything that was compared is equal within tolerance."""
        return all(row.ok for row in self.rows)


def compare(
    model: nn.Module,
    x: Any,
    y: Any = None,
    devices: int = 2,
    steps: int = 3,
    loss_fn: LossFunction | None = None,
    plan: Plan | None = None,
    **constraints: Any,
) -> Parity:
    """How a model split over devices compares with the same model on one.

    Args:
        model: left untouched; dropout and the like are switched off in copies.
        x: input as for `ParallelModel.train_step`, at the global batch.
        y: target of ``loss_fn``; without both, class labels are drawn for logits, and any other output is trained to be
            small (mean of squares).
        steps: AdamW steps.
        plan, constraints: as for `autopar.parallelize`.

    Raises:
        UsageError: a loss without targets or the other way round, or no step.
        Others as `autopar.parallelize`.
    """
    if steps < 1:
        raise UsageError(f"steps={steps} must be at least 1.")
    if (y is None) != (loss_fn is None):
        raise UsageError("Pass both a target and a loss_fn to compare, or neither.")
    quiet, notes = quiet_copy(model)
    call = as_call(quiet, x)
    random = random_operations(quiet, call)
    if random:
        more = f" and {len(random) - 3} more" if len(random) > 3 else ""
        notes.append(
            f"not compared: training. Random operations remain, and each rank draws its own numbers: "
            f"{', '.join(random[:3])}{more}"
        )
    loss_name = "the caller's loss"
    if loss_fn is None:
        loss_fn, y, loss_name = default_loss(quiet, call)
    optimizer = functools.partial(torch.optim.AdamW, lr=LEARNING_RATE, eps=EPSILON)
    with (
        repeatable_kernels(),
        parallelize(quiet, devices, x, loss_fn=loss_fn, optimizer=optimizer, plan=plan, **constraints) as pm,
        threads(pm.machine.num_threads),
    ):
        references = [Reference(quiet, loss_fn, optimizer, pm, call, low) for low in dict.fromkeys([pm.autocast, None])]
        rows = [] if random else trained(pm, references, call, x, y, steps)
        rows.append(evaluated(pm, references, call))
    return Parity(pm.plan, 0 if random else steps, loss_name, tuple(rows), tuple(notes), pm.autocast)


def trained(pm: ParallelModel, references: list[Reference], call: Call, x: Any, y: Any, steps: int) -> list[Row]:
    """All trained for some steps, and what they computed compared.

    Args:
        references: the one to equal; in mixed precision then one in float32.
    Raises:
        TrainingError: float16 gradients overflow whatever the loss scale.
    """
    runs = [Record() for _ in (pm, *references)]
    step = skipped = 0
    while step < steps:
        result = pm.train().forward_backward(x, y, return_outputs=True)
        here = [StepOutcome(result.loss, named_outputs(result.outputs), list(pm.gradients().items()))]
        here += [reference.forward_backward(call, y) for reference in references]
        updated = not pm.optimizer_step().skipped
        for reference in references:
            reference.optimizer_step(updated)
        if updated:
            step += 1
            for run, outcome in zip(runs, here, strict=True):
                run.add(step, outcome)
        elif (skipped := skipped + 1) > MOST_SKIPPED:
            raise TrainingError(
                f"Nothing to compare: the gradients of {pm.plan.model.name} overflow float16 at every loss scale "
                f'(now {pm.loss_scale():g}). Their loss or inputs are too large; precision="bf16" has a wider range.'
            )
    rounding = rounding_of(pm.autocast)
    rows = [
        compared("outputs, train mode", *(run.outputs for run in runs), rounding=rounding),
        compared("loss", *(run.losses for run in runs), rounding=rounding),
        compared("gradients", *(run.gradients for run in runs), rounding=rounding),
    ]
    states = [pm.state_dict(), *(reference.state() for reference in references)]
    parameters = {name for name, _ in references[0].model.named_parameters(remove_duplicate=False)}
    updates = update_rounding(pm.autocast, LEARNING_RATE * steps)
    for quantity, wanted, allowed in (("weights", True, updates), ("buffers", False, rounding)):
        parts = [[(n, t) for n, t in state.items() if (n in parameters) is wanted] for state in states]
        if any(parts[:2]):
            rows.append(compared(f"{quantity} after {plural(steps, 'step')}", *parts, rounding=allowed))
    return rows


def evaluated(pm: ParallelModel, references: list[Reference], call: Call) -> Row:
    """The outputs of all in eval mode, with the weights that the parallel model has by now."""
    outputs = [named_outputs(pm.eval()(*call.args, **call.kwargs))]
    for reference in references:
        reference.model.load_state_dict(pm.state_dict())
        outputs.append(reference.outputs(call))
    return compared("outputs, eval mode", *outputs, rounding=rounding_of(pm.autocast))


@dataclass(frozen=True)
class StepOutcome:
    """The mean loss of a batch, the outputs by name, and the gradients so far."""

    loss: float
    outputs: Named
    gradients: Named


@dataclass(frozen=True)
class Record:
    """What the steps of one run gave."""

    outputs: Named = field(default_factory=list)
    losses: Named = field(default_factory=list)
    gradients: Named = field(default_factory=list)

    def add(self, step: int, outcome: StepOutcome) -> None:
        self.outputs.extend(in_step(step, outcome.outputs))
        self.losses.append((f"step {step}", torch.tensor(outcome.loss, dtype=torch.float64)))
        self.gradients.extend(in_step(step, outcome.gradients))


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
    ) -> None:
        """Copy the model.

        Args:
            call: is like all that will follow.
            low: dtype of autocast, None without.
        """
        self.device = torch.device(pm.machine.device_of(0))
        self.low = getattr(torch, low) if low else None
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=low == "float16")
        self.model = copy.deepcopy(model).to(self.device)
        self.modes = {module: module.training for module in self.model.modules()}
        here = self.parts_of(call, [call.batch])[0]
        modes: tuple[Mode, ...] = ("train", "eval")
        self.whole = {mode: shapes_of(output_in(self.model, here, mode)) for mode in modes}
        self.loss_fn, self.microbatches, self.replicas = loss_fn, pm.plan.microbatches, pm.plan.mesh.dp
        first = [buffer.detach().clone() for buffer in self.model.buffers()]
        self.buffers = dict.fromkeys(range(1, self.replicas), first)  # of the replicas that the model does not show
        self.optimizer = optimizer([p for p in self.model.parameters() if p.requires_grad])

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
        enter(self.model, self.modes, "eval")
        calls, sizes = self.parts(call)
        with torch.no_grad(), self.autocast():
            outputs = [self.model(*part.args, **part.kwargs) for part in calls]
        return named_outputs(joined(outputs, sizes, self.whole["eval"]))

    def forward_backward(self, call: Call, y: Any) -> StepOutcome:
        """Accumulate the gradients of a batch, microbatch by microbatch."""
        enter(self.model, self.modes, "train")
        calls, sizes = self.parts(call)
        targets = split_targets(y, call.batch, sizes)
        count = len(sizes) // self.replicas
        total, outputs = 0.0, []
        for i, (part, target, size) in enumerate(zip(calls, targets, sizes, strict=True)):
            here, spec = flatten(target)
            moved = [leaf.to(self.device) if isinstance(leaf, torch.Tensor) else leaf for leaf in here]
            with self.replica(i // count):
                with self.autocast():
                    output = self.model(*part.args, **part.kwargs)
                    loss = self.loss_fn(output, unflatten(moved, spec)) * (size / call.batch)
                self.scaler.scale(loss).backward()
            total += loss.item()
            outputs.append(output)
        return StepOutcome(total, named_outputs(joined(outputs, sizes, self.whole["train"])), self.gradients())

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
    twin = copy.deepcopy(model)
    enter(twin, {module: module.training for module in twin.modules()}, mode)
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


def in_step(step: int, named: Named) -> Named:
    return [(f"{name}, step {step}", tensor) for name, tensor in named]


@contextmanager
def threads(number: int) -> Iterator[None]:
    """As many threads as a worker has, so that sums are made in the same order."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def repeatable_kernels() -> Iterator[None]:
    """cuDNN without TF32 and without kernels whose sums differ from run to run; workers started inside follow."""
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.deterministic
    cudnn.allow_tf32, cudnn.deterministic = False, True
    try:
        yield
    finally:
        cudnn.allow_tf32, cudnn.deterministic = before


# -- the loss that is taken where none is given -----------------------------------------------------------------------


def default_loss(model: nn.Module, call: Call) -> tuple[LossFunction, Any, str]:
    """A loss for any output, its target, and what it is called."""
    part = call.first(min(LEAST_SAMPLES, call.batch))
    output = output_in(model, part, "train")  # some return more in training than in evaluation
    if is_logits(output, part.batch):
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(output.shape[1], (call.batch,), generator=generator)
        return F.cross_entropy, labels, f"cross entropy with random labels of {output.shape[1]} classes"
    return mean_of_squares, torch.zeros(call.batch), "mean of squares over all outputs"


def is_logits(output: Any, batch: int) -> bool:
    """Whether an output is a row of numbers for each sample."""
    if not isinstance(output, torch.Tensor) or not output.is_floating_point() or output.ndim != 2:
        return False
    return output.shape[0] == batch and output.shape[1] > 1


def mean_of_squares(output: Any, target: Any) -> torch.Tensor:
    """The mean square of each floating-point output, summed; the target is not looked at."""
    floats = [leaf for leaf in leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return torch.stack([leaf.float().square().mean() for leaf in floats]).sum()


# -- comparing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """How far two tensors are apart. ``excess`` is the largest difference over its tolerance: 1 is the limit."""

    absolute: float
    relative: float
    excess: float


def compared(
    quantity: str, actual: Named, expected: Named, exact: Named | None = None, rounding: Rounding = NO_ROUNDING
) -> Row:
    """The row of two lists of tensors; a name on one side only is a failure.

    Args:
        exact: in mixed precision, what is expected in float32.
        rounding: what a tensor may be off beside its distance to that.
    """
    ours, theirs = dict(actual), dict(expected)
    unmatched = [name for name in (*ours, *theirs) if name not in ours or name not in theirs]
    if unmatched:
        side = "the parallel model" if unmatched[0] in ours else "the model on one device"
        return Row(quantity, len(theirs), float("inf"), float("inf"), False, False, f"{unmatched[0]}: only in {side}")
    found = {name: difference(ours[name], tensor) for name, tensor in theirs.items()}
    for name, tensor in exact or ():
        if isfinite(found[name].excess):  # of one shape and dtype, and finite
            wider = rounding.excess(ours[name], theirs[name], tensor)
            found[name] = replace(found[name], excess=min(found[name].excess, wider))
    worst = max(found, key=lambda name: found[name].excess, default="")
    bitwise = all(same(ours[name], tensor) for name, tensor in theirs.items())
    return Row(
        quantity,
        len(found),
        max((d.absolute for d in found.values()), default=0.0),
        max((d.relative for d in found.values()), default=0.0),
        bitwise,
        all(d.excess <= 1 for d in found.values()),
        worst,
    )


def difference(actual: torch.Tensor, expected: torch.Tensor) -> Difference:
    """How far a tensor is from the expected one; infinitely where shape or dtype differ or a number is not finite.

    Tolerance: 1e-5 + 1e-4·|expected|; where the expected tensor's 2-norm is below 0.1, 1e-4 of the norm (at least 1e-7)
    instead of 1e-5. Integers and booleans must be equal.
    """
    infinite = Difference(float("inf"), float("inf"), float("inf"))
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return infinite
    if not expected.numel() or (same(actual, expected) and bool(torch.isfinite(expected).all())):
        return Difference(0.0, 0.0, 0.0)
    if not (expected.is_floating_point() or expected.is_complex()):
        gap = (actual.double() - expected.double()).abs().max().item()
        return Difference(gap, float("inf"), float("inf"))
    ours, theirs = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (actual, expected))
    gap = (ours - theirs).abs()
    norm = theirs.norm().item()
    if not bool(torch.isfinite(gap).all()):
        return infinite
    floor = ABSOLUTE if norm >= SMALL_NORM else max(LEAST_ABSOLUTE, norm * ABSOLUTE / SMALL_NORM)
    relative = gap.norm().item() / norm if norm else float("inf")
    return Difference(gap.max().item(), relative, (gap / (floor + RELATIVE * theirs.abs())).max().item())


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors are equal bit by bit, but for the sign of zero."""
    return actual.dtype == expected.dtype and torch.equal(actual, expected)
