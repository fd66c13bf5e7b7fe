"""Strategy graphs: small random ones, and a transformer with given times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hypothesis import strategies as st

from autopar.ir.layout import REPLICATED, Layout, broadcast_layout, split_layout
from autopar.ir.strategies import ReshardingCost, ShardingStrategy, StrategyGraph, StrategyGroup

TOKENS, CHANNELS, ROWS = split_layout(1), split_layout(2), split_layout(0)
BOTH = broadcast_layout()
READABLE = (REPLICATED, TOKENS, CHANNELS, BOTH)
MADE = (REPLICATED, TOKENS, CHANNELS)
RANKS = 2


@st.composite
def strategy_graphs(draw: st.DrawFn, max_groups: int = 4) -> StrategyGraph:
    """Any small graph: branches, skips, several readers, shared kinds and weights, up to 3 strategies a group."""
    size, number = draw(st.integers(1, max_groups)), st.integers(0, 9)
    sizes: dict[int, int] = {}
    groups: list[StrategyGroup] = []
    values: list[str] = []
    for i in range(size):
        kind = draw(st.integers(0, size - 1))
        reads = tuple(sorted(draw(st.sets(st.sampled_from(values), max_size=2)))) if values else ()
        makes = tuple(f"t{i}_{tensor}" for tensor in range(draw(st.integers(1, 2))))
        weights = tuple(sorted(draw(st.sets(st.sampled_from(("w0", "w1")), max_size=2))))
        strategies = []
        for k in range(sizes.setdefault(kind, draw(st.integers(1, 3)))):
            read, made = st.just(REPLICATED), st.just(REPLICATED)
            if k:
                read, made = st.sampled_from(READABLE), st.sampled_from(MADE)
            strategies.append(
                ShardingStrategy(
                    f"c{k}", (), draw(number) * 1e-3, draw(number) * 1e-3, draw(number) * 1e-3, draw(number),
                    draw(number), tuple(draw(read) for _ in reads), tuple(draw(made) for _ in makes),
                    tuple(draw(read) for _ in weights),
                )
            )  # fmt: skip
        groups.append(StrategyGroup(f"g{i}", kind, reads, makes, weights, tuple(strategies)))
        values += makes
    ends = tuple(sorted(draw(st.sets(st.sampled_from(values), min_size=1, max_size=2))))
    loss = ShardingStrategy("", (), 1e-3, 0.0, 0.0, 0, 0, (REPLICATED,) * len(ends), (), ())
    resharding = {
        (value, made, read): ReshardingCost(draw(number) * 1e-3, draw(number) * 1e-3, draw(number))
        for value in values
        for made in MADE
        for read in READABLE
        if made != read
    }
    return StrategyGraph((*groups, StrategyGroup("loss", -1, ends, (), (), (loss,))), resharding)


@dataclass(frozen=True)
class Machine:
    """Seconds of a block's parts on one rank, and of collectives over all ranks."""

    ranks: int = 2
    all_reduce: float = 0.30e-3
    gather: float = 0.15e-3  # and reduce-scatter
    all_to_all: float = 0.08e-3
    seconds: Mapping[str, float] = field(
        default_factory=lambda: {
            "norm1": 0.15e-3, "qkv": 0.9e-3, "attend": 0.6e-3, "proj": 0.35e-3,
            "norm2": 0.15e-3, "fc1": 1.2e-3, "fc2": 1.15e-3,
        }
    )  # fmt: skip


SAVED, WEIGHTS = 12 * 2**20, 48 * 2**20


def vit_strategies(blocks: int, machine: Machine = Machine(), tokens: bool = True) -> StrategyGraph:
    """Chain of transformer blocks of 7 groups between a stem and a head.

    Args:
        tokens: whether strategies may split tokens.
    """
    groups = [_group("stem", 0, (), ("x0",), (_replicated(1e-3, 0, 1, 0),))]
    for b in range(blocks):
        groups += _block(b, machine, tokens)
    groups.append(_group("head", 8, (f"x{blocks}",), ("logits",), (_replicated(1e-4, 1, 1, 1),)))
    groups.append(_group("loss", 9, ("logits",), (), (_replicated(1e-5, 1, 0, 0),)))
    resharding = {
        (value, made, read): _resharding_cost(machine, made, read)
        for group in groups
        for value in group.makes
        for made in MADE
        for read in READABLE
        if made != read
    }
    return StrategyGraph(tuple(groups), resharding)


def _group(
    name: str, kind: int, reads: tuple[str, ...], makes: tuple[str, ...], strategies: tuple[ShardingStrategy, ...]
) -> StrategyGroup:
    weights = (f"{name}.weight",) if strategies[0].weight_layouts else ()
    return StrategyGroup(name, kind, reads, makes, weights, strategies)


def _replicated(seconds: float, reads: int, makes: int, weights: int) -> ShardingStrategy:
    return ShardingStrategy(
        "replicated", (), seconds / 3, 2 * seconds / 3, 0.0, SAVED, WEIGHTS * weights, (REPLICATED,) * reads,
        (REPLICATED,) * makes, (REPLICATED,) * weights,
    )  # fmt: skip


def _block(b: int, machine: Machine, tokens: bool) -> list[StrategyGroup]:
    """Column-split qkv and fc1, row-split proj and fc2 (with their residual), norms and linears split by tokens."""
    n, first = machine.ranks, f"x{b}"
    names = ("norm1", "qkv", "attend", "proj", "norm2", "fc1", "fc2")
    value = {name: f"{name}.{b}" for name in names} | {"fc2": f"x{b + 1}"}
    reads = {
        "norm1": (first,), "qkv": (value["norm1"],), "attend": (value["qkv"],), "proj": (value["attend"], first),
        "norm2": (value["proj"],), "fc1": (value["norm2"],), "fc2": (value["fc1"], value["proj"]),
    }  # fmt: skip
    groups = []
    for number, name in enumerate(names):
        whole = _replicated(machine.seconds[name], len(reads[name]), 1, int(name != "attend"))
        local = machine.seconds[name] / n

        def split(
            label: str,
            inputs: tuple[Layout, ...],
            output: Layout,
            stored: Layout | None,
            forward: float = 0.0,
            local: float = local,
        ) -> ShardingStrategy:
            weight = WEIGHTS if stored == BOTH else WEIGHTS // n
            step = machine.all_reduce if stored == BOTH else 0.0
            kept = (stored,) if stored is not None else ()
            return ShardingStrategy(
                label, (), local / 3 + forward, 2 * local / 3, step, SAVED // n, weight * len(kept), inputs, (output,),
                kept,
            )  # fmt: skip

        strategies = [whole]
        if name in ("qkv", "fc1"):
            strategies.append(split("column", (BOTH,), CHANNELS, ROWS))
            strategies += [split("tokens", (TOKENS,), TOKENS, BOTH)] * tokens
        elif name == "attend":
            strategies.append(split("heads", (CHANNELS,), CHANNELS, None))
        elif name in ("proj", "fc2"):
            # The backward of a reduce-scatter gathers; that of an all-reduce costs nothing.
            strategies.append(split("row", (CHANNELS, REPLICATED), REPLICATED, CHANNELS, machine.all_reduce))
            scatter = split("row scatter", (CHANNELS, TOKENS), TOKENS, CHANNELS, 2 * machine.gather)
            strategies += [scatter, split("tokens", (TOKENS, TOKENS), TOKENS, BOTH)] * tokens
        else:
            strategies += [split("tokens", (TOKENS,), TOKENS, BOTH)] * tokens
        groups.append(_group(f"blocks.{b}.{name}", number + 1, reads[name], (value[name],), tuple(strategies)))
    return groups


def _resharding_cost(machine: Machine, made: Layout, read: Layout) -> ReshardingCost:
    if made == REPLICATED:
        return ReshardingCost(0.0, machine.all_reduce if read == BOTH else machine.gather)
    if read == REPLICATED:
        return ReshardingCost(machine.gather, 0.0)
    if read == BOTH:
        return ReshardingCost(machine.gather, machine.gather)
    return ReshardingCost(machine.all_to_all, machine.all_to_all)
