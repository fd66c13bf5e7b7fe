"""Schedules by name: one pure function per schedule, from rank, ranks and microbatches to the rank's actions.

Every backward phase runs its microbatches in forward order, so that gradients accumulate in the order in which one
device would add them, and so that channels may be in-order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from autopar.errors import UsageError
from autopar.schedule.actions import Action, Schedule


def forward_only(rank: int, pp: int, microbatches: int) -> tuple[Action, ...]:
    """Actions of a rank for inference: every forward, no backward."""
    return tuple(Action("F", rank, i) for i in range(microbatches))


def gpipe(rank: int, pp: int, microbatches: int) -> tuple[Action, ...]:
    """Actions of a rank for GPipe: every forward, then every backward.

    Source: Huang et al. 2019, section 2.3; there the backward phase runs in reverse order.
    """
    return forward_only(rank, pp, microbatches) + tuple(Action("B", rank, i) for i in range(microbatches))


def one_f_one_b(rank: int, pp: int, microbatches: int) -> tuple[Action, ...]:
    """Actions of a rank for 1F1B: min(pp - rank - 1, microbatches) warm-up forwards, pairs F B, the other backwards.

    Source: Narayanan et al. 2021 (Megatron-LM), section 2.2.1; here for any number of microbatches.
    """
    warmup = min(pp - rank - 1, microbatches)
    forwards = forward_only(rank, pp, microbatches)
    backwards = tuple(Action("B", rank, i) for i in range(microbatches))
    steady = tuple(action for pair in zip(forwards[warmup:], backwards) for action in pair)
    return forwards[:warmup] + steady + backwards[microbatches - warmup :]


@dataclass(frozen=True)
class Recipe:
    """A rank's actions, and the most microbatches it keeps activations of; both from (rank, pp, microbatches)."""

    actions: Callable[[int, int, int], tuple[Action, ...]]
    max_in_flight: Callable[[int, int, int], int]


RECIPES: Mapping[str, Recipe] = {
    "forward-only": Recipe(forward_only, lambda rank, pp, microbatches: 0),
    "gpipe": Recipe(gpipe, lambda rank, pp, microbatches: microbatches),
    "1f1b": Recipe(one_f_one_b, lambda rank, pp, microbatches: min(microbatches, pp - rank)),
}


def generate(name: str, pp: int, microbatches: int) -> Schedule:
    """The actions of every rank, for any number of ranks and microbatches from 1 up.

    Raises:
        UsageError: no schedule has that name, or a number is below 1.
    """
    recipe = _recipe(name, pp, microbatches)
    return tuple(recipe.actions(rank, pp, microbatches) for rank in range(pp))


def max_in_flight(name: str, rank: int, pp: int, microbatches: int) -> int:
    """The most microbatches whose activations ``rank`` keeps for a backward at one time; 0 without backwards.

    Raises:
        UsageError: no schedule has that name, the rank is not in the pipeline, or a number is below 1.
    """
    recipe = _recipe(name, pp, microbatches)
    if not 0 <= rank < pp:
        raise UsageError(f"Rank {rank} is not in a pipeline of {pp} ranks. Give a rank from 0 to {pp - 1}.")
    return recipe.max_in_flight(rank, pp, microbatches)


def _recipe(name: str, pp: int, microbatches: int) -> Recipe:
    if name not in RECIPES:
        near = get_close_matches(name.lower(), RECIPES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"No schedule is named {name!r}. Known schedules: {', '.join(RECIPES)}.{hint}")
    for label, number in (("pp", pp), ("microbatches", microbatches)):
        if number < 1:
            raise UsageError(f"Schedule {name} with {label}={number}: {label} must be at least 1.")
    return RECIPES[name]
