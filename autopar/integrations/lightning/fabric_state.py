"""State that ``fabric.save`` and ``fabric.load`` are given: its model on ranks, its optimizer, and all else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.api.prepare import PreparedModule, PreparedOptimizer
from autopar.errors import UsageError
from autopar.integrations.lightning.checkpoint import Rest


def check_names(path: Any, state: dict[str, Any], rest: Rest, strict: bool) -> None:
    """Raise a UsageError for a name in a state that the checkpoint lacks, or that is no model on ranks there."""
    saved = {rest.module, rest.optimizer, *rest.state} - {None}
    missing = [name for name in state if name not in saved]
    if missing and strict:
        raise UsageError(
            f"The checkpoint in {path} has no {missing[0]!r}; it has {', '.join(map(repr, sorted(map(str, saved))))}. "
            "Pass strict=False to load what it has."
        )
    alone = rest.optimizer in state and rest.module not in state
    other = [
        name
        for name, kind in ((rest.module, PreparedModule), (rest.optimizer, PreparedOptimizer))
        if name in state and not isinstance(state[name], kind)
    ]
    if alone or other:
        raise UsageError(
            f"The checkpoint in {path} has {rest.module!r} in parts, with its optimizer. Give what "
            "fabric.setup(model, optimizer) returned for both, or the model alone."
        )


def restored(state: dict[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """What is left over of what was saved, after each object in ``state`` has been given its own."""
    left = dict(saved)
    for name in [name for name in state if name in left]:
        value = left.pop(name)
        if callable(load := getattr(state[name], "load_state_dict", None)):
            load(value)
        else:
            state[name] = value
    return left


def single(modules: dict[str, PreparedModule]) -> tuple[str, PreparedModule]:
    """The name and the model of a state that has one model on ranks.

    Raises:
        UsageError: it has several.
    """
    if len(modules) > 1:
        raise UsageError(f"{', '.join(modules)} are models on ranks, which write a folder each. Save them one by one.")
    return next(iter(modules.items()))


def optimizer_of(module: PreparedModule, state: dict[str, Any]) -> tuple[str | None, PreparedOptimizer | None]:
    """Name and object of a model's optimizer in a state, or None for both."""
    for name, value in state.items():
        if isinstance(value, PreparedOptimizer) and value.pm is module.pm:
            return name, value
    return None, None
