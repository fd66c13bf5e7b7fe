"""Nested inputs and outputs as flat lists and back.

torch's pytree lives in a private module, ``torch.utils._pytree``, and torch.export returns its specs. No other module
uses it. Tried with torch 2.11 and 2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils._pytree as _pytree

Spec = _pytree.TreeSpec


def flatten(tree: Any) -> tuple[list[Any], Spec]:
    """The leaves of a nested structure in order, and the structure; ``None`` is a leaf."""
    return _pytree.tree_flatten(tree)


def leaves(tree: Any) -> list[Any]:
    """The leaves of a nested structure in order."""
    return _pytree.tree_leaves(tree)


def unflatten(values: list[Any], spec: Spec) -> Any:
    """The structure ``spec`` filled with ``values``; inverse of `flatten`."""
    return _pytree.tree_unflatten(values, spec)


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """The structure with ``function`` applied to each leaf."""
    return _pytree.tree_map(function, tree)


def path_text(spec: Spec, number: int) -> str:
    """Path of a leaf as Python writes it, ``["loss"]``; the leaf's number where a class does not name its parts."""
    try:
        paths, _ = _pytree.tree_flatten_with_path(unflatten(list(range(spec.num_leaves)), spec))
    except Exception:  # the user's class is built of numbers here, which it may refuse in any way
        return str(number)
    return _pytree.keystr(paths[number][0]) or str(number)
