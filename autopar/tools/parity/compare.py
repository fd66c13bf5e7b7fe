"""The comparison of a plan with one device over the same steps, and its default loss."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autopar.api.model import ParallelModel
from autopar.api.parallelize import parallelize
from autopar.errors import TrainingError, UsageError
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.ir.pytree import leaves
from autopar.ir.units import first_few, plural
from autopar.runtime.spec import LossOver
from autopar.tools.parity.difference import DOUBLE, Named, Row, compared, rounding_of, update_rounding
from autopar.tools.parity.reference import LossFunction, Reference, StepOutcome, named_outputs, output_in
from autopar.trace.call import Call, as_call
from autopar.trace.copy_model import copy_model
from autopar.trace.passes.precision import low_param_dtype
from autopar.trace.passes.random_ops import is_random
from autopar.trace.trace import trace

LEARNING_RATE = 1e-3
# AdamW divides a gradient by its own size plus ε. A rounding error of δ in a gradient becomes up to lr·δ/ε in a weight.
# Where the true gradient is zero (the key bias of attention), only rounding remains: a different order of summation
# leaves 1e-6, which AdamW's default ε of 1e-8 would turn into a full step.
EPSILON = 1e-3

MAX_SKIPPED = 24  # updates until the loss scale is as small as 2^-8, where float16 gradients are lost
# Probabilities of modules that draw random numbers in training. A float with one of these names is a probability in any
# module; others by class name, because some classes are timm's or torchvision's.
PROBABILITIES = ("dropout", "attention_dropout", "activation_dropout", "dropout_prob", "drop_prob", "drop_rate")
SWITCHES = {
    "Dropout": "p", "Dropout1d": "p", "Dropout2d": "p", "Dropout3d": "p", "AlphaDropout": "p",
    "FeatureAlphaDropout": "p", "PatchDropout": "prob", "StochasticDepth": "p",
}  # fmt: skip
MIN_SAMPLES = 2  # of a trace: batch norm refuses a single value per channel


@dataclass(frozen=True)
class Parity:
    """Result of a comparison. ``loss`` and ``notes`` are texts for people; notes name what was not compared.

    ``autocast`` is the low dtype of mixed precision, None without. ``low`` is that, or the dtype in which gradients
    travel between replicas if it is a low one. ``scale`` is the factor of the tolerances.
    """

    plan: Plan
    steps: int
    loss: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    autocast: str | None = None
    low: str | None = None
    scale: float = 1.0

    @property
    def ok(self) -> bool:
        """Whether every compared quantity is equal within its tolerance."""
        return all(row.ok for row in self.rows)


def compare(
    model: nn.Module,
    x: Any,
    y: Any = None,
    devices: int = 2,
    steps: int = 3,
    loss_fn: LossFunction | None = None,
    plan: Plan | None = None,
    loss_over: LossOver = "microbatch",
    **constraints: Any,
) -> Parity:
    """Comparison of a model split over devices with the same model on one device.

    Args:
        model: left unchanged; dropout and similar modules are switched off in copies.
        x: input as for `ParallelModel.train_step`, at the global batch.
        y: target of ``loss_fn``. Without both, logits get random class labels, and any other output gets the mean of
            squares as loss.
        steps: AdamW steps.
        plan, loss_over, constraints: as for `autopar.parallelize`. Stages are compiled only with ``compile=True``,
            because fused kernels round differently.

    Raises:
        UsageError: a loss without targets, targets without a loss, or no step.
        Others as `autopar.parallelize`.
    """
    if steps < 1:
        raise UsageError(f"steps={steps} must be at least 1.")
    if (y is None) != (loss_fn is None):
        raise UsageError("Pass both a target and a loss_fn to compare, or neither.")
    quiet, notes = copy_without_dropout(model)
    call = as_call(quiet, x)
    graph = training_graph(quiet, call)
    random, scale = random_operations(graph), tolerance_scale(graph)
    if random:
        notes.append(
            f"not compared: training. Random operations remain, and each rank draws its own numbers: "
            f"{first_few(random, 3)}"
        )
    loss_name = "the caller's loss"
    if loss_fn is None:
        loss_fn, y, loss_name = default_loss(quiet, call)
    if constraints.get("compile") is None:
        constraints["compile"] = False
    optimizer = functools.partial(torch.optim.AdamW, lr=LEARNING_RATE, eps=EPSILON)
    with (
        repeatable_kernels(),
        parallelize(
            quiet, devices, x, loss_fn=loss_fn, optimizer=optimizer, plan=plan, loss_over=loss_over, **constraints
        ) as pm,
        threads(pm.machine.num_threads),
    ):
        copies = low_param_dtype(pm.plan.precision)
        references = [Reference(quiet, loss_fn, optimizer, pm, call, pm.autocast, copies, loss_over)]
        low = low_dtype(pm)
        if low is not None:
            references.append(Reference(quiet, loss_fn, optimizer, pm, call, loss_over=loss_over))
        rows = [] if random else trained(pm, references, call, x, y, steps, scale)
        rows.append(evaluated(pm, references, call, scale))
    return Parity(pm.plan, 0 if random else steps, loss_name, tuple(rows), tuple(notes), pm.autocast, low, scale)


def low_dtype(pm: ParallelModel) -> str | None:
    """The dtype with the fewest bits in which a model's results are rounded; None if all are in full precision."""
    reduced = pm.plan.reduce_dtype if pm.plan.mesh.dp > 1 else "float32"
    return reduced if reduced != "float32" else pm.autocast


def trained(
    pm: ParallelModel, references: list[Reference], call: Call, x: Any, y: Any, steps: int, scale: float
) -> list[Row]:
    """Rows of outputs, losses, gradients, weights and buffers after training all models for some steps.

    Args:
        references: the reference to equal; with a low dtype followed by one in float32.
        scale: factor of the tolerances.
    Raises:
        TrainingError: float16 gradients overflow at every loss scale.
    """
    runs = [Record() for _ in (pm, *references)]
    step = skipped = 0
    while step < steps:
        result = pm.train().forward_backward(x, y, return_outputs=True)
        outcomes = [StepOutcome(result.loss, named_outputs(result.outputs), list(pm.gradients().items()))]
        outcomes += [reference.forward_backward(call, y) for reference in references]
        updated = not pm.optimizer_step().skipped
        for reference in references:
            reference.optimizer_step(updated)
        if updated:
            step += 1
            for run, outcome in zip(runs, outcomes, strict=True):
                run.add(step, outcome)
        elif (skipped := skipped + 1) > MAX_SKIPPED:
            raise TrainingError(
                f"Nothing to compare: the gradients of {pm.plan.model.name} overflow float16 at every loss scale "
                f'(now {pm.loss_scale():g}). Their loss or inputs are too large; precision="bf16" has a wider range.'
            )
    rounding = rounding_of(low_dtype(pm))
    rows = [
        compared("outputs, train mode", *(run.outputs for run in runs), rounding=rounding, scale=scale),
        compared("loss", *(run.losses for run in runs), rounding=rounding, scale=scale),
        compared("gradients", *(run.gradients for run in runs), rounding=rounding, scale=scale),
    ]
    states = [pm.state_dict(), *(reference.state() for reference in references)]
    parameters = {name for name, _ in references[0].model.named_parameters(remove_duplicate=False)}
    updates = update_rounding(low_dtype(pm), LEARNING_RATE * steps)
    for quantity, wanted, allowed in (("weights", True, updates), ("buffers", False, rounding)):
        parts = [[(n, t) for n, t in state.items() if (n in parameters) is wanted] for state in states]
        if any(parts[:2]):
            title = f"{quantity} after {plural(steps, 'step')}"
            rows.append(compared(title, *parts, rounding=allowed, scale=scale, infinities=True))
    return rows


def evaluated(pm: ParallelModel, references: list[Reference], call: Call, scale: float) -> Row:
    """Row of the outputs in eval mode; every reference gets the parallel model's current weights."""
    outputs = [named_outputs(pm.eval()(*call.args, **call.kwargs))]
    for reference in references:
        reference.model.load_state_dict(pm.state_dict())
        outputs.append(reference.outputs(call))
    return compared("outputs, eval mode", *outputs, rounding=rounding_of(low_dtype(pm)), scale=scale)


@dataclass(frozen=True)
class Record:
    """Named tensors of all steps of one run."""

    outputs: Named = field(default_factory=list)
    losses: Named = field(default_factory=list)
    gradients: Named = field(default_factory=list)

    def add(self, step: int, outcome: StepOutcome) -> None:
        self.outputs.extend(in_step(step, outcome.outputs))
        is_double = all(gradient.dtype == torch.float64 for _, gradient in outcome.gradients)
        loss = torch.tensor(outcome.loss, dtype=torch.float64 if is_double else torch.float32)
        self.losses.append((f"step {step}", loss))
        self.gradients.extend(in_step(step, outcome.gradients))


def in_step(step: int, named: Named) -> Named:
    return [(f"{name}, step {step}", tensor) for name, tensor in named]


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Within ``with``, this process has as many threads as a worker, so that both sum in the same order."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def repeatable_kernels() -> Iterator[None]:
    """Within ``with``, cuDNN uses no TF32 and only deterministic kernels; workers started inside inherit that."""
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.deterministic
    cudnn.allow_tf32, cudnn.deterministic = False, True
    try:
        yield
    finally:
        cudnn.allow_tf32, cudnn.deterministic = before


# -- the default loss -------------------------------------------------------------------------------------------------


def default_loss(model: nn.Module, call: Call) -> tuple[LossFunction, Any, str]:
    """A loss for any output, its target, and its printed name."""
    part = call.first(min(MIN_SAMPLES, call.batch))
    output = output_in(model, part, "train")  # some models return more in training than in evaluation
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
    """Sum of the mean squares of all floating-point outputs; the target is ignored."""
    floats = [leaf for leaf in leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    wide = [leaf if leaf.dtype == torch.float64 else leaf.float() for leaf in floats]
    return torch.stack([leaf.square().mean() for leaf in wide]).sum()


def copy_without_dropout(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """Deep copy of the model with dropout and similar modules off, and a note about it if any was on."""
    quiet = copy_model(model)
    found: defaultdict[str, list[float]] = defaultdict(list)
    for module in quiet.modules():
        kind = type(module).__name__
        for attribute in filter(None, (SWITCHES.get(kind), *PROBABILITIES)):
            probability = getattr(module, attribute, None)
            if isinstance(probability, float) and probability:
                found[kind].append(probability)
                setattr(module, attribute, 0.0)
    listed = ", ".join(f"{len(on)} × {kind} ({between(on)})" for kind, on in sorted(found.items()))
    return quiet, [f"switched off for the comparison: {listed}"] if found else []


def between(numbers: list[float]) -> str:
    """Range of numbers as text: ``0.1``, or ``0.02 to 0.2`` where they differ."""
    low, high = f"{min(numbers):.3g}", f"{max(numbers):.3g}"
    return low if low == high else f"{low} to {high}"


def training_graph(model: nn.Module, call: Call) -> Graph:
    """The model's training graph for as few samples as it takes."""
    part = call.first(min(MIN_SAMPLES, call.batch))
    return trace(model, part.args, part.kwargs, "train")


def random_operations(graph: Graph) -> list[str]:
    """Names of the operations that draw random numbers."""
    return [op.name for op in graph.ops if is_random(op)]


def tolerance_scale(graph: Graph) -> float:
    """`DOUBLE` if all that is computed from trained weights is float64, else 1.

    A float64 tensor may have been rounded to float32 before: logits that are upcast, a norm that computes in float32.
    """
    dtypes = {value.dtype for value in graph.readable.values() if value.requires_grad}
    return DOUBLE if dtypes <= {"float64", "complex128"} else 1.0
