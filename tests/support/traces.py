"""Cache of traces that all processes of a session share, because tests trace the same small models many times.

The key of a model is its pickled structure: classes, options, modes, hooks, ties, shapes, strides, dtypes. Numbers in
weights and inputs do not change a trace; numbers in other tensors of the model do.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import pickle
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import nn

from autopar.ir.graph import Graph, Mode
from autopar.ir.pytree import leaves
from autopar.trace import lower
from autopar.trace.trace import trace

VARIABLE = "AUTOPAR_TEST_TRACES"  # folder of the cache; scripts that tests start inherit it


class Structure(cloudpickle.Pickler):
    """Pickles a model and its call; of weights and inputs shape, strides and dtype, not the numbers."""

    def __init__(self, file: io.BytesIO, weights_and_inputs: Iterable[Any]) -> None:
        super().__init__(file)
        self.numberless = {id(tensor) for tensor in weights_and_inputs}
        self.seen: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, set | frozenset):
            return sorted(map(repr, obj))  # equal order in all processes
        if isinstance(obj, dict | list | tuple) and is_plain(obj):
            return repr(obj)  # by value, because torch.export leaves equal copies in a model
        if not isinstance(obj, torch.Tensor):
            return None
        number = self.seen.setdefault(id(obj), len(self.seen))
        looks = (number, type(obj), tuple(obj.shape), obj.stride(), obj.dtype, str(obj.device), obj.requires_grad)
        return looks if id(obj) in self.numberless or obj.is_meta else (*looks, obj.tolist())


def is_plain(obj: Any) -> bool:
    """Whether an object is plain data, identified by its value."""
    if type(obj) is dict:
        return all(is_plain(item) for pair in obj.items() for item in pair)
    if type(obj) in (list, tuple):
        return all(map(is_plain, obj))
    return obj is None or type(obj) in (str, int, float, bool)


def key(model: nn.Module, called: Any) -> str | None:
    """Key of a trace; None for a model that cannot be pickled."""
    file = io.BytesIO()
    try:
        Structure(file, (*model.parameters(), *model.buffers(), *leaves(called))).dump((model, called))
    except (pickle.PicklingError, TypeError, RuntimeError):  # RuntimeError: parametrized modules
        return None
    return hashlib.sha256(file.getvalue()).hexdigest()


def shared_trace(
    model: nn.Module, args: Any, kwargs: Mapping[str, Any] | None = None, mode: Mode = "train", name: str = ""
) -> Graph:
    """As `autopar.trace.trace.trace`, but from the cache if a process of this session has traced an equal model."""
    known = key(model, (args, kwargs or {}, mode, name))
    if known is None:
        return trace(model, args, kwargs, mode, name)
    file = Path(os.environ[VARIABLE]) / known
    with file.open("a+b") as cached:
        fcntl.flock(cached, fcntl.LOCK_EX)  # concurrent ranks wait for the first
        cached.seek(0)
        if pickled := cached.read():
            with warnings.catch_warnings(action="ignore"):  # torch 2.11 calls its own class deprecated
                return pickle.loads(pickled)
        with warnings.catch_warnings(record=True) as caught:
            graph = trace(model, args, kwargs, mode, name)
        if not caught:  # a model with warnings is traced each time, so that they appear each time
            cached.write(pickle.dumps(graph))
    for warning in caught:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return graph


def share() -> None:
    """Make autopar use `shared_trace` in this process, if a test session started it."""
    if VARIABLE in os.environ:
        lower.trace = shared_trace
