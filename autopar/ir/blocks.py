"""Blocks of a model: the repeated modules by which people know its parts, from the names of its operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.ir.graph import Graph, Op
from autopar.ir.names import inside
from autopar.ir.plan_parts import BlockSharding

MAX_BLOCKS = 128  # of a picture; a model of more innermost blocks is shown by its outermost ones


def blocks_of(graph: Graph) -> Iterator[str]:
    """Name of each operation's block: its innermost repeated module, else its module, else the operation's name."""
    for op, path, ends in repeated_modules(graph):
        yield ".".join(path[: ends[-1]] if ends else path) or name_outside_modules("", op, graph)


def picture_blocks(graph: Graph) -> list[str]:
    """Name of each operation's block in a picture: its innermost repeated module, else its outermost module, else the
    operation's name. Where there are more than `MAX_BLOCKS` of these, its outermost repeated module.
    """

    def named(end: int) -> list[str]:
        modules = ((op, path[: ends[end] if ends else 1]) for op, path, ends in repeated_modules(graph))
        return [".".join(path) or name_outside_modules("", op, graph) for op, path in modules]

    innermost = named(-1)
    return innermost if len(set(innermost)) <= MAX_BLOCKS else named(0)


def repeated_modules(graph: Graph) -> Iterator[tuple[Op, list[str], list[int]]]:
    """Each operation, its module's path, and the lengths of the path's parts that are repeated modules.

    A repeated module has a number for a name, and modules inside.
    """
    paths = [op.module.split(".") if op.module else [] for op in graph.ops]
    inner = {tuple(path[:n]) for path in paths for n in range(1, len(path))}
    for op, path in zip(graph.ops, paths):
        yield op, path, [n for n in range(1, len(path) + 1) if path[n - 1].isdigit() and tuple(path[:n]) in inner]


def name_outside_modules(block: str, op: Op, graph: Graph) -> str:
    """Name of the weight that an operation applies, such as ``pos_embed``; of the operation if there is none."""
    weights = (name for name in op.reads if name in graph.weight and name.rpartition(".")[2] not in ("weight", "bias"))
    return next(weights, op.name).removeprefix(f"{block}.")


def shardings_inside(shardings: Sequence[BlockSharding], block: str) -> list[BlockSharding]:
    """Shardings of a block: the one whose name or pattern fits it best, else those of modules inside of it."""
    fitting = [sharding for sharding in shardings if fits(sharding.name, block)]
    if fitting:
        return [min(fitting, key=lambda sharding: sharding.name.split(".").count("*"))]
    depth = block.count(".") + 1
    return [s for s in shardings if not inside(block, s.name) and fits(".".join(s.name.split(".")[:depth]), block)]


def fits(pattern: str, name: str) -> bool:
    """Whether a name fits a pattern, in which ``*`` is any number and ``0…5,7`` one of several."""
    words, parts = pattern.split("."), name.split(".")
    return len(words) == len(parts) and all(
        word == part or (part.isdecimal() and (word == "*" or is_listed(int(part), word)))
        for word, part in zip(words, parts)
    )


def is_listed(number: int, word: str) -> bool:
    """Whether a number is one of those in a text such as ``0…5,7``; other texts list none."""
    runs = [run.split("…") for run in word.split(",")]
    if not all(end.isdecimal() for run in runs for end in run):
        return False
    return any(int(run[0]) <= number <= int(run[-1]) for run in runs)
