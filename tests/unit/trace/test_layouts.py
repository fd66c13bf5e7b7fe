"""The layout of values between regions and in convolutions: one is copied, and others follow."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autopar.ir.graph import Graph, refs
from autopar.ir.plan_parts import Precision
from autopar.ops.regions import region_starts
from autopar.ops.registry import memory_of
from autopar.sharding.batch_join import ROWS, joins
from autopar.trace.call import as_call
from autopar.trace.lower import lower_model
from autopar.trace.passes.layouts import is_transposed


class Blocks(nn.Module):
    """Blocks on tokens that a convolution made; ``kind`` says what becomes of its result."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.stem = kind, nn.Conv2d(3, 16, 4, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(*[nn.Conv2d(16, 16, 1) if kind.startswith("images") else nn.Linear(16, 16), nn.GELU()] * 4)
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        if self.kind == "tokens":
            x = x.flatten(2).transpose(1, 2)
        elif self.kind == "strided":
            x = x.flatten(2).as_strided((len(x), 16, 16), (256, 1, 16))
        elif self.kind == "images last":
            x = x.contiguous(memory_format=torch.channels_last)
        for block in self.blocks:
            x = x + block(x)
        return x.sum(1) if self.kind == "tokens" else x


def lowered(model: nn.Module, channels_last: bool = False, x: torch.Tensor | None = None) -> Graph:
    x = torch.randn(2, 3, 16, 16) if x is None else x
    return lower_model(model, as_call(model, x), "train", "", channels_last=channels_last)


def handed_on(graph: Graph) -> list[str]:
    """Values that a later region reads."""
    starts, made, found = region_starts(graph.ops), dict[str, int](), list[str]()
    for position, op in enumerate(graph.ops):
        number = sum(start <= position for start in starts)
        found += [name for name in op.reads if made.get(name, number) < number]
        made |= {value.name: number for value in op.outputs}
    return found


def test_tokens_of_a_convolution_are_copied_once() -> None:
    graph = lowered(Blocks("tokens"))
    copies = [op.name for op in graph.ops if op.target == "aten.contiguous.default"]
    assert copies == ["transpose.layout"]
    names = handed_on(graph)
    assert len(names) >= 3 and all(graph.values[name].stride == (256, 16, 1) for name in names)


@pytest.mark.parametrize("kind", ["images", "images last", "strided"])
def test_other_layouts_stay(kind: str) -> None:
    graph = lowered(Blocks(kind))
    assert not any(op.name.endswith(".layout") and op.module for op in graph.ops)
    assert any(is_transposed(value) for value in graph.values.values()) == (kind == "strided")


class Images(nn.Module):
    """Convolutions, with tokens between them."""

    def __init__(self, dense: bool = False) -> None:
        super().__init__()
        self.dense = dense
        self.stem, self.bn = nn.Conv2d(3, 72, 3, 2, 1), nn.BatchNorm2d(72)
        self.tokens, self.conv, self.head = nn.Linear(72, 72), nn.Conv2d(72, 72, 3, padding=1), nn.Linear(72, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn(self.stem(x)).relu()
        tokens = self.tokens(x.view(len(x), 72, -1).transpose(1, 2))
        x = x + self.conv(tokens.transpose(1, 2).contiguous().view(x.shape))
        return x if self.dense else self.head(x.mean((2, 3)))


def layouts(graph: Graph) -> dict[str, bool]:
    """Whether images are in channels last, by name."""
    images = [value for value in graph.values.values() if len(value.shape) == 4 and value.shape[2] > 1]
    return {value.name: value.stride[1] == 1 for value in images}


def test_images_are_copied_to_channels_last_where_convolutions_read_others() -> None:
    before, graph = lowered(Images()), lowered(Images(), channels_last=True)
    added = {op.name: op.reads for op in graph.ops if op.name not in {op.name for op in before.ops}}
    assert added == {"x.layout": ("x",), "view_1.layout": ("view_1",)}
    assert not any(layouts(before).values())
    assert [name for name, last in layouts(graph).items() if not last] == ["x", "view_1"]
    assert {op.target for op in graph.ops if "view" in op.name} >= {"aten.reshape.default"}
    x = torch.randn(2, 3, 16, 16).contiguous(memory_format=torch.channels_last)
    assert "x.layout" not in {op.name for op in lowered(Images(), True, x).ops}


def test_results_keep_their_layout() -> None:
    before, graph = (lowered(Images(dense=True), last) for last in (False, True))
    (name,), (given,) = refs(graph.outputs), refs(before.outputs)
    assert (name, given) == ("add.layout", "add") and graph.values[name].stride == before.values[given].stride


def test_what_plans_rely_on_is_independent_of_layouts() -> None:
    """And of the batch, which decides on layouts where a dim has one element."""
    x = torch.randn(2, 3, 16, 16)
    given = (x, x.contiguous(memory_format=torch.channels_last), x[:1])
    plain, *graphs = lowered(Images(dense=True), x=x), *(lowered(Images(dense=True), True, x) for x in given)
    assert len({len(graph.ops) for graph in graphs}) > 1
    for graph in graphs:
        assert graph.fingerprint == plain.fingerprint
        assert [op.reads for op in graph.as_traced.ops] == [op.reads for op in plain.ops]
        assert graph.as_traced.outputs == plain.outputs
    found = joins(graphs[0], graphs[2])
    assert {name: found[name] for name in refs(graphs[0].outputs)} == {"add.layout": ROWS}


class Updated(Images):
    """Images, and what a view of a buffer shows before and after its update."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.transposed, self.memory = transposed, nn.Buffer(torch.randn(4, 3, 16, 16))
        self.blocks = nn.ModuleList(nn.Sequential(*[nn.Linear(16, 16), nn.GELU()] * 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        view = self.memory.transpose(2, 3)[:1] if self.transposed else self.memory[:1]
        for number, block in enumerate(self.blocks):
            x = block(x) + (view if self.transposed else self.stem(view).mean())
            if number == 1:
                self.memory.mul_(0.5)
        return super().forward(x)


@pytest.mark.parametrize("transposed", [False, True])
def test_memory_that_is_updated_is_not_copied(transposed: bool) -> None:
    graph = lowered(Updated(transposed), channels_last=not transposed)
    assert any(op.mutates for op in graph.ops)
    assert not any(op.is_layout_copy and "memory" in memory_of(graph, op.reads[0]) for op in graph.ops)


@pytest.mark.parametrize(
    "convolutions",
    [
        [nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3)],  # few channels
        [nn.Conv2d(3, 96, 3), nn.Conv2d(96, 96, 3, groups=3)],
        [nn.Conv2d(3, 96, 3), nn.Conv2d(96, 32, 3)],  # from many channels to few
        [nn.Conv2d(3, 96, 4, 4)],  # of patches
    ],
    ids=["small", "grouped", "narrowing", "patches"],
)
def test_convolutions_stay_that_torch_compile_leaves(convolutions: list[nn.Conv2d]) -> None:
    """As in decide_layout_opt of torch 2.11 to 2.15."""
    model = nn.Sequential(*convolutions)
    assert lowered(model, channels_last=True) == lowered(model)
    model = nn.Sequential(*convolutions[:1], nn.Conv2d(convolutions[0].out_channels, 96, 1))
    assert any(layouts(lowered(model, channels_last=True)).values())


def test_grouped_convolutions_that_are_padded_are_in_channels_last() -> None:
    """Groups are padded in 16 bits alone; others keep the graph contiguous."""
    model = nn.Sequential(nn.Conv2d(3, 96, 3), nn.Conv2d(96, 96, 3, groups=4))
    x = torch.randn(2, 3, 16, 16)
    expected: dict[Precision, bool] = {"fp32": False, "bf16": True}
    for precision, moved in expected.items():
        graph = lower_model(model, as_call(model, x), "train", "", precision, channels_last=True)
        assert any(layouts(graph).values()) == moved


def written(x: torch.Tensor) -> torch.Tensor:
    """Twice the images, without their first row, which a later reader of the same memory misses too."""
    y = 2 * x
    y.view(len(x), -1)[:, :16].zero_()
    return y


@pytest.mark.parametrize(
    "first",
    [
        lambda x: x.as_strided(x.shape, x.stride()),
        lambda x: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (8, 2)))).flatten(-2),
        written,
    ],
    ids=["as_strided", "view_as_complex", "written"],
)
def test_layouts_stay_where_memory_is_read_as_it_lies(first: Callable[[torch.Tensor], torch.Tensor]) -> None:
    class Fixed(Images):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(first(x))

    assert lowered(Fixed(), channels_last=True) == lowered(Fixed())
