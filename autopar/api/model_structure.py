"""Structure of a model that its traces depend on, compared before it is traced again at a new input shape."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import nn

from autopar.ir.graph import dtype_name
from autopar.runtime.optim.build import name_of

MAX_LISTED = 3  # changes that an error lists
ABSENT = (None, "absent")

# By a name for messages: what is compared, and its text.
Structure = Mapping[str, tuple[Any, str]]


def model_structure(model: nn.Module, ignored: Collection[tuple[type, str]] = ()) -> Structure:
    """Types, hooks and public plain attributes of all modules; dtype, shape and aliases of all weights.

    Training flags, values and devices of weights are not part of it.

    Args:
        ignored: classes and names of attributes to leave out.
    """
    found: dict[str, tuple[Any, str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        found[path or "the model"] = type(module), f"of type {type(module).__name__}"
        hooks = (
            *module._forward_pre_hooks.values(),  # torch has no public way to list hooks
            *module._forward_hooks.values(),
            *module._backward_pre_hooks.values(),
            *module._backward_hooks.values(),
        )
        found[f"the list of hooks of {path or 'the model'}"] = hooks, f"[{', '.join(map(name_of, hooks))}]"
        for name, value in vars(module).items():
            if name.startswith("_") or name == "training" or (type(module), name) in ignored:
                continue
            if isinstance(value, FunctionType | BuiltinFunctionType):
                found[dotted(path, name)] = value, name_of(value)
            elif is_plain(value):
                found[dotted(path, name)] = None, repr(value)  # the text tells 1 from True, and finds NaN again
    first: dict[int, str] = {}
    parameters = list(model.named_parameters(remove_duplicate=False))
    for name, tensor in (*parameters, *model.named_buffers(remove_duplicate=False)):
        own = first.setdefault(id(tensor), name)
        found[name] = None, "a tensor" if own == name else f"the same tensor as {own}"
        found[f"{name}.dtype"] = None, dtype_name(tensor.dtype)
        found[f"{name}.shape"] = None, str(list(tensor.shape))
    found |= {f"{name}.requires_grad": (None, str(p.requires_grad)) for name, p in parameters}
    return found


def changes(old: Structure, new: Structure) -> str:
    """The first differences between two structures, as ``drop.p is 0.9, was 0.1``; empty if there are none."""
    both = {name: (old.get(name, ABSENT), new.get(name, ABSENT)) for name in (*old, *new)}
    found = [f"{name} is {now[1]}, was {was[1]}" for name, (was, now) in both.items() if was != now]
    more = f"; … ({len(found)} changes)" if len(found) > MAX_LISTED else ""
    return "; ".join(found[:MAX_LISTED]) + more


@contextmanager
def assigned_attributes(model: nn.Module) -> Iterator[set[tuple[type, str]]]:
    """Within ``with``, collects class and name of each attribute that modules of the model's classes set.

    Forwards do so, for example to keep sizes. The modules may be copies of the model's.
    """
    assigned: set[tuple[type, str]] = set()
    classes = {type(module) for module in model.modules()}
    original = nn.Module.__setattr__

    def record(self: nn.Module, name: str, value: Any) -> None:
        if type(self) in classes:
            assigned.add((type(self), name))
        original(self, name, value)

    nn.Module.__setattr__ = record
    try:
        yield assigned
    finally:
        nn.Module.__setattr__ = original


def is_plain(value: Any) -> bool:
    """Whether a value is None, a number, a text, or a tuple of those."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def dotted(path: str, name: str) -> str:
    """Name of a module's attribute from the model on."""
    return f"{path}.{name}" if path else name
