"""Oracle of sharding rules: runs an operation unsharded and sharded in float64, and compares.

It shares only types with autopar: parts are cut and joined here by reading a dim as (outer, units, unit).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from autopar.ir.graph import Op, Ref, Value, refs
from autopar.ir.layout import TP, Layout
from autopar.ops import collectives
from autopar.ops.registry import operator
from autopar.sharding.localise import localised
from autopar.sharding.rule import Rule, Strategy
from support.rule_cases import Case

Tensors = Mapping[str, Tensor]
Result = TypeVar("Result")
STATISTICS = ("aten.batch_norm.default", "aten.instance_norm.default")
UNINITIALISED = ("aten.empty.memory_format", "aten.empty_like.default", "aten.new_empty.default")


@dataclass(frozen=True)
class Example:
    """A case as an operation of a graph, and its tensors by name."""

    op: Op
    tensors: Tensors

    def shape_of(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)


def example(case: Case) -> Example:
    """Operation of a case; a run of it gives the shapes of its outputs."""
    names: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}

    def named(tree: Any) -> Any:
        if isinstance(tree, Tensor):
            name = names.setdefault(id(tree), f"x{len(names)}")
            tensors[name] = tree
            return Ref(name)
        return tuple(map(named, tree)) if isinstance(tree, tuple) else tree

    args, kwargs = named(case.args), tuple((k, named(v)) for k, v in case.kwargs)
    bare = Op("op", case.target, args, kwargs, (), "")
    made, _ = run(bare, tensors)
    values = tuple(
        Value(f"y:{i}", tuple(y.shape), str(y.dtype).removeprefix("torch."), tuple(y.stride()), y.requires_grad)
        for i, y in enumerate(made)
    )
    updated = tuple(refs(args[3:5])) if case.target in STATISTICS and args[5] else ()
    return Example(Op("op", case.target, args, kwargs, values, "", mutates=updated), tensors)


def run(op: Op, tensors: Tensors) -> tuple[list[Tensor], Tensors]:
    """Outputs of an operation on copies of tensors, and these copies."""
    with torch.no_grad():
        copies = {name: t.detach().clone().requires_grad_(t.requires_grad) for name, t in tensors.items()}

    def filled(tree: Any) -> Any:
        if isinstance(tree, Ref):
            return copies[tree.name]
        return [filled(item) for item in tree] if isinstance(tree, tuple) else tree

    torch.manual_seed(0)
    made = operator(op.target)(*filled(op.args), **{k: filled(v) for k, v in op.kwargs})
    return list(made) if isinstance(made, list | tuple) else [made], copies


def gradients(made: Sequence[Tensor], read: Tensors, arriving: Sequence[Tensor]) -> dict[str, Tensor]:
    """Gradient of every tensor that has one."""
    roots = [(y, g) for y, g in zip(made, arriving) if y.requires_grad]
    wanted = {name: t for name, t in read.items() if t.requires_grad}
    if not roots or not wanted:
        return {}
    found = torch.autograd.grad([y for y, _ in roots], list(wanted.values()), [g for _, g in roots], allow_unused=True)
    return {name: g for name, g in zip(wanted, found) if g is not None}


def check(this: Example, rule: Rule, strategy: Strategy, ranks: int) -> None:
    """Compare joined or summed parts with the unsharded run: outputs, gradients and in-place updates.

    Raises:
        AssertionError: a shape differs, or a number by more than 1e-10.
    """
    made, read = run(this.op, this.tensors)
    arriving = [torch.randn_like(y) if y.requires_grad else torch.zeros_like(y) for y in made]
    wanted = gradients(made, read, arriving)
    layouts = dict(zip(this.op.reads, strategy.operands))

    def run_part(rank: int) -> tuple[list[Tensor], Tensors, dict[str, Tensor]]:
        """Outputs, in-place updates and gradients of a rank."""
        local = localised(this.op, rule, strategy, ranks, rank)
        mine = {name: as_read(t, layouts[name], ranks, rank) for name, t in this.tensors.items()}
        outputs, copy = run(local, mine)
        for y, value in zip(outputs, local.outputs, strict=True):
            assert tuple(y.shape) == value.shape, (
                f"{this.op.target}: {tuple(y.shape)} is not the promised {value.shape}"
            )
        sent = [g if layout.partial else cut(g, layout, ranks, rank) for g, layout in zip(arriving, strategy.outputs)]
        return outputs, copy, gradients(outputs, copy, sent)

    # Replicated random operations draw from one generator, one after the other.
    parts, copies, found = zip(*on_threads(run_part, ranks, concurrent=bool(strategy.label)))
    for i, layout in enumerate(strategy.outputs):
        if this.op.target not in UNINITIALISED:
            equal("output", [rank[i] for rank in parts], made[i], layout)
    for name, gradient in wanted.items():
        equal(f"gradient of {name}", [rank[name] for rank in found], gradient, layouts[name])
    for name in this.op.mutates:
        equal(f"updated {name}", [rank[name] for rank in copies], read[name], layouts[name])


@contextmanager
def registered(axis: Any) -> Iterator[None]:
    """Let operators call a communicator of the tensor axis."""
    collectives.register(TP, axis)
    try:
        yield
    finally:
        collectives.unregister(TP)


def numbered(rank: int, ranks: int) -> AbstractContextManager[None]:
    """Context in which operators see this process as a rank of the tensor axis."""
    return registered(SimpleNamespace(rank=rank, ranks=ranks))


class ThreadCommunicator:
    """The tensor axis of ranks that are threads; what operators of a single operation call."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.own = threading.local()
        self.barrier = threading.Barrier(ranks, timeout=10)
        self.sent: list[Tensor | None] = [None] * ranks

    @property
    def rank(self) -> int:
        return self.own.rank

    def all_gather(self, tensor: Tensor) -> Tensor:
        self.sent[self.rank] = tensor
        self.barrier.wait()
        gathered = torch.stack([t for t in self.sent if t is not None])
        self.barrier.wait()
        return gathered

    def all_reduce(self, tensor: Tensor) -> None:
        tensor.copy_(self.all_gather(tensor.clone()).sum(0))


def on_threads(run_rank: Callable[[int], Result], ranks: int, concurrent: bool) -> list[Result]:
    """Results of a function on every rank of the tensor axis, in threads that see it as theirs."""
    axis = ThreadCommunicator(ranks)

    def run_as(rank: int) -> Result:
        axis.own.rank = rank
        try:
            return run_rank(rank)
        except BaseException:
            axis.barrier.abort()
            raise

    with registered(axis), ThreadPoolExecutor(ranks if concurrent else 1) as threads:
        futures = [threads.submit(run_as, rank) for rank in range(ranks)]
        errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]


def as_read(tensor: Tensor, layout: Layout, ranks: int, rank: int) -> Tensor:
    """Part of a tensor that a rank reads; of a partial sum rank 0 has all, the others zeros."""
    mine = torch.zeros_like(tensor) if layout.partial and rank else cut(tensor, layout, ranks, rank)
    return mine.detach().requires_grad_(tensor.requires_grad)


def cut(tensor: Tensor, layout: Layout, ranks: int, rank: int) -> Tensor:
    """Shard of a rank."""
    for split in layout.splits:
        unit = split.unit or tensor.shape[split.dim] // (split.outer * ranks)
        units = tensor.unflatten(split.dim, (split.outer, -1, unit))
        tensor = units.tensor_split(ranks, split.dim + 1)[rank].flatten(split.dim, split.dim + 2)
    return tensor


def join(parts: Sequence[Tensor], layout: Layout) -> Tensor:
    """Tensor with these shards."""
    (split,) = layout.splits
    apart = [part.unflatten(split.dim, (split.outer, -1)) for part in parts]
    return torch.cat(apart, split.dim + 1).flatten(split.dim, split.dim + 1)


def equal(what: str, parts: Sequence[Tensor], whole: Tensor, layout: Layout) -> None:
    """Check that parts in a layout make up the whole tensor."""
    if layout.splits:
        together = [join(parts, layout)]
    elif (layout.partial_gradient and not what.startswith("updated")) or (layout.partial and what == "output"):
        together = [torch.stack(tuple(parts)).sum(0)]
    else:
        together = list(parts)
    for tensor in together:
        assert (tensor.shape, tensor.dtype) == (whole.shape, whole.dtype), f"{what}: {tensor.shape}, not {whole.shape}"
        close = torch.allclose(tensor, whole, rtol=1e-10, atol=1e-10, equal_nan=True)
        assert close, f"{what} differs by up to {(tensor - whole).abs().max():.3g}"
