"""Python values and tensors that a function reads besides its arguments.

A CUDA graph keeps the values that ``loss_fn`` read at its capture. A replay compares fingerprints, so that a value that
has changed since (an annealed coefficient, say) is an error instead of a silently stale number. Tensors are looked for
on other devices, and among trainable ones, which no optimizer would update.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from inspect import getattr_static
from itertools import chain
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

PLAIN_TYPES = (bool, int, float, complex, str, type(None))
OF_MODULES = ("_modules", "_parameters", "_buffers")  # attributes of nn.Module that are not in __dict__
OPAQUE_TYPES = (torch.Tensor, type, ModuleType)


def closure_fingerprint(function: Any) -> dict[str, str]:
    """``repr`` of the numbers and texts that a call may read, by their place.

    Places are the function's closure, defaults and globals, and attributes and entries of the objects there, if the
    function's code names them.

    Error: values are missed that are read by functions which this function calls by a global name.
    """
    values = reached_values(function, "", frozenset(), {}, PLAIN_TYPES)
    return {place: repr(value) for place, value in values if isinstance(value, PLAIN_TYPES)}


def closure_tensors(function: Any) -> dict[str, torch.Tensor]:
    """Tensors that a call may read, each once, by their place; of modules all parameters and buffers.

    Places are as in `closure_fingerprint`, with the same error.
    """
    places: dict[torch.Tensor, str] = {}
    for place, value in reached_values(function, "", frozenset(), {}, (torch.Tensor, nn.Module)):
        inside = chain(value.named_parameters(), value.named_buffers()) if isinstance(value, nn.Module) else ()
        for name, tensor in [("", value)] if isinstance(value, torch.Tensor) else inside:
            places.setdefault(tensor, f"{place}.{name}".strip("."))
    return {place: tensor for tensor, place in places.items()}


def reached_values(
    thing: Any,
    place: str,
    names: Set[str],
    seen: dict[tuple[int, Set[str]], Any],
    global_types: tuple[type, ...],
) -> Iterator[tuple[str, Any]]:
    """An object and all objects inside it that code reaches, with their places.

    Args:
        names: names that occur in the code that reads the object.
        seen: objects that were visited, by id and ``names``; keeps them alive, so that no other object gets their id.
        global_types: types of global variables that are followed.
    """
    if isinstance(thing, PLAIN_TYPES):
        yield place, thing
        return
    if (id(thing), names) in seen:
        return
    seen[id(thing), names] = thing
    yield place, thing
    if isinstance(thing, OPAQUE_TYPES) or (isinstance(thing, FunctionType) and is_torch(thing)):
        return
    inside: dict[str, Any] = {}
    if isinstance(thing, functools.partial):
        inside = {"": thing.func, **{str(k): v for k, v in enumerate(thing.args)}, **thing.keywords}
    elif isinstance(thing, MethodType):
        names = names_in(thing.__func__.__code__) if isinstance(thing.__func__, FunctionType) else names
        inside = {"": thing.__func__, **named_attributes(thing.__self__, names)}
    elif isinstance(thing, FunctionType):
        names = names_in(thing.__code__)
        inside = visible_names(thing, names, global_types)
    elif isinstance(thing, Mapping):
        inside = {key: value for key, value in thing.items() if isinstance(key, str) and key in names}
    elif isinstance(thing, list | tuple):
        inside = {str(k): value for k, value in enumerate(thing)}
    else:
        run = type(thing).forward if isinstance(thing, nn.Module) else getattr_static(type(thing), "__call__", None)
        inside = named_attributes(thing, names) | (
            {"": MethodType(run, thing)} if isinstance(run, FunctionType) else {}
        )
    for name, value in inside.items():
        yield from reached_values(value, f"{place}.{name}".strip("."), names, seen, global_types)


def is_torch(function: FunctionType) -> bool:
    return function.__module__.partition(".")[0] == "torch"


def names_in(code: CodeType) -> frozenset[str]:
    """Names and texts in a function's code, nested functions included."""
    inner = [names_in(c) for c in code.co_consts if isinstance(c, CodeType)]
    return frozenset({*code.co_names, *(c for c in code.co_consts if isinstance(c, str))}.union(*inner))


def visible_names(function: FunctionType, names: Set[str], global_types: tuple[type, ...]) -> dict[str, Any]:
    """Values that a function's code can read by name: globals of some types, closure variables and defaults."""
    code = function.__code__
    around = {k: v for k, v in function.__globals__.items() if k in names and isinstance(v, global_types)}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # an empty cell
            around[name] = cell.cell_contents
    positional = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    return around | dict(zip(reversed(positional), reversed(defaults))) | (function.__kwdefaults__ or {})


def named_attributes(thing: Any, names: Set[str]) -> dict[str, Any]:
    """Attributes of an object whose names occur in the code; properties are not evaluated."""
    places = [getattr(thing, "__dict__", {}), *(getattr(thing, place, {}) for place in OF_MODULES)]
    return {name: value for values in places for name, value in values.items() if name in names}
