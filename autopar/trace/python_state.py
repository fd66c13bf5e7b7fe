"""Python state that a forward reads or changes, of which a trace keeps one value."""

from __future__ import annotations

import pickle
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from autopar.errors import FrozenNumberWarning, TraceError, caller_level
from autopar.ir.graph import Graph

# By the path of a module and the attribute's name.
Numbers = Mapping[tuple[str, str], bool | int | float]


@contextmanager
def no_python_random(name: str) -> Iterator[None]:
    """Within ``with``, refuse forwards that draw from Python's or numpy's global generator; their states are restored.

    Args:
        name: name of the model in messages.

    Raises:
        TraceError: a generator has another state at the end.
    """
    python, numpy = random.getstate(), np.random.get_state(legacy=False)
    yield
    drawn = {
        "Python's random": random.getstate() != python,
        "numpy.random": pickle.dumps(np.random.get_state(legacy=False)) != pickle.dumps(numpy),
    }
    if any(drawn.values()):
        random.setstate(python)
        np.random.set_state(numpy)
        raise TraceError(
            f"Cannot trace {name}: its forward draws from {' and '.join(k for k, v in drawn.items() if v)}, and the "
            "trace would repeat the choice of one call for all steps. Draw with torch.rand, torch.randint or "
            "torch.bernoulli, and select with torch.where."
        )


@contextmanager
def kept_generators() -> Iterator[None]:
    """Within ``with``, draws leave no trace in the global generators of Python, numpy and torch's CPU."""
    python, numpy = random.getstate(), np.random.get_state(legacy=False)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def check_constants(graph: Graph) -> None:
    """Refuse in-place changes of constants.

    Raises:
        TraceError: names the attribute and the line.
    """
    constants = {weight.name for weight in graph.weights if weight.kind == "constant"}
    for op in graph.ops:
        for name in op.mutates:
            if name in constants:
                raise TraceError(
                    f"Cannot trace {graph.model}: its forward changes the tensor {name} in place"
                    f"{f' at {op.source}' if op.source else ''}. It is neither a parameter nor a buffer, so devices "
                    "would keep different copies of it and state dicts none. Register it: "
                    f'self.register_buffer("{name.rpartition(".")[2]}", …, persistent=False).'
                )


def numbers_of(model: nn.Module) -> Numbers:
    """The public numeric attributes of all modules, without training flags."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float) and not name.startswith("_") and name != "training"
    }


def set_numbers(model: nn.Module, numbers: Numbers) -> None:
    """Set numeric attributes of modules."""
    for (path, name), value in numbers.items():
        setattr(model.get_submodule(path), name, value)


def differing(one: Numbers, two: Numbers) -> list[tuple[str, str]]:
    """Attributes with a number in both that differs; NaN equals NaN."""
    return [key for key in one if key in two and repr(one[key]) != repr(two[key])]


def warn_of_counters(name: str, before: Numbers, after: Numbers, counters: Sequence[tuple[str, str]]) -> None:
    """Warn of numbers that every forward changes.

    Args:
        name: name of the model in messages.
        before, after: all numbers before and after a forward.
    """
    if not counters:
        return
    listed = [f"{'.'.join(filter(None, key))} (from {before[key]} to {after[key]})" for key in counters[:3]]
    warnings.warn(
        f"The forward of {name} changes {', '.join(listed)}{', …' if len(counters) > 3 else ''} at each call. The "
        "trace keeps the value that it saw for all steps. Make it a buffer and compute with tensors, or pass it "
        "as an input.",
        FrozenNumberWarning,
        stacklevel=caller_level(),
    )
