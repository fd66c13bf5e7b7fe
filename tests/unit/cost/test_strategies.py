"""Sharding strategies of groups on timm's models, and their costs against the prices of the graphs made of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import pytest
import timm
import torch
from support.graphs import MACHINE, graph, op, parameter, value
from support.models import Tied, Updating, tiny_vit
from support.priced import price
from timm.models.coat import CoaT

from autopar.cost.groups.weight_memory import Sharing
from autopar.cost.ops.op_cost import Pricing
from autopar.cost.ops.op_stats import GraphStats, graph_stats
from autopar.cost.strategies.describe import AxisSharding, block_shardings, name_in_block, sharding_limits
from autopar.cost.strategies.enumerate import GroupedModels, strategy_graph, with_replicas
from autopar.ir.blocks import blocks_of
from autopar.ir.cost_graph import CostGraph
from autopar.ir.graph import Graph
from autopar.ir.hardware import Hardware, Link
from autopar.ir.layout import Layout
from autopar.ir.plan_parts import BlockSharding, Replicas, ZeroStage
from autopar.ir.strategies import ReshardingCost, ShardingStrategy, StrategyGraph
from autopar.ir.tensor_axes import mesh_axes
from autopar.sharding.shard_graph import shard_graph, storage
from autopar.trace.trace import trace

# Communication is cheap, so that splitting pays even in small models.
FAST = replace(MACHINE, peak_flops={"float32": 1e9}, memory_bytes_per_second=1e10, collective=Link(1e-6, 1e9))
HIDING = replace(FAST, overlap_efficiency=0.6)
BATCH = 4

MODELS = {
    "vit": lambda: tiny_vit(depth=3, embed_dim=64, num_heads=4),
    "vit of 3 heads": lambda: tiny_vit(depth=2),
    "swin": lambda: timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=56, window_size=7, depths=(2, 2), num_heads=(2, 4), embed_dim=32
    ),
    "convnext": lambda: timm.create_model("convnext_atto", depths=(1, 1, 2, 1), dims=(16, 32, 64, 128)),
    "resnet18": lambda: timm.create_model("resnet18"),
    "vit without class token": lambda: tiny_vit(depth=2, class_token=False, global_pool="avg", reg_tokens=0),
    "mixer": lambda: timm.create_model("mixer_s32_224", img_size=64),
}  # fmt: skip
SIZES = {
    "vit": 32,
    "vit of 3 heads": 32,
    "swin": 56,
    "convnext": 64,
    "resnet18": 64,
    "mixer": 64,
    "vit without class token": 32,
}


@dataclass(frozen=True)
class Sharded:
    """One assignment of choices, what it says it costs, and the local graph that is made of it."""

    case: Case
    picks: Sequence[int]

    @cached_property
    def choices(self) -> list[ShardingStrategy]:
        return [g.strategies[k] for g, k in zip(self.case.choices.groups, self.picks, strict=True)]

    @cached_property
    def labels(self) -> Mapping[str, str]:
        return dict(pair for choice in self.choices for pair in choice.labels)

    @cached_property
    def storage(self) -> Mapping[str, Layout]:
        return storage(self.case.graph, self.labels, {"tp": self.case.ranks})

    @cached_property
    def local(self) -> Graph:
        stage_of = dict.fromkeys((o.name for o in self.case.graph.ops), 0)
        return shard_graph(self.case.graph, self.labels, self.storage, {"tp": self.case.ranks}, stage_of)

    @cached_property
    def cost(self) -> CostGraph:
        sharing = Sharing(tp=self.case.ranks, storage=self.storage)
        return price(self.local, graph_stats(self.local), self.case.hardware, BATCH, sharing, self.case.whole.groups)

    @cached_property
    def costs(self) -> list[ShardingStrategy | ReshardingCost]:
        """All choices and the conversions between them, each once."""
        made: dict[str, Layout] = {}
        paid: dict[tuple, ReshardingCost] = {}
        for group, choice in zip(self.case.choices.groups, self.choices, strict=True):
            for name, read in zip(group.reads, choice.input_layouts, strict=True):
                if made[name] != read:
                    paid[name, read] = self.case.choices.resharding[name, made[name], read]
            made |= dict(zip(group.makes, choice.output_layouts, strict=True))
        return [*self.choices, *paid.values()]

    @property
    def seconds(self) -> float:
        return sum(cost.seconds for cost in self.costs)

    @property
    def saved_bytes(self) -> int:
        return sum(cost.saved_bytes for cost in self.costs)

    @property
    def agrees(self) -> bool:
        """Whether all readers of each weight keep it in one layout."""
        kept: dict[str, Layout] = {}
        pairs = (
            pair
            for group, choice in zip(self.case.choices.groups, self.choices, strict=True)
            for pair in zip(group.weights, choice.weight_layouts, strict=True)
        )
        return all(kept.setdefault(name, layout) == layout for name, layout in pairs)


@dataclass(frozen=True)
class Case:
    """A model with its choices on some ranks."""

    graph: Graph
    facts: GraphStats
    choices: StrategyGraph
    whole: CostGraph
    ranks: int
    hardware: Hardware

    def sharded(self, choice_of_kind: Mapping[int, int]) -> Sharded:
        return Sharded(self, [choice_of_kind[g.kind] for g in self.choices.groups])

    def named(self, names: Mapping[str, str]) -> Sharded:
        """The choices with these names for groups with these endings; everything else is replicated."""

        def number(group):
            wanted = next((name for ending, name in names.items() if group.name.endswith(ending)), "replicated")
            return [choice.name for choice in group.strategies].index(wanted)

        return Sharded(self, [number(group) for group in self.choices.groups])

    def descended(self) -> Sharded:
        """An assignment that no change of a single kind makes faster."""
        pick = dict.fromkeys((g.kind for g in self.choices.groups), 0)
        sizes = {g.kind: len(g.strategies) for g in self.choices.groups}
        best = self.sharded(pick).seconds
        for kind in [*pick, *pick]:
            for k in range(sizes[kind]):
                other = self.sharded(pick | {kind: k})
                if other.agrees and other.seconds < best:
                    best, pick = other.seconds, pick | {kind: k}
        return self.sharded(pick)


def case_of(traced: Graph, ranks: int, batch: int = BATCH, hardware: Hardware = FAST) -> Case:
    facts = graph_stats(traced)
    choices = strategy_graph(Pricing(traced, facts, hardware, batch, mesh_axes((ranks,))))
    whole = price(traced, facts, hardware, batch)
    return Case(traced, facts, choices, whole, ranks, hardware)


@cache
def graph_of(name: str) -> Graph:
    with torch.device("meta"):
        x = torch.empty(BATCH, 3, SIZES[name], SIZES[name])
        return trace(MODELS[name](), (x,), {}, mode="train", name=name)


@cache
def case(name: str, ranks: int = 2) -> Case:
    return case_of(graph_of(name), ranks)


def names(choices: StrategyGraph, ending: str) -> list[str]:
    """Names of the choices of the first group that ends so."""
    return [c.name for c in next(g for g in choices.groups if g.name.endswith(ending)).strategies]


# -- what the choices are ------------------------------------------------------------------------------------------


def test_repeated_blocks_share_their_choices():
    groups = case("vit").choices.groups
    kinds = [[g.kind for g in groups if g.name.startswith(f"blocks.{i}.")] for i in range(3)]
    assert kinds[0] == kinds[1] == kinds[2] and len(kinds[0]) == 7
    first, second = (next(g for g in groups if g.name == f"blocks.{i}.mlp.fc1.linear") for i in (0, 1))
    assert [replace(c, labels=()) for c in first.strategies] == [replace(c, labels=()) for c in second.strategies]
    assert second.strategies[1].labels == (("blocks.1.mlp.fc1.linear", "n"), ("blocks.1.mlp.act.gelu", "d2"))


def test_choices_of_a_block_whose_tokens_do_not_divide():
    choices = case("vit").choices
    assert {
        ending: names(choices, ending) for ending in ("norm1.layer_norm", "qkv.linear", "attention", "proj.linear")
    } == {
        "norm1.layer_norm": ["replicated", "d0"],
        "qkv.linear": ["replicated", "nx3", "k → tp:0", "k → tp:2x3", "k → replicated"],
        "attention": ["replicated", "d0", "d1"],
        "proj.linear": ["replicated", "n", "k → tp:0", "k → replicated"],
    }


def test_tokens_are_split_where_they_divide():
    choices = case("vit without class token").choices
    assert "d1" in names(choices, "norm1.layer_norm")
    assert "d1" in names(choices, "fc1.linear")
    assert "k → tp:1" in names(choices, "fc2.linear")


def test_heads_that_do_not_divide_are_split_raggedly():
    split = case("vit of 3 heads")
    assert names(split.choices, "attention") == ["replicated", "d0", "d1@1"]
    assert "nx3@16" in names(split.choices, "qkv.linear")
    assert sharding_limits(split.graph, split.facts, 2) == ()
    assert sharding_limits(split.graph, split.facts, 4) == ("attention has 3 heads", "head has 10 output features")


def test_fewer_heads_than_ranks_leave_attention_whole():
    split = case("vit of 3 heads", 4)
    assert names(split.choices, "attention") == ["replicated", "d0"]
    found = split.descended()
    assert {str(found.storage[f"blocks.1.mlp.{n}.weight"]) for n in ("fc1", "fc2")} == {"tp:0", "tp:1"}
    assert found.seconds < split.whole.groups[0].seconds + 0.6 * sum(g.seconds for g in split.whole.groups)


def test_products_with_weights_leave_samples_to_data_parallelism():
    vit = case("vit")
    linears = [g for g in vit.choices.groups if g.name.endswith(("linear", "conv2d"))]
    assert len(linears) == 14
    assert not any("d0" in c.name.split(" → ")[0] or c.name == "b" for g in linears for c in g.strategies)
    three = case_of(vit.graph, 2, batch=3).choices
    assert names(three, "norm1.layer_norm") == ["replicated", "d1@1"]
    assert "k → tp:1@1" in names(three, "fc2.linear")
    assert "k → tp:0" not in names(three, "fc2.linear")


def test_a_saved_view_is_split_by_its_own_layout():
    """CoaT saves tokens, in ragged parts of whole rows, whose storage is an image."""
    ones = (1, 1, 1, 1)
    with torch.device("meta"):
        model = CoaT(patch_size=4, embed_dims=(64, 64, 64, 64), serial_depths=ones, parallel_depth=0, mlp_ratios=ones)
        traced = trace(model, (torch.empty(2, 3, 224, 224),), {}, mode="train", name="coat")
    assert any("@14" in c.name for g in case_of(traced, 4, batch=2).choices.groups for c in g.strategies)


def test_a_relative_position_table_is_split_by_heads():
    group = next(
        g for g in case("swin").choices.groups if "layers.0.blocks.0.attn.relative_position_bias_table" in g.weights
    )
    place = group.weights.index("layers.0.blocks.0.attn.relative_position_bias_table")
    assert "tp:1" in {str(c.weight_layouts[place]) for c in group.strategies}


def test_the_halves_of_a_gated_layer_are_split_alike():
    gated = graph(
        (value("x", 4, 6),),
        (parameter("up", 16, 6), parameter("bias", 16), parameter("down", 6, 8)),
        op("aten.linear.default", ("%x", "%up", "%bias"), value("both", 4, 16)),
        op("aten.chunk.default", ("%both", 2, -1), value("part:0", 4, 8), value("part:1", 4, 8)),
        op("aten.silu.default", ("%part:0",), value("gate", 4, 8)),
        op("aten.mul.Tensor", ("%gate", "%part:1"), value("hidden", 4, 8)),
        op("aten.linear.default", ("%hidden", "%down"), value("out", 4, 6)),
    )
    choices = case_of(gated, 2).choices
    assert [g.name for g in choices.groups] == ["both", "part", "gate", "hidden", "out", "loss"]
    assert names(choices, "both")[:2] == ["replicated", "nx2"]
    first, second = choices.groups[0].strategies[1], choices.groups[1].strategies[1]
    assert [str(layout) for layout in (*first.output_layouts, *first.weight_layouts)] == ["tp:1x2", "tp:0x2", "tp:0x2"]
    assert [str(layout) for layout in (*second.input_layouts, *second.output_layouts)] == ["tp:1x2", "tp:1", "tp:1"]


def test_groups_that_share_a_weight_can_agree_on_it():
    tokens = torch.randint(0, 32, (BATCH, 6))
    tied = case_of(trace(Tied(), (tokens,), {}, mode="train"), 2).choices
    readers = [(g, g.weights.index("embed.weight")) for g in tied.groups if "embed.weight" in g.weights]
    assert [g.name for g, _ in readers] == ["embed.embedding", "head.linear"]
    for group, place in readers:
        kept = {c.weight_layouts[place] for c in group.strategies if c.name != "replicated"}
        assert Layout() in kept and len(kept) > 1
    assert [g.strategies[0].weight_bytes > 0 for g, _ in readers] == [True, False]


def test_without_gradients_nothing_is_spent_backwards():
    model = tiny_vit(depth=1).requires_grad_(False)
    with torch.device("meta"):
        frozen = case_of(trace(model, (torch.empty(BATCH, 3, 32, 32),), {}, mode="train"), 2).choices
    assert {c.backward_seconds for g in frozen.groups for c in g.strategies} == {0.0}
    assert {c.backward_seconds for c in frozen.resharding.values()} == {0.0}


@pytest.mark.parametrize("name", MODELS)
def test_every_conversion_that_can_occur_is_priced(name: str):
    choices = case(name).choices
    made = {v: {c.output_layouts[i] for c in g.strategies} for g in choices.groups for i, v in enumerate(g.makes)}
    read = [(v, c.input_layouts[i]) for g in choices.groups for i, v in enumerate(g.reads) for c in g.strategies]
    pairs = {(v, m, layout) for v, layout in read for m in made[v] if m != layout}
    assert pairs == set(choices.resharding)
    assert all(
        len(g.strategies) <= 8 and not any(x.partial for c in g.strategies for x in c.output_layouts)
        for g in choices.groups
    )


# -- what they cost --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_replicating_everything_costs_what_the_whole_graph_costs(name: str):
    whole, choices = case(name).whole, case(name).choices
    assert [g.name for g in choices.groups] == [g.name for g in whole.groups]
    for group, priced in zip(choices.groups, whole.groups, strict=True):
        assert group.strategies[0].forward_seconds == pytest.approx(priced.forward_seconds)
        assert group.strategies[0].backward_seconds == pytest.approx(priced.backward_seconds)
    saved = sum(g.saved_bytes for g in whole.groups) + sum(h.num_bytes for h in whole.saved)
    assert sum(g.strategies[0].saved_bytes for g in choices.groups) == pytest.approx(saved, rel=1e-6)
    assert sum(g.strategies[0].weight_bytes for g in choices.groups) == sum(h.num_bytes for h in whole.weights)
    optimizer = sum(h.optimizer_seconds for h in whole.weights)
    assert sum(g.strategies[0].step_seconds for g in choices.groups) == pytest.approx(optimizer)


def check_cost(found: Sharded, seconds_error: float, saved_error: float) -> None:
    """Compare an assignment with the price of the graph that is made of it."""
    cost = found.cost
    assert found.seconds == pytest.approx(sum(g.seconds for g in cost.groups), rel=seconds_error)
    saved = sum(g.saved_bytes for g in cost.groups) + sum(h.num_bytes for h in cost.saved)
    assert found.saved_bytes == pytest.approx(saved, rel=saved_error)
    assert sum(c.weight_bytes for c in found.choices) == sum(h.num_bytes for h in cost.weights)
    optimizer = sum(h.optimizer_seconds for h in cost.weights)
    assert sum(c.step_seconds for c in found.choices) == pytest.approx(optimizer)


def test_a_copy_counts_where_a_reader_keeps_it_besides_the_one_it_is_made_of():
    """What a relu saves is saved again by a linear layer that reads it in another layout, but not by a sum."""
    read = case_of(
        graph(
            (value("x", 4, 8),),
            (parameter("a", 8, 8), parameter("b", 8, 8)),
            op("aten.linear.default", ("%x", "%a"), value("one", 4, 8)),
            op("aten.relu.default", ("%one",), value("kept", 4, 8)),
            op("aten.linear.default", ("%kept", "%b"), value("two", 4, 8)),
            op("aten.relu.default", ("%two",), value("summand", 4, 8)),
            op("aten.add.Tensor", ("%summand", "%kept"), value("out", 4, 8)),
        ),
        2,
    ).choices
    kept = {(made, taken): c.saved_bytes for (name, made, taken), c in read.resharding.items() if name == "kept"}
    linear = next(g for g in read.groups if g.name == "two")
    taken = {choice.input_layouts[linear.reads.index("kept")] for choice in linear.strategies}
    whole = 4 * 8 * 4
    for (made, layout), num_bytes in kept.items():
        copied = layout in taken and (made.splits or layout.splits)
        assert num_bytes == (0 if not copied else whole // 2 if layout.splits else whole)
    assert {0, whole // 2, whole} == set(kept.values())
    assert not any(c.saved_bytes for (name, *_), c in read.resharding.items() if name == "summand")


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_a_good_assignment_costs_what_its_graph_costs(name: str, ranks: int):
    found = case(name, ranks).descended()
    check_cost(found, seconds_error=0.001, saved_error=0.03)
    assert found.seconds < sum(g.seconds for g in case(name, ranks).whole.groups)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_collectives_beside_linear_layers_cost_what_they_cost_in_its_graph(name: str, ranks: int):
    """Layouts change more often then."""
    found = case_of(graph_of(name), ranks, hardware=HIDING).descended()
    check_cost(found, seconds_error=0.001, saved_error=0.03)
    assert found.seconds < Sharded(case(name, ranks), found.picks).seconds


@pytest.mark.parametrize("name", MODELS)
def test_any_assignment_costs_about_what_its_graph_costs(name: str):
    """Where a sum is wanted in several layouts, the graph reduces it once for each and the choices gather it again."""
    draw = random.Random(0)
    sizes = {g.kind: len(g.strategies) for g in case(name).choices.groups}
    for _ in range(2):
        found = case(name).sharded({kind: draw.randrange(size) for kind, size in sizes.items()})
        check_cost(found, seconds_error=0.06, saved_error=0.14)


def test_state_that_is_updated_in_place_stays_where_it_is():
    found = case_of(trace(Updating(), (torch.randn(BATCH, 8),), {}, mode="train"), 2)
    for k in range(3):
        picked = Sharded(found, [min(k, len(g.strategies) - 1) for g in found.choices.groups])
        assert {str(picked.storage[n]) for n in ("calls", "mean")} == {"replicated"}
        check_cost(picked, seconds_error=0.01, saved_error=0.07)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_replicas_change_what_weights_cost(zero: ZeroStage):
    """Split ones, replicated ones, and those that are read on parts of the tokens."""
    vit, sharing = case("vit without class token"), Sharing(2, Replicas(2, zero))
    split = vit.named({"norm1.layer_norm": "d1", "fc1.linear": "d1", "fc2.linear": "d1", "head.linear": "n"})
    shared = with_replicas(vit.choices, vit.graph, sharing, FAST)
    chosen = [g.strategies[k] for g, k in zip(shared.groups, split.picks, strict=True)]
    priced = price(
        split.local, graph_stats(split.local), FAST, BATCH, replace(sharing, storage=split.storage), vit.whole.groups
    ).weights
    assert sum(c.step_seconds for c in chosen) == pytest.approx(
        sum(w.optimizer_seconds + w.reduce_seconds + w.gather_seconds for w in priced), rel=2e-2
    )  # by buckets of `BUCKET_BYTES`
    assert sum(c.weight_bytes for c in chosen) == sum(w.num_bytes for w in priced)
    assert [c.seconds for c in chosen] == [c.seconds for c in split.choices]


# -- Megatron's split ------------------------------------------------------------------------------------------------

MEGATRON = {
    "qkv.linear": "nx3", "attention": "d1", "proj.linear": "k → replicated", "fc1.linear": "n",
    "fc2.linear": "k → replicated",
}  # fmt: skip


def described(of: Case, split: Sharded) -> tuple[BlockSharding, ...]:
    """Words for one assignment of choices."""
    pricing = Pricing(of.graph, of.facts, FAST, BATCH, mesh_axes((of.ranks,)))
    return block_shardings([AxisSharding(pricing, split.local, split.storage)])


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_column_and_row_split_is_among_the_choices(ranks: int):
    vit = case("vit", ranks)
    split = vit.named(MEGATRON)
    check_cost(split, seconds_error=1e-6, saved_error=1e-6)
    (block,) = described(vit, split)
    assert (block.name, block.count) == ("blocks.*", 3)
    assert block.rows == {
        "attn.qkv": f"rows by head / {ranks}",
        "attn": f"heads / {ranks}",
        "attn.proj": f"columns / {ranks} → all-reduce",
        "mlp.fc1": f"rows / {ranks}",
        "mlp.fc2": f"columns / {ranks} → all-reduce",
    }
    num_bytes = BATCH * 17 * 64 * 4
    seconds = FAST.collective_seconds("all-reduce", num_bytes, ranks)
    assert [(c.op, c.direction) for c in block.collectives] == [
        ("blocks.*.attn.qkv.linear", "backward"),
        ("blocks.*.attn.proj.linear", "forward"),
        ("blocks.*.mlp.fc1.linear", "backward"),
        ("blocks.*.mlp.fc2.linear", "forward"),
    ]
    assert {(c.kind, c.num_bytes, c.seconds) for c in block.collectives} == {("all-reduce", num_bytes, seconds)}
    assert vit.descended().seconds <= split.seconds


def test_blocks_say_what_is_split():
    vit = case("vit without class token")
    split = vit.named({"norm1.layer_norm": "d1", "fc1.linear": "d1", "fc2.linear": "d1", "norm2.layer_norm": "d0"})
    found = described(vit, split)
    assert [(b.name, b.count) for b in found if b.rows] == [("blocks.0", 1), ("blocks.1", 1)]
    for block in found[:2]:
        assert block.rows == {
            "norm1": "tokens / 2", "norm2": "samples / 2", "mlp.fc1": "tokens / 2", "mlp.fc2": "tokens / 2",
        }  # fmt: skip
    sent = [Counter(c.kind for c in block.collectives) for block in found[:2]]
    assert sent == [{"all-gather": 4, "all-to-all": 2}] * 2


@pytest.mark.parametrize(
    ("model", "op_name", "block", "place"),
    [
        ("vit", "blocks.1.attn.qkv.linear", "blocks.1", "attn.qkv"),
        ("vit", "norm.layer_norm", "norm", "norm"),
        ("vit", "add", "pos_embed", "pos_embed"),
        ("convnext", "stem.0.conv2d", "stem.0", "conv2d"),
        ("convnext", "stages.1.downsample.1.conv2d", "stages.1", "downsample.1"),
        ("resnet18", "layer2.0.downsample.0.conv2d", "layer2.0", "downsample.0"),
    ],
)
def test_where_an_operation_is(model: str, op_name: str, block: str, place: str):
    traced = case(model).graph
    found = {o.name: (b, name_in_block(b, o, traced)) for o, b in zip(traced.ops, blocks_of(traced))}
    assert found[op_name] == (block, place)


@pytest.mark.parametrize("name", ["vit", "convnext"])
def test_batch_sizes_that_share_what_they_have_in_common_have_the_same_strategies(name: str) -> None:
    traced = graph_of(name)
    facts, known = graph_stats(traced), GroupedModels()
    for batch in (8, 1, 4, 3, 8):
        alone = strategy_graph(Pricing(traced, facts, FAST, batch, mesh_axes((2,))))
        assert strategy_graph(Pricing(traced, facts, FAST, batch, mesh_axes((2,))), known=known) == alone
    assert {batch_divides for batch_divides, _ in known} == {False, True}
