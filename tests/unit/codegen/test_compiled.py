"""Stages compiled region by region: where regions begin, what they share, and that they compute the same."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Iterator
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, nop
from support.effort import full, only
from support.handmade import with_levels
from support.models import Tied, UNet, resnet18, tiny_vit
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import aot_eager

import autopar
from autopar.codegen import compile as compiled
from autopar.codegen.activation_checkpoint import cut_segments
from autopar.codegen.compile import (
    LAYOUT_CHOICE,
    NORM_READS,
    SPLIT_SIZE,
    STORED_ABOVE,
    cuda_options,
    functorch_config,
    gradient_of,
    norm_options,
    norm_rows,
)
from autopar.codegen.emit import graph_module
from autopar.codegen.split import split
from autopar.ir.graph import Graph, Value
from autopar.ops.regions import MIN_REGION_OPS, region_starts
from autopar.trace.trace import trace, weight_tensors

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)


@pytest.fixture(autouse=True)
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Compile for autograd but not to machine code, and note what is compiled."""
    calls: list[Any] = []

    def quick(module: Any, arguments: Any, options: Any) -> Any:
        calls.append(module)
        return aot_eager(module, arguments)

    monkeypatch.setattr(compiled, "inductor", quick)
    monkeypatch.setattr(compiled, "COMPILED_REGIONS", {})
    yield calls


def traced(model: nn.Module, x: torch.Tensor) -> Graph:
    return trace(model, (x,))


def test_regions_of_a_transformer_begin_after_the_first_product_of_a_block() -> None:
    graph = traced(tiny_vit(3), torch.randn(2, 3, 32, 32))
    firsts = [graph.ops[start].name for start in region_starts(graph.ops)]
    assert firsts == [
        graph.ops[0].name, "blocks.0.attn.reshape", "blocks.1.attn.reshape", "blocks.2.attn.reshape"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (tiny_vit, torch.randn(2, 3, 32, 32)), (resnet18, torch.randn(2, 3, 64, 64)), (UNet, torch.randn(2, 3, 8, 8)),
        (Tied, torch.zeros(2, 5, dtype=torch.int64)),
    ],
)  # fmt: skip
def test_regions_hold_every_operation_once(model: Any, x: torch.Tensor) -> None:
    graph = traced(model(), x)
    starts = region_starts(graph.ops)
    regions = cut_segments(
        graph.ops, pairwise((*starts, len(graph.ops))), {w.name for w in graph.weights}, [], "region"
    )
    assert [op.name for region in regions for op in region.ops] == [op.name for op in graph.ops]
    assert all(len(region.ops) >= MIN_REGION_OPS for region in regions[1:-1])
    made: set[str] = {value.name for value in graph.inputs}
    for region in regions:
        assert set(region.reads) <= made
        made |= set(region.makes)


def test_what_writes_into_a_value_is_not_divided() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(*(nn.Linear(4, 4) for _ in range(MIN_REGION_OPS))) for _ in range(3)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = torch.zeros_like(x)
            for i, layer in enumerate(self.layers):
                x = layer(x)
                kept[:, i] = x[:, i]
            return kept + x

    assert region_starts(traced(Writes(), torch.randn(2, 4)).ops) == (0,)


def test_equal_blocks_are_compiled_once(quick_compiler: list[Any]) -> None:
    for depth in (3, 4):  # the second model has nothing new
        model, x = tiny_vit(depth), torch.randn(2, 3, 32, 32)
        graph = traced(model, x)
        (program,) = split(graph, {op.name: 0 for op in graph.ops}, 1)
        module = graph_module(program, weight_tensors(model, graph), torch.device("cpu"), compiled=True)
        assert torch.allclose(module(x)[0], model(x), atol=1e-5)
        assert len(quick_compiler) == 3  # up to the first block's product, from there to the next, the rest


def test_new_regions_are_compiled_ahead_once(quick_compiler: list[Any]) -> None:
    model, x = tiny_vit(3), torch.randn(2, 3, 32, 32)
    graph = traced(model, x)
    (program,) = split(graph, {op.name: 0 for op in graph.ops}, 1)
    calls: list[Any] = []
    for _ in range(2):
        module = graph_module(
            program, weight_tensors(model, graph), torch.device("cpu"), compiled=True, ahead=calls.append
        )
        module(x)
    (sources,) = calls
    assert len(sources) == 3 and [s.build().code for s in sources] == [m.code for m in quick_compiler]
    for source in pickle.loads(pickle.dumps(sources)):
        tensors = [torch.empty_strided(a.shape, a.stride, dtype=a.dtype) for a in source.arguments]
        assert all(made.shape[0] == 2 for made in source.build()(*tensors))


class StochasticDepth(nn.Module):
    """Blocks that are dropped at rates which grow from block to block, as timm, torchvision and transformers do it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(*[nn.Linear(8, 8), nn.GELU()] * 4, Dropped(kind, rate)) for rate in (0.1, 0.2, 0.5)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Dropped(nn.Module):
    def __init__(self, kind: str, rate: float) -> None:
        super().__init__()
        self.kind, self.rate = kind, rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x.new_empty(len(x), *[1] * (x.ndim - 1))
        if self.kind == "floor":
            random = (1 - self.rate + torch.rand_like(mask)).floor_()
            return x.div(1 - self.rate) * random
        if self.kind == "rand":
            return x * (torch.rand_like(mask) >= self.rate)
        mask = mask.bernoulli_(1 - self.rate)
        return x * (mask.div_(1 - self.rate) if self.kind == "div" else mask * (1 / (1 - self.rate)))


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        ("div", "fp32"), ("div", "bf16"), ("mul", "bf16"), ("rand", "fp32"), ("floor", "fp32"),
        ("floor", "bf16-params"),
    ],
)  # fmt: skip
def test_blocks_that_drop_at_other_rates_are_compiled_once(
    kind: str, precision: Any, quick_compiler: list[Any]
) -> None:
    """Three equal blocks have two equal regions between their first products, and one at each end."""
    model, x, y = StochasticDepth(kind), torch.randn(64, 8), torch.randint(0, 8, (64,))
    runs: list[list[float]] = []
    for compiles in (False, True):
        with autopar.parallelize(
            model, 1, x, loss_fn=F.cross_entropy, optimizer=ADAMW, precision=precision, microbatches=2, compile=compiles
        ) as pm:
            runs.append([pm.train_step(x, y).loss for _ in range(3)])
    assert runs[0] == pytest.approx(runs[1], abs=1e-6 if precision == "fp32" else 1e-3)
    assert len(set(runs[0])) == 3
    assert len(quick_compiler) == 3


class Mixes(nn.Module):
    """A block whose first summand of the input's gradient is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(8), nn.Sequential(*[nn.Linear(6, 6), nn.GELU()] * 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2) + x


class Convolves(nn.Module):
    """A block whose first summand of the input's gradient is contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Sequential(*[nn.Conv2d(3, 3, 1), nn.GELU()] * 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x.contiguous()).contiguous(memory_format=torch.channels_last) + x


@pytest.mark.parametrize(
    ("block", "shape", "memory_format"),
    [(Mixes, (2, 6, 8), torch.contiguous_format), (Convolves, (2, 3, 4, 4), torch.channels_last)],
)
def test_a_region_returns_gradients_in_the_layout_of_its_inputs(
    block: type[nn.Module], shape: tuple[int, ...], memory_format: torch.memory_format
) -> None:
    x = torch.randn(shape).contiguous(memory_format=memory_format)
    model = nn.Sequential(block(), block())
    graph = traced(model, x)
    (program,) = split(graph, {op.name: 0 for op in graph.ops}, 1)
    module = graph_module(program, weight_tensors(model, graph), torch.device("cpu"), compiled=True)
    _, second = (part for part in module.modules() if isinstance(part, compiled.CompiledRegion))
    x = x.requires_grad_()
    (gradient,) = torch.autograd.grad(second(x), x, (torch.randn_like(x),))
    assert gradient.is_contiguous(memory_format=memory_format)
    assert torch.equal(gradient, gradient.contiguous(memory_format=memory_format))


def test_compiled_functions_of_old_shapes_are_dropped(
    quick_compiler: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "MAX_COMPILED_REGIONS", 2)
    model, modules = nn.Linear(4, 4), []
    batches = (1, 2, 1, 3, 1, 2)
    for batch in batches:
        graph = traced(model, torch.randn(batch, 4))
        (program,) = split(graph, {op.name: 0 for op in graph.ops}, 1)
        modules.append(graph_module(program, weight_tensors(model, graph), torch.device("cpu"), compiled=True))
    assert len(compiled.COMPILED_REGIONS) == 2
    assert all(module(torch.ones(b, 4))[0].shape == (b, 4) for module, b in zip(modules, batches, strict=True))
    assert len(quick_compiler) == 4  # 1 stays, being used most


def test_code_is_compiled_again_for_other_layouts_and_modes(quick_compiler: list[Any]) -> None:
    """As torch.compile's frontend would: code made without gradients has no backward, and strides are constants."""
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh()), torch.randn(2, 3, 6, 6)
    graph = traced(model, x)
    (program,) = split(graph, {op.name: 0 for op in graph.ops}, 1)
    module = graph_module(program, weight_tensors(model, graph), torch.device("cpu"), compiled=True)
    with torch.no_grad():
        module(x)
    for number, given in enumerate((x, x, x.to(memory_format=torch.channels_last), x.clone().requires_grad_()), 2):
        (made,) = module(given)
        assert torch.equal(made, model(given))
        found, expected = (torch.autograd.grad(y.sum(), list(model.parameters())) for y in (made, model(given)))
        assert all(map(torch.equal, found, expected))
        assert len(quick_compiler) == max(2, number - 1)
    with torch.inference_mode():
        assert torch.equal(module(x)[0], model(x))
    assert len(quick_compiler) == 4


def test_code_is_compiled_again_for_other_settings(quick_compiler: list[Any]) -> None:
    """Constants are of the default dtype, and kernels for CPUs have sums for as many threads as they are made for."""

    class Adds(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.cumsum(torch.linspace(0.1, 0.7, 16), 0)

    model, x, threads = Adds(), torch.randn(2, 16, dtype=torch.float64), torch.get_num_threads()
    graph = traced(model, x)
    (program,) = split(graph, {op.name: 0 for op in graph.ops}, 1)
    module = graph_module(program, {}, torch.device("cpu"), compiled=True)
    try:
        for number, (dtype, more) in enumerate([(torch.float32, 0), (torch.float64, 0), (torch.float32, 1)], 1):
            torch.set_default_dtype(dtype)
            torch.set_num_threads(threads + more)
            assert all(torch.equal(module(x)[0], model(x)) for _ in range(2))
            assert len(quick_compiler) == number
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)


def test_devices_share_no_code(quick_compiler: list[Any]) -> None:
    model, x = tiny_vit(2), torch.randn(2, 3, 32, 32)
    graph = traced(model, x)
    (program,) = split(graph, {op.name: 0 for op in graph.ops}, 1)
    for number, device in enumerate(("cpu", "meta"), 1):
        module = graph_module(program, weight_tensors(model.to(device), graph), torch.device(device), compiled=True)
        assert module(x.to(device))[0].device.type == device
        assert len(quick_compiler) == 3 * number


def test_equal_blocks_may_differ_in_what_is_frozen_later(quick_compiler: list[Any]) -> None:
    model, x = tiny_vit(3), torch.randn(2, 3, 32, 32)
    graph = traced(model, x)
    (program,) = split(graph, {op.name: 0 for op in graph.ops}, 1)
    module = graph_module(program, weight_tensors(model, graph), torch.device("cpu"), compiled=True)
    model.get_submodule("blocks.0").requires_grad_(False)
    module(x)[0].sum().backward()
    assert [name for name, p in model.named_parameters() if p.requires_grad == (p.grad is None)] == []
    assert len(quick_compiler) == 4


def test_a_forward_compiles_the_backward_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the stages of a pipeline would compile their backwards one after the other."""
    backwards: list[Any] = []

    def noted(module: Any, example: Any) -> Any:
        backwards.append(module)
        return make_boxed_func(module)

    backend = aot_autograd(fw_compiler=nop, bw_compiler=noted)
    monkeypatch.setattr(compiled, "inductor", lambda module, arguments, options: backend(module, arguments))
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    graph = traced(model, x)
    (program,) = split(graph, {op.name: 0 for op in graph.ops}, 1)
    module = graph_module(program, weight_tensors(model, graph), torch.device("cpu"), compiled=True)
    y = module(x)[0]
    assert len(backwards) == 1
    y.sum().backward()
    assert len(backwards) == 1 and model.bias.grad is not None and model.bias.grad.tolist() == [2.0] * 4


@pytest.mark.parametrize(
    ("rows", "split"),
    [(10, None), (6_304, None), (9_456, 32), (12_608, 32), (16_000, 32), (25_216, None), (50_176, None), (10**6, None)],
)
def test_norms_leave_no_number_of_partial_sums_that_is_slow_to_add(rows: int, split: int | None) -> None:
    assert norm_options(rows, 132) == ({} if split is None else {SPLIT_SIZE: split})


def test_the_largest_norm_counts_and_layouts_are_those_of_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    body = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 8), nn.LayerNorm(8), nn.Flatten(0, 1))
    graph = traced(body, torch.randn(2, 6_304, 4))
    assert norm_rows(graph.ops) == 12_608 and norm_rows(graph.ops[:1]) == 0
    assert cuda_options(graph.ops, torch.device("cuda")) == {LAYOUT_CHOICE: False, SPLIT_SIZE: 32}
    assert cuda_options(graph.ops[:1], torch.device("cuda")) == {LAYOUT_CHOICE: False}
    images = traced(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.SiLU()), torch.randn(2, 3, 4, 4))
    assert cuda_options(images.ops, torch.device("cuda")) == {LAYOUT_CHOICE: False, STORED_ABOVE: NORM_READS}


def small_resnet() -> nn.Module:
    """Two equal blocks, and one with a projection at each lower resolution."""
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [2, 1, 1, 1], num_classes=10)


@pytest.mark.parametrize(
    ("model", "x", "y", "loss_fn"),
    [
        (tiny_vit, (6, 3, 32, 32), (6,), F.cross_entropy),
        pytest.param(small_resnet, (6, 3, 64, 64), (6,), F.cross_entropy, marks=pytest.mark.full),
        (UNet, (6, 3, 8, 8), (6, 1, 8, 8), F.mse_loss), (Tied, (6, 5), (6,), F.cross_entropy),
    ],
)  # fmt: skip
def test_compiled_equals_eager(
    model: Any, x: tuple[int, ...], y: tuple[int, ...], loss_fn: Any, quick_compiler: list[Any]
) -> None:
    torch.manual_seed(0)
    built = model()
    inputs = torch.randint(0, 32, x) if len(x) == 2 else torch.randn(x)
    targets = torch.rand(y) if len(y) > 1 else torch.randint(0, 10, y)
    runs = []
    plan = autopar.plan(built, 1, inputs, microbatches=2, recompute="none")
    runs_of: list[tuple[bool, Any]] = [(False, "none"), (True, "none"), (True, "all")]
    if full() or model is tiny_vit:
        runs_of.append((True, half(plan)))
    for wanted, level in runs_of:
        quick_compiler.clear()
        options: dict[str, Any] = {"plan": with_levels(plan, [level]), "compile": wanted, "loss_fn": loss_fn}
        with autopar.parallelize(built, 1, inputs, optimizer=ADAMW, **options) as pm:
            losses = [pm.forward_backward(inputs, targets).loss]
            gradients = pm.gradients()
            pm.optimizer_step()
            losses.append(pm.train_step(inputs, targets).loss)
            runs.append((losses, gradients, pm.state_dict(), pm.eval()(inputs)))
        assert bool(quick_compiler) == wanted or level == half(plan)  # whose regions have been compiled
    (losses, gradients, state, output), *others = runs
    for other in others:
        assert other[0] == pytest.approx(losses, abs=1e-5)
        assert gradients.keys() == other[1].keys()
        for name, gradient in gradients.items():
            assert torch.allclose(other[1][name], gradient, atol=1e-5, rtol=1e-4), name
        for name, tensor in state.items():
            assert torch.allclose(other[2][name].float(), tensor.float(), atol=1e-5, rtol=1e-4), name
        assert torch.allclose(other[3], output, atol=1e-4)


def half(plan: autopar.Plan) -> int:
    """A level that recomputes half of a stage's segments."""
    count = plan.stages[0].num_segments
    assert count > 1
    return count // 2


class Heads(nn.Module):
    """One output for a loss and two beside it; the second head works on the first one's features."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16))
        self.features, self.head, self.other = nn.Linear(16, 16), nn.Linear(16, 10), nn.Linear(16, 4)
        self.hidden = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        h = self.trunk(x)
        beside, h = self.other(h), self.features(h)
        out, features = self.head(h), F.gelu(h)
        return out, features, self.hidden(beside.tanh())


@pytest.mark.parametrize(
    ("kept", "level", "precision"),
    only(
        [(0, "half", "fp32"), (1, "none", "bf16-params"), (1, "all", "fp32"), (2, "half", "bf16-params")],
        product((0, 1, 2), ("none", "half", "all"), ("fp32", "bf16-params")),
    ),
)
def test_what_the_loss_leaves_out_has_no_gradient(kept: int, level: Any, precision: Any) -> None:
    torch.manual_seed(0)
    model, x, y = Heads(), torch.randn(6, 8), torch.randn(6, 1)
    runs = []
    plan = autopar.plan(model, 1, x, microbatches=2, recompute="none", precision=precision)
    plan = with_levels(plan, [half(plan) if level == "half" else level])
    for wanted in (False, True):
        with autopar.parallelize(
            model, 1, x, loss_fn=lambda out, y: F.mse_loss(out[kept].mean(1, True).float(), y), plan=plan,
            optimizer=functools.partial(ADAMW, weight_decay=0.5), compile=wanted,
        ) as pm:  # fmt: skip
            pm.forward_backward(x, y)
            gradients = pm.gradients()
            pm.optimizer_step()
            pm.train_step(x, y)
            runs.append((gradients, pm.state_dict()))
    assert runs[1][0].keys() == runs[0][0].keys() < dict(model.named_parameters()).keys()
    for ours, theirs in zip(runs[1], runs[0], strict=True):
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-5 if precision == "fp32" else 5e-3, msg=name)


def test_operations_that_lead_to_other_outputs_are_not_compiled_together() -> None:
    graph = traced(Heads(), torch.randn(2, 8))
    (program,) = split(graph, {op.name: 0 for op in graph.ops}, 1)
    assert [graph.ops[k].name for k in program.output_boundaries] == [
        "other.linear",
        "features.linear",
        "head.linear",
        "gelu",
        "tanh",
    ]
    assert [program.ops[k] for k in region_starts(program.ops, program.output_boundaries)][1:] == [
        program.ops[k] for k in program.output_boundaries
    ]
    alone = traced(tiny_vit(2), torch.randn(2, 3, 32, 32))
    assert not split(alone, {op.name: 0 for op in alone.ops}, 1)[0].output_boundaries


@pytest.mark.parametrize(
    ("as_outputs", "strides"),
    [(True, [(12, 1, 3), (60, 1, 15, 3), (12, 4, 1)]), (False, [(12, 4, 1), (60, 1, 15, 3), (12, 4, 1)])],
)
def test_the_layout_of_a_gradient_is_that_which_its_region_is_compiled_for(
    as_outputs: bool, strides: list[tuple[int, ...]]
) -> None:
    values = [
        Value("permuted", (2, 3, 4), "float32", (12, 1, 3)),
        Value("channels last", (2, 3, 4, 5), "float32", (60, 1, 15, 3)),
        Value("contiguous", (2, 3, 4), "float32", (12, 4, 1)),
    ]
    with functorch_config.patch(guess_tangent_strides_as_outputs=as_outputs):
        assert [gradient_of(value).stride for value in values] == strides


class Masked(nn.Module):
    """Blocks with a constant that operations without tensor arguments make, and that one writes into."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            kept = torch.zeros(4, 8)
            kept[:, :4] += block(x)[:, 4:]
            x = x + kept
        return x


@pytest.mark.parametrize("recompute", ["none", "all"])
def test_what_other_processes_compile_is_what_the_rank_runs(recompute: Any) -> None:
    """A module that is built from a pickle has the same operations, names and checkpoints."""
    model, x, y = Masked(), torch.randn(4, 8), torch.randn(4, 8)
    expected = F.mse_loss(model(x), y).item()
    with autopar.parallelize(
        model, 1, x, loss_fn=F.mse_loss, optimizer=ADAMW, microbatches=1, recompute=recompute, compile=True
    ) as pm:
        assert pm.train_step(x, y).loss == pytest.approx(expected)
    sources = [code.source for code in compiled.COMPILED_REGIONS.values()]
    assert sources
    for source in sources:
        built, again = source.build(), pickle.loads(pickle.dumps(source)).build()
        assert [str(node) for node in built.graph.nodes] == [str(node) for node in again.graph.nodes]
        assert [node.target for node in built.graph.nodes] == [node.target for node in again.graph.nodes]
        assert any("checkpoint" in str(node.target) for node in again.graph.nodes) is (recompute == "all")
