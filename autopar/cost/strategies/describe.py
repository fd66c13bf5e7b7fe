"""Shardings in words: sizes that the ranks do not divide, and how each block of a model is sharded."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost.groups.grouping import original_reads
from autopar.cost.ops.collective_cost import full_tensor_bytes, is_collective, reshard_step_cost
from autopar.cost.ops.op_cost import Pricing
from autopar.cost.ops.op_stats import GraphStats
from autopar.cost.strategies.rule_cache import RuleCache
from autopar.ir.blocks import blocks_of, name_outside_modules
from autopar.ir.graph import Graph, Op, Value
from autopar.ir.layout import Layout, pattern_of
from autopar.ir.plan_parts import BlockSharding, Collective
from autopar.ir.tensor_axes import TensorAxis
from autopar.sharding.batch_dim import sample_dims
from autopar.sharding.exchanges import EXCHANGING, exchanges
from autopar.sharding.reshard import reshard_step
from autopar.sharding.rule import Rule, has_letter

REDUCTIONS = {"all_reduce": "all-reduce", "reduce_scatter": "reduce-scatter"}
PIXEL_DIMS = ("height", "width")
CHANNELS_FIRST = ("conv", "batch_norm", "group_norm", "instance_norm")


# -- what cannot be split ------------------------------------------------------------------------------------------


def sharding_limits(graph: Graph, stats: GraphStats, ranks: int) -> tuple[str, ...]:
    """Sizes that keep operations whole, in words: ``attention has 3 heads``, ``head has 10 output features``.

    The ranks do not divide the features of weights, or there are fewer heads or tokens than ranks.

    Each is listed once, in order of appearance. Sample dims are left out; the caller checks the batch.

    Args:
        stats: statistics of this graph, from `graph_stats`.
    """
    book = RuleCache(graph, stats, TensorAxis(ranks=ranks))
    samples = sample_dims(graph, book.rule)
    found: dict[str, None] = {}
    for op in graph.ops:
        rule = book.rule(op) if stats.ops[op.name].forward_flops > 0 else None
        for letter in rule.free if rule is not None else ():
            if rule is not None and rule.sizes[letter] > 1 and rule.sizes[letter] % ranks:
                found |= dict.fromkeys(size_limit(op, rule, letter, book, samples))
    return tuple(found)


def size_limit(op: Op, rule: Rule, letter: str, book: RuleCache, samples: Mapping[str, Layout]) -> Iterator[str]:
    """The words for one letter of a rule whose size the ranks do not divide."""
    size, where = rule.sizes[letter], pattern_of(op.module or op.name)
    readers = [i for i, dims in enumerate(rule.operands) if has_letter(dims, letter)]
    fed = [i for i in readers if op.reads[i] in book.batch_dependent]
    weights = [i for i in readers if op.reads[i] not in book.batch_dependent]
    if any(op.reads[i] not in book.graph.producer for i in fed):
        return  # a graph input, such as the channels of an image
    if weights and book.multiplies_weights(op):
        yield f"{where} has {size} {'input' if fed else 'output'} {'channels' if 'conv' in op.target else 'features'}"
    elif fed and size < book.ranks:  # larger ones are split raggedly
        dims = rule.operands[fed[0]]
        dim = next(d for d, letters in enumerate(dims) if letter in letters)
        sample = samples.get(op.reads[fed[0]])
        if sample is None or sample.splits[0].dim != dim:
            word = dim_word(op, dim, len(dims), book)
            pixels = "pixels of " if word in PIXEL_DIMS else ""
            yield f"attention has {size} heads" if word == "heads" else f"{size} {pixels}{word}"


def dim_word(op: Op, dim: int, rank: int, book: RuleCache) -> str:
    """Word for a dim of an activation, guessed from its position: heads, tokens, channels, height, width."""
    if book.stats.ops[op.name].forward_flops and not book.multiplies_weights(op):
        return "heads" if dim == 1 and rank == 4 else "tokens"
    channels = 1 if any(word in op.target for word in CHANNELS_FIRST) else rank - 1
    if dim == channels:
        return "channels"
    if rank == 4 and dim:
        return PIXEL_DIMS[dim - 1 - (channels < dim)]
    return {3: "tokens"}.get(rank, f"of dim {dim}")


# -- what is split --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AxisSharding:
    """A graph sharded over one tensor axis.

    Args:
        pricing: of the graph before; its last axis is this one.
        local: the graph of a rank of the axis.
        storage: layouts of its weights, at least on this axis.
    """

    pricing: Pricing
    local: Graph
    storage: Mapping[str, Layout]


def block_shardings(axes: Sequence[AxisSharding]) -> tuple[BlockSharding, ...]:
    """How each block of a model is sharded; blocks with the same rows and collectives are one entry.

    The block of an operation is its module path up to the last number that has modules inside, such as ``blocks.3``.
    A module outside such blocks is a block by itself. Replicated operations are left out.

    Args:
        axes: sharding over each axis, the outermost first. The first one is of the unsharded graph.
    """
    graph, local = axes[0].pricing.graph, axes[-1].local
    local_pricing = replace(axes[-1].pricing, graph=local)
    words: dict[str, list[str]] = {}
    for own in axes:
        prefix = f"{own.pricing.axis.name} " if len(axes) > 1 else ""
        for name, text in axis_words(own):
            words.setdefault(name, []).append(prefix + text)
    rows: dict[str, dict[str, str]] = {}
    block_of = {op.name: block for op, block in zip(graph.ops, blocks_of(graph))}
    for op in graph.ops:
        if op.name in words:
            block = block_of[op.name]
            rows.setdefault(block, {}).setdefault(name_in_block(block, op, graph), ", ".join(words[op.name]))
    collectives_of: dict[str, list[Collective]] = {}
    for op in local.ops:
        if is_collective(op):
            collectives_of.setdefault(block_of[op.home], []).extend(collectives(op, local_pricing))
        elif sent := list(collectives_inside(op, local_pricing)):
            collectives_of.setdefault(block_of[op.name], []).extend(sent)
    alike: dict[tuple, list[str]] = {}
    for block in dict.fromkeys(block_of.values()):
        if block in rows or collectives_of.get(block):
            key = (pattern_of(block), tuple(rows.get(block, {}).items()), tuple(collectives_of.get(block, ())))
            alike.setdefault(key, []).append(block)
    merged = Counter(merge_names(names) for names in alike.values())
    return tuple(
        BlockSharding(merge_names(names, listed=merged[merge_names(names)] > 1), len(names), dict(own), sends)
        for (_, own, sends), names in alike.items()
    )


def axis_words(own: AxisSharding) -> Iterator[tuple[str, str]]:
    """(operation, words for its sharding over one axis) of the operations that have any."""
    graph, axis = own.pricing.graph, own.pricing.axis
    book = RuleCache(graph, own.pricing.stats, axis)
    local_ops = {op.name: op for op in own.local.ops}
    storage = {name: layout.on(axis.name) for name, layout in own.storage.items()}
    reshardings = [(op.home, reshard_step(op)) for op in own.local.ops if op.home]
    reduced = {
        home: REDUCTIONS[step.name]
        for home, step in reshardings
        if step is not None and step.name in REDUCTIONS and axis.name in step.args
    }
    samples = sample_dims(graph, book.rule)
    for op in graph.ops:
        text = "" if op.home else describe_op(op, local_ops, storage, book, samples, reduced.get(op.name))
        if text:
            yield op.name, text


def describe_op(
    op: Op,
    parts: Mapping[str, Op],
    storage: Mapping[str, Layout],
    book: RuleCache,
    samples: Mapping[str, Layout],
    reduced: str | None,
) -> str:
    """Words for an operation's sharding, such as ``rows / 2 → all-reduce``; empty if it is replicated or has no FLOPs.

    Args:
        parts: the operations of a rank's local graph, by name.
        reduced: the collective that sums its output, if there is one.
    """
    weights = [name for name in original_reads(op, book.graph) if name in book.graph.weight]
    if not weights and not book.stats.ops[op.name].forward_flops:
        return ""
    after = f" → {reduced}" if reduced else ""
    for name in weights:
        layout, matrix = storage[name], len(book.graph.weight[name].shape) > 1
        if matrix and layout.splits and book.stats.ops[op.name].forward_flops:
            return f"{weight_word(op, layout, parts, book)} / {book.ranks}{after}"
    for value, local in zip(op.outputs, parts[op.name].outputs, strict=True):
        word = split_word(op, value, local, samples, book)
        if word:
            return f"{word} / {book.ranks}{after}"
    return f"summed / {book.ranks}{after}" if reduced else ""


def weight_word(op: Op, layout: Layout, parts: Mapping[str, Op], book: RuleCache) -> str:
    """Words for the shard of a weight: ``rows``, ``columns``, ``rows by head``, ``output channels``."""
    (split,) = layout.splits
    if "conv" in op.target:
        return {0: "output channels", 1: "input channels"}.get(split.dim, f"dim {split.dim}")
    sides = {0: "rows", 1: "columns"}
    side = sides.get(split.dim, f"dim {split.dim}")
    attention = next_attention(op, book)
    if split.dim == 0 and attention is not None and heads_split(attention, parts[attention.name]):
        return f"{side} by head"
    return f"{side} in {split.outer} parts" if split.outer > 1 else side


def next_attention(op: Op, book: RuleCache) -> Op | None:
    """The next operation with FLOPs after ``op``, if it multiplies activations with each other."""
    waiting, seen = deque(book.readers[op.name]), {op.name}
    while waiting:
        reader = waiting.popleft()
        if reader.name in seen:
            continue
        seen.add(reader.name)
        if book.stats.ops[reader.name].forward_flops:
            return None if book.multiplies_weights(reader) else reader
        waiting.extend(book.readers[reader.name])
    return None


def heads_split(op: Op, part: Op) -> bool:
    """Whether the heads of an attention, dim 1 of 4, are split."""
    whole, own = op.outputs[0].shape, part.outputs[0].shape
    return len(whole) == 4 and whole[1] != own[1]


def split_word(op: Op, value: Value, local: Value, samples: Mapping[str, Layout], book: RuleCache) -> str:
    """Word for the dim along which a value is split over the ranks; empty if it is not split."""
    dim = next((d for d, (whole, own) in enumerate(zip(value.shape, local.shape)) if whole != own), None)
    if dim is None:
        return ""
    sample = samples.get(value.name)
    if sample is not None and sample.splits[0].dim == dim:
        return "samples"
    return dim_word(op, dim, len(value.shape), book)


def collectives(op: Op, pricing: Pricing) -> Iterator[Collective]:
    """The collectives of an inserted operation: forward, backward, or both."""
    step, made = reshard_step(op), op.outputs[0]
    assert step is not None, f"{op.name}: {op.target} sends nothing"
    axis, where = pricing.axis_of(step), pattern_of(op.home)
    num_bytes = full_tensor_bytes(step, pricing.num_bytes(op.reads[0]), pricing.num_bytes(made.name), axis.ranks)
    seconds = reshard_step_cost(step, num_bytes, made.requires_grad, pricing.hardware, axis)
    name = axis.name if len(pricing.axes) > 1 else ""
    if step.forward:
        yield Collective(where, step.forward, "forward", round(num_bytes), seconds.forward_seconds, name)
    if step.backward and made.requires_grad:
        yield Collective(where, step.backward, "backward", round(num_bytes), seconds.backward_seconds, name)


def collectives_inside(op: Op, pricing: Pricing) -> Iterator[Collective]:
    """The collectives inside of an operation on a part of a picture."""
    if op.target not in EXCHANGING:
        return
    scale, axis = pricing.batch / pricing.graph.batch, pricing.axis_of(op)
    for exchange in exchanges(op, pricing.graph.readable[op.reads[0]]):
        num_bytes = scale * exchange.num_bytes
        seconds = pricing.hardware.collective_seconds(exchange.kind, num_bytes, axis.ranks, axis.stride)
        direction = "backward" if exchange.is_backward else "forward"
        yield Collective(pattern_of(op.name), exchange.kind, direction, round(num_bytes), seconds)


def name_in_block(block: str, op: Op, graph: Graph) -> str:
    """Name of an operation within its block: its module there, or its own name if it lies directly in the block."""
    inside = op.module.removeprefix(block).lstrip(".")
    last = op.module.rpartition(".")[2]
    # A module that is a block by itself and not a number, such as a norm outside of all blocks, keeps its name.
    return inside or (last if last and not last.isdigit() else name_outside_modules(block, op, graph))


def merge_names(names: Sequence[str], listed: bool = False) -> str:
    """Several names as one pattern, with ``*`` where their numbers differ, or these numbers, such as ``0…5,7``."""
    columns = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(
        words[0] if len(set(words)) == 1 else runs(sorted(set(map(int, words)))) if listed else "*" for words in columns
    )


def runs(numbers: Sequence[int]) -> str:
    """Ascending numbers with ``…`` for those between the ends of a run."""
    starts = [n for i, n in enumerate(numbers) if i == 0 or numbers[i - 1] != n - 1]
    ends = [n for i, n in enumerate(numbers) if i == len(numbers) - 1 or numbers[i + 1] != n + 1]
    return ",".join(f"{low}…{high}" if low < high else str(low) for low, high in zip(starts, ends, strict=True))
