"""Random operations in a model: those with a switch are switched off, the others are named."""

from __future__ import annotations

from collections import defaultdict

from torch import nn

from autopar.trace.call import Call
from autopar.trace.copy_model import copy_model
from autopar.trace.passes.random_ops import is_random
from autopar.trace.trace import trace

# Modules that draw random numbers in training, and the attribute with the probability. By class name, because some
# classes are timm's or torchvision's.
SWITCHES = {
    "Dropout": "p", "Dropout1d": "p", "Dropout2d": "p", "Dropout3d": "p", "AlphaDropout": "p",
    "FeatureAlphaDropout": "p", "MultiheadAttention": "dropout", "LSTM": "dropout", "GRU": "dropout", "RNN": "dropout",
    "DropPath": "drop_prob", "DropBlock2d": "drop_prob", "PatchDropout": "prob", "StochasticDepth": "p",
}  # fmt: skip
MIN_SAMPLES = 2  # of a trace: batch norm refuses a single value per channel


def copy_without_dropout(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """Deep copy of the model with dropout and similar modules off, and a note about it if any was on."""
    quiet = copy_model(model)
    found: defaultdict[str, list[float]] = defaultdict(list)
    for module in quiet.modules():
        kind = type(module).__name__
        attribute = SWITCHES.get(kind)
        if attribute is not None and getattr(module, attribute, 0):
            found[kind].append(getattr(module, attribute))
            setattr(module, attribute, 0.0)
    listed = ", ".join(f"{len(on)} × {kind} ({between(on)})" for kind, on in sorted(found.items()))
    return quiet, [f"switched off for the comparison: {listed}"] if found else []


def between(numbers: list[float]) -> str:
    """Range of numbers as text: ``0.1``, or ``0.02 to 0.2`` where they differ."""
    low, high = f"{min(numbers):.3g}", f"{max(numbers):.3g}"
    return low if low == high else f"{low} to {high}"


def random_operations(model: nn.Module, call: Call) -> list[str]:
    """Names of the operations of the training graph that draw random numbers."""
    part = call.first(min(MIN_SAMPLES, call.batch))
    return [op.name for op in trace(model, part.args, part.kwargs, "train").ops if is_random(op)]
