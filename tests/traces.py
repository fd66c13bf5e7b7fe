"""Traces that all processes of a session share: most of what a small model takes is being traced again.

A model is known by its pickled structure: classes, options, modes, hooks, ties, shapes, strides, dtypes. The numbers in
its weights and inputs do not matter to a trace; those in other tensors that it holds do.
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

VARIABLE = "AUTOPAR_TEST_TRACES"  # the folder that holds them; scripts that tests start inherit it


class Structure(cloudpickle.Pickler):
    """Pickles a model and what it is called with; of weights and inputs how they look, not their numbers."""

    def __init__(self, file: io.BytesIO, weights_and_inputs: Iterable[Any]) -> None:
        super().__init__(file)
        self.numberless = {id(tensor) for tensor in weights_and_inputs}
        self.seen: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, set | frozenset):
            return sorted(map(repr, obj))  # in one order in all processes
        if isinstance(obj, dict | list | tuple) and is_plain(obj):
            return repr(obj)  # torch.export leaves equal copies in a model
        if not isinstance(obj, torch.Tensor):
            return None
        number = self.seen.setdefault(id(obj), len(self.seen))
        looks = (number, type(obj), tuple(obj.shape), obj.stride(), obj.dtype, str(obj.device), obj.requires_grad)
        return looks if id(obj) in self.numberless or obj.is_meta else (*looks, obj.tolist())


def is_plain(obj: Any) -> bool:
    """Whether this is data of which copies are as good."""
    if type(obj) is dict:
        return all(is_plain(item) for pair in obj.items() for item in pair)
    if type(obj) in (list, tuple):
        return all(map(is_plain, obj))
    return obj is None or type(obj) in (str, int, float, bool)


def key(model: nn.Module, called: Any) -> str | None:
    """What identifies a trace; None for a model that cannot be pickled."""
    file = io.BytesIO()
    try:
        Structure(file, (*model.parameters(), *model.buffers(), *leaves(called))).dump((model, called))
    except (pickle.PicklingError, TypeError, RuntimeError):  # the last of parametrized modules
        return None
    return hashlib.sha256(file.getvalue()).hexdigest()


def shared_trace(
    model: nn.Module, args: Any, kwargs: Mapping[str, Any] | None = None, mode: Mode = "train", name: str = ""
) -> Graph:
    """As `autopar.trace.trace.trace`; read where a process of this session has traced the same model before."""
    known = key(model, (args, kwargs or {}, mode, name))
    if known is None:
        return trace(model, args, kwargs, mode, name)
    file = Path(os.environ[VARIABLE]) / known
    with file.open("a+b") as kept:
        fcntl.flock(kept, fcntl.LOCK_EX)  # ranks that ask together wait for the first
        kept.seek(0)
        if found := kept.read():
            return pickle.loads(found)
        with warnings.catch_warnings(record=True) as told:
            graph = trace(model, args, kwargs, mode, name)
        if not told:  # a model that is warned of is warned of each time
            kept.write(pickle.dumps(graph))
    for warning in told:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return graph


def share() -> None:
    """Let autopar trace through `shared_trace` in this process, where a session of tests started it."""
    if VARIABLE in os.environ:
        lower.trace = shared_trace
