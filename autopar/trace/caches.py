"""Caches that a forward fills: after a trace they would hold tensors without data."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from autopar.ir.pytree import leaves
from autopar.trace.fake import FakeTensor

OTHERS = (Tensor, nn.Module, type, types.FunctionType, types.ModuleType, str, bytes, int, float, type(None))


@contextmanager
def kept_caches(model: nn.Module) -> Iterator[None]:
    """Within ``with``, a trace leaves nothing in modules, dicts and objects that they hold, and caches of functools.

    Each is set back as a whole if something new in it has no data: a grid of points, and the size that it is for. Of
    modules, torch.export sets attributes back that there were; new ones are left to remove.
    """
    objects, names = plain_objects(model), [(module, set(vars(module))) for module in model.modules()]
    before = [(contents(o), dict(contents(o))) for o in objects]
    wrappers = [(wrapper, wrapper.cache_info().misses) for wrapper in cached_functions(model, objects)]
    try:
        yield
    finally:
        for now, then in before:
            if lacks_data([value for key, value in now.items() if key not in then or then[key] is not value]):
                now.clear()
                now.update(then)
        for module, known in names:
            new = {name: value for name, value in vars(module).items() if name not in known}
            if lacks_data(list(new.values())):
                for name in new:
                    delattr(module, name)
        for wrapper, misses in wrappers:
            if wrapper.cache_info().misses != misses:
                wrapper.cache_clear()


def lacks_data(values: list[Any]) -> bool:
    """Whether a tensor among (nested) values is one of a trace."""
    return any(isinstance(leaf, FakeTensor) for leaf in leaves(values))


def tensors_of(module: nn.Module) -> list[Any]:
    """Attributes of a module that are tensors, but no parameters nor buffers."""
    return [value for value in vars(module).values() if isinstance(value, Tensor)]


def contents(value: Any) -> dict[Any, Any]:
    """A dict itself, or an object's attributes."""
    return value if isinstance(value, dict) else vars(value)


def plain_objects(model: nn.Module) -> list[Any]:
    """Dicts and objects with attributes that modules hold, also in others, but for modules and tensors."""
    own = vars(nn.Module()).keys()  # parameters, hooks and the like
    pending = [value for module in model.modules() for name, value in vars(module).items() if name not in own]
    seen, found = set[int](), list[Any]()
    while pending:
        value = pending.pop()
        if id(value) in seen or isinstance(value, OTHERS):
            continue
        seen.add(id(value))
        if isinstance(value, list | tuple | set):
            pending.extend(value)
        elif isinstance(value, dict) or hasattr(value, "__dict__"):
            found.append(value)
            pending.extend(contents(value).values())
    return found


def cached_functions(model: nn.Module, objects: list[Any]) -> list[Any]:
    """Functions with a cache of functools, in the packages whose classes modules and their objects are of."""
    names = {type(o).__module__.partition(".")[0] for o in (*model.modules(), *objects)} - {"torch", "builtins"}
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in names and module]
    values = [value for module in modules for value in list(vars(module).values())] + objects
    values += [value for kind in values if isinstance(kind, type) for value in vars(kind).values()]
    return list({id(v): v for v in values if isinstance(v, functools._lru_cache_wrapper)}.values())
