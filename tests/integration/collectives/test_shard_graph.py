"""Local graphs on two and four real ranks against the whole model: outputs, input gradient, weight gradients, state."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from support.ranks import axis_key, index, main, run_on_ranks, summed, tensor_axis
from timm.models.vision_transformer import Attention, Block
from torch import nn

from autopar.codegen.emit import graph_module, source
from autopar.codegen.split import split
from autopar.errors import PlanError
from autopar.ir.graph import Graph, Mode, Ref
from autopar.ir.layout import REPLICATED, look_up, split_layout
from autopar.ir.program import Program
from autopar.runtime.comm.axis_communicators import GroupCommunicator
from autopar.sharding.propagate import ops_without_rule
from autopar.sharding.shard_graph import shard_graph, storage
from autopar.sharding.tensors import local_part
from autopar.trace.trace import trace, weight_tensors

CPU = torch.device("cpu")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(torch.relu(self.fc1(x)))


class Twice(nn.Module):
    """One weight used in two ways, a frozen one, and one that is handed out."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(16, 8))
        self.frozen = nn.Parameter(torch.randn(16), requires_grad=False)
        self.scale = nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.relu(nn.functional.linear(x, self.table)) * self.frozen * self.scale
        return nn.functional.linear(hidden, self.table.t()), self.scale


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.depthwise, self.norm2 = nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8)
        self.conv2, self.group = nn.Conv2d(8, 8, 1), nn.GroupNorm(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm1(self.conv1(x)))
        x = torch.relu(self.norm2(self.depthwise(x)))
        return self.group(self.conv2(x)).mean((2, 3))


class InPlace(nn.Module):
    """Updates memory that other operations read under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.average = nn.Buffer(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        y[:, 0] += 1
        z = torch.relu(y)
        self.average.mul_(0.9).add_(z.detach().mean((0, 1)), alpha=0.1)
        return z * self.average


class UpdatesThroughViews(nn.Module):
    """Clamps a weight without gradient, and updates statistics that are parts of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)
        self.statistics = nn.Buffer(torch.ones(2, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.fc1.weight.clamp_(-0.1, 0.1)
        mean, variance = self.statistics
        y = nn.functional.batch_norm(self.fc1(x).flatten(0, 1), mean, variance, training=self.training)
        return self.fc2(torch.relu(y))


def blocks(heads: int) -> nn.Module:
    return nn.Sequential(*(Block(24, heads, qkv_bias=True) for _ in range(2)))


BLOCKS, THREE_HEADS, SIX_HEADS = partial(blocks, 4), partial(blocks, 3), partial(blocks, 6)
COLUMN_ROW = {"fc1.linear": "n", "fc2.linear": "k"}
MEGATRON = {"*.attn.qkv.linear": "nx3", "*.attn.proj.linear": "k", "*.mlp.fc1.linear": "n", "*.mlp.fc2.linear": "k"}
RESIDUAL = ("*.norm1.layer_norm", "*.norm2.layer_norm", "*.add", "*.add_1")
TOKENS = MEGATRON | dict.fromkeys(RESIDUAL, "d1")
SAMPLES = MEGATRON | dict.fromkeys(RESIDUAL, "d0")
RAGGED_TOKENS = MEGATRON | dict.fromkeys(RESIDUAL, "d1@1")
RAGGED_HEADS = MEGATRON | {"*.attn.qkv.linear": "nx3@4", "*.attn.proj.linear": "k@4"}
CHANNELS = {"conv1.conv2d": "o", "depthwise.conv2d": "g", "conv2.conv2d": "i"}


@dataclass(frozen=True)
class Example:
    """A model, the shape of its input, and labels of its operations by name or pattern.

    ``first`` starts a second stage; ``stored`` are layouts of some weights as text.
    """

    model: Any
    shape: tuple[int, ...]
    labels: Mapping[str, str]
    first: str = ""
    stored: Mapping[str, str] = field(default_factory=dict)


HIDDEN, TOKEN = (4, 8, 8), (4, 8, 24)
EXAMPLES = {
    "replicated": Example(Mlp, HIDDEN, {}),
    "column, row": Example(Mlp, HIDDEN, COLUMN_ROW, stored={
        "fc1.weight": "tp:0", "fc1.bias": "tp:0", "fc2.weight": "tp:1", "fc2.bias": "replicated"}),
    "row, column": Example(Mlp, HIDDEN, {"fc1.linear": "k", "fc2.linear": "n"}, stored={"fc1.bias": "replicated"}),
    "samples of everything": Example(Mlp, HIDDEN, {"fc1.linear": "d0"}, stored={
        "fc1.weight": "tp:gradient", "fc2.bias": "tp:gradient"}),
    "samples, replicated by label": Example(Mlp, HIDDEN, {"fc1.linear": "d0", "relu": ""}),
    "another dim in between": Example(Mlp, HIDDEN, {"fc1.linear": "n", "relu": "d1", "fc2.linear": "k"}),
    "two stages": Example(Mlp, HIDDEN, COLUMN_ROW, "add"),
    "two stages, cut between split values": Example(Mlp, HIDDEN, COLUMN_ROW, "relu"),
    "labels that do not fit": Example(Mlp, HIDDEN, {"fc1.linear": "nx3", "fc2.linear": "z", "relu": "-", "add": "d9"}),
    "weight used in two ways": Example(Twice, HIDDEN, {"linear": "n", "linear_1": "n"}, stored={
        "table": "replicated", "frozen": "tp:0", "scale": "replicated"}),
    "weight used in one way": Example(Twice, HIDDEN, {"linear": "n", "t": "d0", "linear_1": "k"}, stored={
        "table": "tp:0"}),
    "weights on samples": Example(Twice, HIDDEN, {"linear": "d0"}, stored={
        "frozen": "replicated", "table": "replicated", "scale": "replicated"}),
    "Megatron": Example(BLOCKS, TOKEN, MEGATRON, stored={
        "0.attn.qkv.weight": "tp:0x3", "0.attn.proj.weight": "tp:1", "0.attn.proj.bias": "replicated",
        "0.norm1.weight": "replicated"}),
    "Megatron, two stages": Example(BLOCKS, TOKEN, MEGATRON, "1.norm1.layer_norm"),
    "Megatron, cut inside a block": Example(BLOCKS, TOKEN, MEGATRON, "0.attn.scaled_dot_product_attention"),
    "tokens between": Example(BLOCKS, TOKEN, TOKENS, stored={"0.norm1.weight": "tp:gradient"}),
    "tokens between, two stages": Example(BLOCKS, TOKEN, TOKENS, "1.attn.qkv.linear"),
    "samples between": Example(BLOCKS, TOKEN, SAMPLES, stored={"1.norm2.bias": "tp:gradient"}),
    "qkv split across heads": Example(BLOCKS, TOKEN, MEGATRON | {"*.attn.qkv.linear": "n"}),
    "heads that do not divide": Example(THREE_HEADS, TOKEN, MEGATRON),
    "tokens that do not divide": Example(BLOCKS, (4, 7, 24), TOKENS),
    "ragged tokens": Example(BLOCKS, (4, 7, 24), RAGGED_TOKENS, stored={"0.norm1.weight": "tp:gradient"}),
    "ragged tokens, two stages": Example(BLOCKS, (4, 7, 24), RAGGED_TOKENS, "1.attn.qkv.linear"),
    "ragged tokens everywhere": Example(
        BLOCKS, (4, 7, 24), {"*.linear": "d1@1", "*.scaled_dot_product_attention": "q@1", "*.add": "d1@1"}),
    "ragged tokens and samples": Example(BLOCKS, (5, 7, 24), RAGGED_TOKENS | {"*.norm1.layer_norm": "d0@1"}),
    "ragged queries": Example(BLOCKS, (4, 7, 24), {"*.scaled_dot_product_attention": "q@1"}),
    "ragged heads": Example(SIX_HEADS, TOKEN, RAGGED_HEADS, stored={
        "0.attn.qkv.weight": "tp:0x3@4", "0.attn.proj.weight": "tp:1@4", "1.attn.qkv.bias": "tp:0x3@4"}),
    "ragged heads and tokens": Example(SIX_HEADS, (4, 7, 24), RAGGED_TOKENS | RAGGED_HEADS),
    "ragged features": Example(Mlp, HIDDEN, {"fc1.linear": "n@3", "fc2.linear": "k@3"}),
    "ragged channels": Example(Convolutions, (4, 3, 6, 6), {
        "conv1.conv2d": "o@1", "depthwise.conv2d": "g@1", "conv2.conv2d": "i@1"}),
    "channels": Example(Convolutions, (4, 3, 6, 6), CHANNELS, stored={
        "norm1.running_mean": "tp:0", "norm2.running_var": "tp:0", "norm1.num_batches_tracked": "replicated",
        "depthwise.weight": "tp:0"}),
    "statistics of samples": Example(Convolutions, (4, 3, 6, 6), {"conv1.conv2d": "n", "norm1.batch_norm": "n"}),
    "in place": Example(InPlace, HIDDEN, {"fc.linear": "n", "relu": "d0", "mul": "d1"}),
    "in place through views": Example(UpdatesThroughViews, HIDDEN, COLUMN_ROW | {"batch_norm": "c"}, stored={
        "fc1.weight": "replicated", "fc2.weight": "tp:1", "statistics": "replicated"}),
}  # fmt: skip


@cache
def traced(make: Any, shape: tuple[int, ...], mode: Mode = "train") -> tuple[nn.Module, Graph]:
    """A model and its graph, with a gradient for its input."""
    torch.manual_seed(1)
    model = make().double()
    graph = trace(model, (torch.randn(shape, dtype=torch.float64),), mode=mode)
    return model, replace(graph, inputs=tuple(replace(v, requires_grad=True) for v in graph.inputs))


def labels_of(example: Example, graph: Graph) -> dict[str, str]:
    found = {op.name: look_up(example.labels, op.name) for op in graph.ops}
    return {name: label for name, label in found.items() if label is not None}


def stages(example: Example, graph: Graph) -> dict[str, int]:
    names = [op.name for op in graph.ops]
    start = names.index(example.first) if example.first else len(names)
    return {name: int(i >= start) for i, name in enumerate(names)}


def run(graph: Graph, programs: tuple[Program, ...], held: Mapping[str, torch.Tensor], x: torch.Tensor, tp: int) -> Any:
    """The outputs of programs run one after the other; every value must look as the graph says."""
    values = {graph.inputs[0].name: x}
    for program in programs:
        everything = tuple(Ref(value.name) for op in program.ops for value in op.outputs)
        everything += tuple(Ref(name) for name in program.results if name in held)
        program = replace(program, sends=(), outputs=everything)
        module = graph_module(program, held, CPU, {"tp": axis_key(tp)})
        values |= dict(zip(program.results, module(*(values[name] for name in program.arguments)), strict=True))
    for name, tensor in values.items():
        if name not in graph.values:
            continue
        value = graph.values[name]
        assert tuple(tensor.shape) == value.shape and str(tensor.dtype) == f"torch.{value.dtype}", name
        assert graph.mode == "eval" or tensor.requires_grad == value.requires_grad, f"{name} requires grad"
    return [values[leaf.name] for leaf in graph.outputs]


def close(found: torch.Tensor | None, expected: torch.Tensor | None, what: str) -> None:
    if found is None or expected is None:
        assert found is None and expected is None, f"{what}: {found}, not {expected}"
    else:
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-10), f"{what}: {found}, not {expected}"


def hold(
    whole: Mapping[str, torch.Tensor], graph: Graph, stored: Mapping[str, Any], axis: GroupCommunicator
) -> dict[str, Any]:
    """This rank's part of each weight, as leaves."""
    tp = {"tp": axis.ranks}
    parts = {name: local_part(tensor, stored[name], tp, index(axis)).detach().clone() for name, tensor in whole.items()}
    return {name: t.requires_grad_(graph.weight[name].requires_grad) for name, t in parts.items()}


def equals_the_whole(example: Example, tp: int) -> None:
    axis, sizes = tensor_axis(tp), {"tp": tp}
    model, graph = traced(example.model, example.shape)
    labels, stage_of = labels_of(example, graph), stages(example, graph)
    stored = storage(graph, labels, sizes)
    for name, text in example.stored.items():
        assert str(stored[name]) == text, f"{name} is stored {stored[name]}, not {text}"
    local = shard_graph(graph, labels, stored, sizes, stage_of, axis.rank)
    model = copy.deepcopy(model)
    whole = weight_tensors(model, graph)
    held = hold(whole, graph, stored, axis)
    x = torch.randn(example.shape, dtype=torch.float64)
    own, reference = x.clone().requires_grad_(), x.clone().requires_grad_()
    outputs = run(local, split(local, stage_of, 2), held, own, tp)
    gradients_agree(outputs, model.train(), reference, held, stored, axis)
    close(own.grad, reference.grad, "input gradient")
    for name, buffer in model.named_buffers():
        close(held[name], local_part(buffer, stored[name], sizes, index(axis)), name)
    evaluates(example, model, labels, stored, tp)


def gradients_agree(
    outputs: Sequence[torch.Tensor], model: nn.Module, x: torch.Tensor, held: Mapping[str, Any],
    stored: Mapping[str, Any], axis: GroupCommunicator,
) -> None:  # fmt: skip
    """Compare outputs and gradients of the weights with those of the whole model."""
    mode, sizes = "training" if model.training else "evaluation", {"tp": axis.ranks}
    expected = model(x)
    expected = list(expected) if isinstance(expected, tuple) else [expected]
    for i, (found, one) in enumerate(zip(outputs, expected, strict=True)):
        close(found, one, f"output {i} in {mode}")
    gradients = [torch.randn_like(e) for e in expected]
    torch.autograd.backward(outputs, gradients)
    torch.autograd.backward(expected, gradients)
    for name, parameter in model.named_parameters():
        gradient = held[name].grad
        if gradient is not None and stored[name].partial_gradient:
            gradient = summed(gradient, axis)
        one = parameter.grad if parameter.grad is None else local_part(parameter.grad, stored[name], sizes, index(axis))
        close(gradient, one, f"gradient of {name} in {mode}")


def evaluates(
    example: Example, model: nn.Module, labels: Mapping[str, str], stored: Mapping[str, Any], tp: int
) -> None:
    """Run the evaluation graph on the weights as training keeps them; a model may be trained in that mode too."""
    _, graph = traced(example.model, example.shape, "eval")
    stage_of, axis = stages(example, graph), tensor_axis(tp)
    local = shard_graph(graph, labels, stored, {"tp": tp}, stage_of, axis.rank)
    held = hold(weight_tensors(model, graph), graph, stored, axis)
    x = torch.randn(example.shape, dtype=torch.float64)
    model.zero_grad()
    gradients_agree(run(local, split(local, stage_of, 2), held, x, tp), model.eval(), x, held, stored, axis)


def compiles(example: Example, tp: int) -> None:
    """A compiled local block gives the numbers of the one that is run as it is."""
    axis = tensor_axis(tp)
    model, graph = traced(example.model, example.shape)
    labels, stage_of = labels_of(example, graph), stages(example, graph)
    stored = storage(graph, labels, {"tp": tp})
    local = shard_graph(graph, labels, stored, {"tp": tp}, stage_of, tensor_axis(tp).rank)
    (program,) = split(local, stage_of, 1)
    found = []
    for compiled in (False, True):
        held = hold(weight_tensors(model, graph), graph, stored, axis)
        module: Any = graph_module(program, held, CPU, {"tp": axis_key(tp)})
        if compiled:
            module = torch.compile(module, fullgraph=True, backend="aot_eager")
        torch.manual_seed(0)
        x = torch.randn(example.shape, dtype=torch.float64, requires_grad=True)
        (y,) = module(x)
        y.square().mean().backward()
        found.append([y, x.grad, *(w.grad for w in held.values())])
    for eager, other in zip(*found, strict=True):
        close(eager, other, "compiled")


CASES = {
    f"{name} on {tp}": partial(equals_the_whole, example, tp) for tp in (2, 4) for name, example in EXAMPLES.items()
} | {
    "compiled on 2": partial(compiles, Example(BLOCKS, TOKEN, TOKENS), 2),
    "compiled, ragged on 2": partial(compiles, EXAMPLES["ragged heads and tokens"], 2),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    return run_on_ranks(__file__, tmp_path_factory.mktemp("apply"))


@pytest.mark.parametrize("case", CASES)
def test_ranks_together_equal_the_whole_model(found: Mapping[str, str], case: str) -> None:
    assert found[case] == ""


# -- what a local graph looks like ---------------------------------------------------------------------------------


ATTENTION = """\
# stage 0, train, microbatch of 4: 13 operations, 1,260 parameters in 6 tensors
# input   x: float64[4, 8, 24]
def forward(self, x):
    norm_weight = self.norm.weight
    norm_bias = self.norm.bias
    attn_qkv_weight = self.attn.qkv.weight
    attn_qkv_bias = self.attn.qkv.bias
    attn_proj_weight = self.attn.proj.weight
    attn_proj_bias = self.attn.proj.bias
    norm_layer_norm = torch.ops.aten.layer_norm.default(x, [24], norm_weight, norm_bias, 1e-05, False)
    attn_qkv_linear = torch.ops.autopar.linear_with_async_grad_allreduce.default(norm_layer_norm, \
attn_qkv_weight, attn_qkv_bias, 'tp')
    attn_reshape = torch.ops.aten.reshape.default(attn_qkv_linear, [4, 8, 3, 2, 6])
    attn_permute = torch.ops.aten.permute.default(attn_reshape, [2, 0, 3, 1, 4])
    attn_unbind = torch.ops.aten.unbind.int(attn_permute)
    attn_unbind_0 = attn_unbind[0]
    attn_unbind_1 = attn_unbind[1]
    attn_unbind_2 = attn_unbind[2]
    attn_scaled_dot_product_attention = torch.ops.aten.scaled_dot_product_attention.default(attn_unbind_0, \
attn_unbind_1, attn_unbind_2)
    attn_transpose = torch.ops.aten.transpose.int(attn_scaled_dot_product_attention, 1, 2)
    attn_reshape_1 = torch.ops.aten.reshape.default(attn_transpose, [4, 8, 12])
    attn_proj_bias_first_rank = torch.ops.autopar.first_rank.default(attn_proj_bias, 'tp')
    attn_proj_linear = torch.ops.aten.linear.default(attn_reshape_1, attn_proj_weight, attn_proj_bias_first_rank)
    attn_proj_linear_all_reduce = torch.ops.autopar.all_reduce.default(attn_proj_linear, 'tp')
    add = torch.ops.aten.add.Tensor(x, attn_proj_linear_all_reduce)
    return (add,)"""


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(24), Attention(24, 4, qkv_bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attn(self.norm(x))


def sharded(example: Example, tp: int = 2, mode: Mode = "train") -> tuple[Graph, tuple[Program, ...]]:
    """The local graph and its stages."""
    _, graph = traced(example.model, example.shape, mode)
    labels, stage_of = labels_of(example, graph), stages(example, graph)
    local = shard_graph(graph, labels, storage(graph, labels, {"tp": tp}), {"tp": tp}, stage_of)
    return local, split(local, stage_of, 2 if example.first else 1)


def inserted(graph: Graph) -> list[str]:
    """A row for each operation that sharding put in."""
    return [f"{op.name} of {op.args[0]!r}, at {op.home}" for op in graph.ops if op.home]


def test_a_local_program_reads_like_megatrons() -> None:
    _, (program,) = sharded(Example(Attending, TOKEN, {"attn.qkv.linear": "nx3", "attn.proj.linear": "k"}))
    text = re.sub(r";  [\w = ]+ = None$", "", source(program), flags=re.MULTILINE)
    assert text == ATTENTION


def test_the_key_of_an_axis_is_written_into_the_program() -> None:
    example = Example(Mlp, HIDDEN, COLUMN_ROW)
    _, (program,) = sharded(example)
    weights = {w.name: torch.empty(w.shape) for w in program.weights}
    code = graph_module(program, weights, CPU, {"tp": "second model.tp"}).code
    assert "all_reduce.default(fc2_linear, 'second model.tp')" in code and "'tp'" not in code


def test_sums_are_converted_where_they_are_made_and_the_rest_where_it_is_read() -> None:
    local, programs = sharded(Example(Mlp, HIDDEN, {"fc2.linear": "k", "add": "d1"}, first="add"))
    assert inserted(local) == [
        "relu.shard of %relu, at fc2.linear",
        "fc2.bias.first_rank of %fc2.bias, at fc2.linear",
        "fc2.linear.reduce_scatter of %fc2.linear, at fc2.linear",
        "x.shard of %x, at add",
        "add.all_gather of %add, at add",
    ]
    assert [(e.value.name, e.value.shape) for e in programs[0].sends] == [("fc2.linear.reduce_scatter", (4, 4, 8))]


class Fan(nn.Module):
    """A value with several readers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(x * self.scale)
        return self.a(x) + self.b(x) * self.c(x) + torch.sigmoid(x)


def test_a_value_is_converted_once_for_all_readers_of_a_stage() -> None:
    labels = {"a.linear": "n", "b.linear": "n", "c.linear": "n", "sigmoid": "d1"}
    assert inserted(sharded(Example(Fan, HIDDEN, labels))[0]) == [
        "relu.sum_gradient of %relu, at a.linear",
        "relu.shard of %relu, at sigmoid",
        "sigmoid.all_to_all of %sigmoid, at add_1",
        "add_1.all_gather of %add_1, at add_1",
    ]
    two = inserted(sharded(Example(Fan, HIDDEN, labels, first="c.linear"))[0])
    assert [row for row in two if "relu" in row] == [
        "relu.sum_gradient of %relu, at a.linear",
        "relu.sum_gradient_1 of %relu, at c.linear",
        "relu.shard of %relu, at sigmoid",
    ]
    trained_in_eval_mode = sharded(Example(Fan, HIDDEN, labels), mode="eval")[0]
    assert inserted(trained_in_eval_mode) == inserted(sharded(Example(Fan, HIDDEN, labels))[0])


def test_each_rank_holds_its_part_of_the_split_weights() -> None:
    local, _ = sharded(Example(BLOCKS, TOKEN, MEGATRON), tp=4)
    _, graph = traced(BLOCKS, TOKEN)
    shapes = {w.name: w.shape for w in local.weights if w.shape != graph.weight[w.name].shape and w.name[0] == "0"}
    assert shapes == {
        "0.attn.qkv.weight": (18, 24), "0.attn.qkv.bias": (18,), "0.attn.proj.weight": (24, 6),
        "0.mlp.fc1.weight": (24, 24), "0.mlp.fc1.bias": (24,), "0.mlp.fc2.weight": (24, 24),
    }  # fmt: skip
    assert local.colocated == graph.colocated and local.fingerprint != graph.fingerprint


def test_an_operation_updates_a_weight_only_where_it_is_stored() -> None:
    _, graph = traced(Convolutions, (4, 3, 6, 6))
    stage_of, whole = dict.fromkeys((op.name for op in graph.ops), 0), dict.fromkeys(graph.weight, REPLICATED)
    labels = {"conv1.conv2d": "o", "norm1.batch_norm": "c"}
    local = shard_graph(graph, labels, whole, {"tp": 2}, stage_of)
    assert local.producer["norm1.batch_norm"].outputs[0].shape == (4, 8, 6, 6)
    split_norm = {name: split_layout(0) for name in ("norm1.running_mean", "norm1.running_var")}
    local = shard_graph(graph, {}, whole | split_norm, {"tp": 2}, stage_of)
    assert local.producer["norm1.batch_norm"].outputs[0].shape == (4, 4, 6, 6)
    with pytest.raises(
        PlanError, match=r"shardings\.norm1\.running_mean: norm1\.batch_norm updates it in place .*'tp:0'"
    ):
        shard_graph(graph, {}, whole | {"norm1.running_mean": split_layout(0)}, {"tp": 2}, stage_of)


def test_operations_without_a_rule_are_named_and_replicated() -> None:
    graph = traced(Mlp, HIDDEN)[1]
    strange = replace(graph, ops=tuple(
        replace(op, target="mine.relu.default") if op.name == "relu" else op for op in graph.ops
    ))  # fmt: skip
    found = shard_graph(strange, {"fc1.linear": "n", "relu": "d0"}, dict.fromkeys(graph.weight, REPLICATED),
                        {"tp": 2}, dict.fromkeys((op.name for op in graph.ops), 0))  # fmt: skip
    assert ops_without_rule(strange) == ("mine.relu.default",)
    assert "fc1.linear.all_gather of %fc1.linear, at relu" in inserted(found)


if __name__ == "__main__":
    main(CASES)
