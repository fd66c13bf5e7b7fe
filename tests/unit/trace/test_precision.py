"""Mixed precision: the rewritten graph, and what it computes, against torch.autocast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.cases import ADAMW, CASES, DTYPES
from support.handmade import in_threads, plan_by_hand
from support.models import Autocast, ConvNet, Tied, UNet, loss_in_bf16, tiny_vit
from support.priced import price
from support.reference import Reference, unwrapped_state
from support.traced import Body
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import autopar
from autopar.api.precision import check_device
from autopar.api.program_cache import ProgramCache
from autopar.cost.groups.weight_memory import UNSHARDED, Sharing, bucket_share_seconds, weight_cost
from autopar.cost.hardware.load import load_hardware
from autopar.cost.ops.op_stats import graph_stats
from autopar.errors import UsageError
from autopar.ir.cost_graph import BUCKET_BYTES
from autopar.ir.graph import Graph
from autopar.ir.plan_parts import Precision, Replicas
from autopar.ir.tensor_axes import TensorAxis
from autopar.runtime.launch.devices import Machine
from autopar.trace.call import as_call
from autopar.trace.lower import lower_model
from autopar.trace.passes import autocast
from autopar.trace.passes.autocast_policy import POLICY


def graph_of(model: nn.Module, x: torch.Tensor, precision: Precision = "bf16") -> Graph:
    return lower_model(model, as_call(model, x), "train", type(model).__name__, precision)


def lines(graph: Graph) -> list[str]:
    return [line.strip() for line in str(graph).splitlines()[1:]]


# -- the policy -----------------------------------------------------------------------------------------------------

CASTS_INSIDE = {"gru", "linalg_matmul", "lstm", "rnn_relu", "rnn_tanh", "cross_entropy_loss", "nll_loss_nd"}
# Made into others before the trace, or never in it.
NEVER_TRACED = {"_cudnn_rnn"}


def registered(key: str) -> set[str]:
    names = torch._C._dispatch_get_all_op_names()
    own = (n for n in names if n.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(n, key))
    return {name.removeprefix("aten::").partition(".")[0] for name in own}


def test_the_policy_is_that_of_torch() -> None:
    on_cuda, on_cpu = registered("AutocastCUDA"), registered("AutocastCPU")
    assert on_cuda - NEVER_TRACED <= POLICY.keys()
    newer = {"rms_norm", "linalg_matrix_sqrth"}  # than torch 2.11
    beyond = POLICY.keys() - on_cuda - CASTS_INSIDE - newer
    assert {POLICY[name] for name in beyond} == {"float32"}
    assert beyond - on_cpu <= {"complex"}


ON_ONE = {
    "linear": lambda x, w: F.linear(x, w),
    "matmul of both": lambda x, w: (x @ w) @ w.float(),
    "softmax": lambda x, w: (x @ w).softmax(-1),
    "softmax to its own dtype": lambda x, w: (x @ w).softmax(-1, dtype=torch.float64),
    "sum": lambda x, w: (x @ w).sum(0),
    "mean": lambda x, w: (x @ w).mean(0),
    "cumsum": lambda x, w: (x @ w).cumsum(0),
    "norm": lambda x, w: F.normalize(x @ w),
    "gelu": lambda x, w: F.gelu(x @ w),
    "exp": lambda x, w: (x @ w).exp(),
    "power": lambda x, w: (x @ w) ** 2,
    "layer norm": lambda x, w: F.layer_norm(x @ w, (8,), w[0]),
    "group norm": lambda x, w: F.group_norm(x @ w, 2),
    "add": lambda x, w: x @ w + w,
    "add low": lambda x, w: x @ w + x @ w,
    "cat": lambda x, w: torch.cat([x @ w, w]),
    "stack": lambda x, w: torch.stack([x @ w, x @ w]),
    "addcmul": lambda x, w: torch.addcmul(x @ w, w, w),
    "addcmul low": lambda x, w: torch.addcmul(x @ w, x @ w, x @ w),
    "dot": lambda x, w: torch.dot((x @ w)[0], w[0]),
    "einsum": lambda x, w: torch.einsum("ij,kj->ik", x, w.double().float()),
    "attention": lambda x, w: F.scaled_dot_product_attention(x[None, None], w[None, None], w[None, None]),
    "loss": lambda x, w: F.cross_entropy(x @ w, x @ w),
    "mse": lambda x, w: F.mse_loss(x @ w, w),
    "where": lambda x, w: torch.where(w > 0, x @ w, w),
    "interpolate": lambda x, w: F.interpolate((x @ w)[None, None], scale_factor=2, mode="bilinear"),
    "variance": lambda x, w: (x @ w).var(0),
    "prelu": lambda x, w: F.prelu(x @ w, w[0]),
    "convert": lambda x, w: (x @ w).float() * 2,
    "double": lambda x, w: F.linear(x.double(), w.double()),
    "integers": lambda x, w: (x @ w).argmax(-1).sum(),
}  # fmt: skip


class Function(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.weight)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ON_ONE)
def test_results_have_the_dtype_that_autocast_gives_on_a_gpu(name: str, precision: Precision) -> None:
    graph = graph_of(Function(ON_ONE[name]), torch.randn(8, 8), precision)
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    # torch.autocast refuses to start without a GPU; the switches below it need none on tensors without data.
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", DTYPES[precision])
    try:
        with FakeTensorMode():
            expected = ON_ONE[name](torch.empty(8, 8, device="cuda"), torch.empty(8, 8, device="cuda"))
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
    assert graph.values[graph.outputs[0].name].dtype == str(expected.dtype).removeprefix("torch.")


# -- the graph ------------------------------------------------------------------------------------------------------


def test_a_block_in_bf16() -> None:
    graph = graph_of(tiny_vit(1), torch.randn(2, 3, 32, 32))
    assert [line.partition(" = ")[0] for line in lines(graph)] == [
        "x.bf16: bfloat16[2, 3, 32, 32]",
        "patch_embed.proj.conv2d: bfloat16[2, 48, 4, 4]",
        "patch_embed.flatten: bfloat16[2, 48, 16]",
        "patch_embed.transpose: bfloat16[2, 16, 48]",
        "expand: float32[2, 1, 48]",
        "cat: float32[2, 17, 48]",
        "add: float32[2, 17, 48]",
        "blocks.0.norm1.layer_norm: float32[2, 17, 48]",
        "blocks.0.norm1.layer_norm.bf16: bfloat16[2, 17, 48]",
        "blocks.0.attn.qkv.linear: bfloat16[2, 17, 144]",
        "blocks.0.attn.reshape: bfloat16[2, 17, 3, 3, 16]",
        "blocks.0.attn.permute: bfloat16[3, 2, 3, 17, 16]",
        "blocks.0.attn.unbind: bfloat16[2, 3, 17, 16], bfloat16[2, 3, 17, 16], bfloat16[2, 3, 17, 16]",
        "blocks.0.attn.scaled_dot_product_attention: bfloat16[2, 3, 17, 16]",
        "blocks.0.attn.transpose: bfloat16[2, 17, 3, 16]",
        "blocks.0.attn.reshape_1: bfloat16[2, 17, 48]",
        "blocks.0.attn.proj.linear: bfloat16[2, 17, 48]",
        "blocks.0.add: float32[2, 17, 48]",
        "blocks.0.norm2.layer_norm: float32[2, 17, 48]",
        "blocks.0.norm2.layer_norm.bf16: bfloat16[2, 17, 48]",
        "blocks.0.mlp.fc1.linear: bfloat16[2, 17, 192]",
        "blocks.0.mlp.act.gelu: bfloat16[2, 17, 192]",
        "blocks.0.mlp.fc2.linear: bfloat16[2, 17, 48]",
        "blocks.0.add_1: float32[2, 17, 48]",
        "norm.layer_norm: float32[2, 17, 48]",
        "select: float32[2, 48]",
        "select.bf16: bfloat16[2, 48]",
        "head.linear: bfloat16[2, 10]",
    ]
    low = {w.name for w in graph.weights if w.master}
    assert {w.name for w in graph.weights} - low == {
        "cls_token", "pos_embed", "blocks.0.norm1.weight", "blocks.0.norm1.bias", "blocks.0.norm2.weight",
        "blocks.0.norm2.bias", "norm.weight", "norm.bias",
    }  # fmt: skip
    assert {(w.dtype, w.stored_dtype) for w in graph.weights if w.name in low} == {("bfloat16", "float32")}


def test_a_convolutional_network_in_bf16() -> None:
    graph = graph_of(ConvNet(), torch.randn(2, 3, 8, 8))
    assert [line.partition(" = ")[0] for line in lines(graph)] == [
        "x.bf16: bfloat16[2, 3, 8, 8]",
        "stem.conv2d: bfloat16[2, 8, 6, 6]",
        "norm.add: ",
        "norm.batch_norm: bfloat16[2, 8, 6, 6]",
        "relu: bfloat16[2, 8, 6, 6]",
        "conv.conv2d: bfloat16[2, 8, 6, 6]",
        "norm2.add: ",
        "norm2.batch_norm: bfloat16[2, 8, 6, 6]",
        "add: bfloat16[2, 8, 6, 6]",
        "mean: bfloat16[2, 8]",
        "head.linear: bfloat16[2, 4]",
    ]
    assert [w.name for w in graph.weights if w.master] == ["stem.weight", "conv.weight", "head.weight", "head.bias"]


def test_one_cast_serves_all_readers_and_a_weight_with_mixed_readers_stays() -> None:
    graph = graph_of(Tied(depth=1), torch.randint(0, 32, (2, 6)))
    assert [op.name for op in graph.ops if op.target == "aten.to.dtype"] == [
        "layers.0.0.layer_norm.bf16", "mean.bf16", "embed.weight.bf16",
    ]  # fmt: skip
    assert not graph.weight["embed.weight"].master

    def twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w) + F.linear(x, w.t())  # views of a weight are the weight

    graph = graph_of(Function(twice), torch.randn(8, 8))
    assert [op.name for op in graph.ops] == ["x.bf16", "linear", "t", "linear_1", "add"]
    assert graph.weight["weight"].master == "float32"


def test_what_is_updated_in_place_is_cast_anew() -> None:
    def updated(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x * 2
        first = F.linear(y, w)
        y[:, :3] += 1.0
        return first + F.linear(y, w)

    model, x = Function(updated), torch.randn(8, 8)
    graph = graph_of(model, x)
    casts = [op.name for op in graph.ops if op.target == "aten.to.dtype"]
    assert casts == ["mul.bf16", "mul.bf16_1"]
    assert any("mul.bf16" in names for names in graph.colocated)
    with torch.autocast("cpu", torch.bfloat16), autopar.parallelize(model, 1, x, precision="bf16") as pm:
        assert torch.equal(pm(x), model(x))


def test_the_readers_of_weights_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    found = autocast.low_precision_weights
    monkeypatch.setattr(autocast, "low_precision_weights", lambda *args: calls.append(args) or found(*args))
    graph = graph_of(ConvNet(), torch.randn(2, 3, 8, 8))
    assert len(calls) == 1
    assert len(graph.weights) > 1


def test_regions_of_the_model_keep_their_own_precision() -> None:
    def regions(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x = F.linear(x, w)
        with torch.autocast("cpu", enabled=False):
            x = F.linear(x.float(), w)
        with torch.autocast("cpu", dtype=torch.float16):
            x = F.linear(x, w)
        return F.linear(x, w)

    graph = graph_of(Function(regions), torch.randn(8, 8))
    dtypes = [op.outputs[0].dtype for op in graph.ops if op.target == "aten.linear.default"]
    assert dtypes == ["bfloat16", "float32", "float16", "bfloat16"]
    assert not graph.weight["weight"].master


def test_fp32_changes_nothing() -> None:
    model, x = tiny_vit(1), torch.randn(2, 3, 32, 32)
    assert graph_of(model, x, "fp32") == lower_model(model, as_call(model, x), "train", "VisionTransformer")


# -- one device -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vit", "convolutions", "tied"])
def test_equals_autocast_bit_by_bit(name: str) -> None:
    torch.manual_seed(0)
    make, inputs, classes = CASES[name]
    model, x, y = make(), inputs(), torch.randint(0, classes, (8,))
    reference = Reference(Autocast(model, torch.bfloat16), loss_in_bf16, ADAMW)
    with autopar.parallelize(model, 1, x, optimizer=ADAMW, microbatches=3, precision="bf16") as pm:
        for _ in range(3):
            loss = reference.forward_backward(x, y, 3)
            result = pm.forward_backward(x, y, return_outputs=True)
            assert result.outputs.dtype == torch.bfloat16 and result.loss == pytest.approx(loss, abs=1e-7)
            expected = {name.removeprefix("model."): g for name, g in reference.gradients().items()}
            found = pm.gradients()
            assert found.keys() == expected.keys() and all(torch.equal(found[n], g) for n, g in expected.items())
            pm.optimizer_step()
            reference.step()
        state = pm.state_dict()
        for name, tensor in unwrapped_state(reference).items():
            assert torch.equal(state[name], tensor) and state[name].dtype == tensor.dtype, name
        reference.model.eval()
        (expected_outputs,) = reference.forward(x, 3)
        assert torch.equal(pm.eval()(x), expected_outputs)


@pytest.mark.parametrize(("name", "firsts", "mesh"), [
    ("vit", ["blocks.1.norm1.layer_norm"], (2, 1)),
    ("convolutions", ["conv.conv2d"], (2, 1)),
    ("convolutions", ["conv.conv2d"], (2, 2)),
    ("tied", ["layers.1.0.layer_norm", "mean"], (3, 1)),
    ("in place", ["sub.{}"], (2, 1)),
])  # fmt: skip
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_pipeline_equals_one_device(
    name: str, firsts: list[str], mesh: tuple[int, int], precision: Precision
) -> None:
    torch.manual_seed(0)
    make, inputs, classes = CASES[name]
    model, x, y = make(), inputs(), torch.randint(0, classes, (8,))
    firsts = [first.format(precision) for first in firsts]
    split = plan_by_hand(model, x, 2, firsts, dp=mesh[1], zero=1 if mesh[1] > 1 else 0, precision=precision)
    whole = plan_by_hand(model, x, 2, [], dp=mesh[1], precision=precision)
    models = [in_threads(model, plan, x, F.cross_entropy, optimizer=ADAMW) for plan in (split, whole)]
    for _ in range(2):
        results = [pm.forward_backward(x, y, return_outputs=True) for pm in models]
        assert results[0].loss == results[1].loss
        assert torch.equal(results[0].outputs, results[1].outputs)
        ours, theirs = (pm.gradients() for pm in models)
        assert ours.keys() == theirs.keys()
        for key, gradient in theirs.items():
            # Parts of a tied weight's gradient are summed in another order.
            torch.testing.assert_close(ours[key], gradient, rtol=0, atol=1e-6 if name == "tied" else 0)
        for pm in models:
            pm.optimizer_step()


def test_weights_are_cast_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    casts: list[int] = []
    foreach_copy = torch._foreach_copy_

    def counted(copies: list[torch.Tensor], masters: list[torch.Tensor]) -> None:
        if (copies[0].dtype, masters[0].dtype) == (torch.bfloat16, torch.float32):  # no gradients
            casts.append(len(copies))
        foreach_copy(copies, masters)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    model, x, y = tiny_vit(2), torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))
    with autopar.parallelize(model, 1, x, optimizer=ADAMW, microbatches=4, precision="bf16") as pm:
        programs = [p for v in pm._programs.specializations.values() for p in v.programs]
        masters = {w.name for program in programs for w in program.weights if w.master}
        assert len(masters) == 20
        for program in programs:
            read = {name for op in program.ops if op.target == "aten.to.dtype" for name in op.reads}
            assert not read & {w.name for w in program.weights}
        pm.forward_backward(x, y)
        pm.forward_backward(x, y)
        assert casts == [20]
        pm.optimizer_step()
        pm.train_step(x, y)
        pm(x)
        assert casts == [20, 20, 20]
        before = pm(x)
        pm.load_state_dict({name: t + 0.1 for name, t in pm.state_dict().items()})
        assert not torch.equal(pm(x), before)
        assert casts == [20, 20, 20, 20]


class PartlyUsed(nn.Module):
    """A frozen layer, a trained one, and one that the loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.frozen(x)
        return self.used(x), self.unused(x)


def test_frozen_and_unused_weights() -> None:
    torch.manual_seed(0)
    model, x, y = PartlyUsed(), torch.randn(8, 8), torch.randint(0, 4, (8,))
    plan = plan_by_hand(model, x, 2, ["used.linear"], dp=2, precision="bf16")
    pm = in_threads(model, plan, x, lambda output, target: F.cross_entropy(output[0], target), optimizer=ADAMW)
    pm.forward_backward(x, y)
    assert pm.gradients().keys() == {"used.weight", "used.bias"}
    pm.optimizer_step()
    changed = {name for name, t in pm.state_dict().items() if not torch.equal(t, model.state_dict()[name])}
    assert changed == {"used.weight", "used.bias"}


def test_a_plan_brings_its_precision() -> None:
    model, x = tiny_vit(1), torch.randn(4, 3, 32, 32)
    plan = autopar.plan(model, 1, x, precision="bf16")
    assert plan.precision == "bf16" and "bf16" in str(plan)
    with autopar.parallelize(model, 1, x, plan=plan) as pm:
        assert pm(x).dtype == torch.bfloat16 and pm.autocast == "bfloat16"
    with pytest.raises(UsageError, match="Both plan= and precision= are given"):
        autopar.parallelize(model, 1, x, plan=plan, precision="fp32")


def test_random_numbers_follow_the_precision_of_what_they_are_for() -> None:
    model = tiny_vit(1, drop_rate=0.1, attn_drop_rate=0.1, drop_path_rate=0.1).train()
    graph = graph_of(model, torch.randn(2, 3, 32, 32))
    blocks = [
        v for op in graph.ops for v in op.outputs if op.name.startswith("blocks.0.mlp") and "uniform" not in v.name
    ]
    assert {v.dtype for v in blocks if v.dtype != "bool"} == {"bfloat16"}
    assert graph.values["blocks.0.attn.scaled_dot_product_attention.softmax"].dtype == "float32"
    assert graph.values["blocks.0.attn.scaled_dot_product_attention"].dtype == "bfloat16"


def test_the_same_masks_on_every_mesh() -> None:
    torch.manual_seed(0)
    model, x, y = tiny_vit(2, drop_rate=0.2, drop_path_rate=0.2), torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))
    plans = [plan_by_hand(model, x, 2, firsts, precision="bf16") for firsts in ([], ["blocks.1.norm1.layer_norm"])]
    models = [in_threads(model, plan, x, F.cross_entropy, optimizer=ADAMW) for plan in plans]
    for _ in range(3):
        assert len({pm.train_step(x, y).loss for pm in models}) == 1


# -- errors and prices ------------------------------------------------------------------------------------------------


def test_low_parameters_that_a_forward_updates_are_refused() -> None:
    def forward(self: Body, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.lin.weight.clamp_(-0.1, 0.1)
        return self.lin(x)

    model, x = Body(forward), torch.randn(4, 4)
    with pytest.raises(UsageError, match=r"of Body updates lin\.weight at .* Use precision=\"bf16\""):
        autopar.plan(model, 1, x, precision="bf16-params")
    assert autopar.plan(model, 1, x, precision="bf16").precision == "bf16"


def test_unknown_and_impossible_precisions() -> None:
    x = torch.randn(4, 8)
    with pytest.raises(UsageError, match=r"precision='half' is unknown\. It is fp32, bf16, fp16 or bf16-params"):
        autopar.plan(nn.Linear(8, 4), 1, x, precision="half")
    for wanted in ("fp32", "fp16"):
        with pytest.raises(UsageError, match=rf"precision='{wanted}', but the parameters of Linear are bf16"):
            autopar.plan(nn.Linear(8, 4).bfloat16(), 1, x.bfloat16(), precision=wanted)


def test_bf16_on_an_old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    gpu = Machine("nccl", "cuda", 1, None)
    with pytest.raises(UsageError, match=r"compute capability 8\.0 .* Tesla T4 has 7\.5\. Use precision=\"fp16\""):
        check_device("bf16", gpu)
    check_device("fp16", gpu)
    check_device("bf16", replace(gpu, device_type="cpu"))


def test_prices_of_mixed_precision() -> None:
    model, x = tiny_vit(2, embed_dim=192), torch.randn(8, 3, 32, 32)
    graphs = [graph_of(model, x, precision) for precision in ("fp32", "bf16")]
    hardware = load_hardware("h200-nvlink")
    full, mixed = (weight_cost(g.weight["blocks.0.mlp.fc1.weight"], (0,), UNSHARDED, hardware) for g in graphs)
    assert full.num_bytes == 192 * 768 * (4 + 4 + 8)  # value, gradient, two moments
    assert mixed.num_bytes == full.num_bytes + 192 * 768 * 2
    assert mixed.reduce_seconds == full.reduce_seconds  # the master's gradient travels
    shared = [
        weight_cost(g.weight["blocks.0.mlp.fc1.weight"], (0,), Sharing(replicas=Replicas(4, 1)), hardware)
        for g in graphs
    ]
    numel = 192 * 768
    axis, kinds = TensorAxis(ranks=4), ("reduce-scatter", "all-gather")
    scatter, gather = (bucket_share_seconds(kind, 4 * numel, hardware, axis) for kind in kinds)  # type: ignore[arg-type]
    assert [h.reduce_seconds for h in shared] == pytest.approx([scatter, scatter])
    latency = hardware.collective_seconds("all-gather", 0, 4) * 4 * numel / BUCKET_BYTES
    assert [h.gather_seconds for h in shared] == pytest.approx([gather, (gather + latency) / 2])  # copies travel
    assert [h.optimizer_seconds * 4 for h in shared] == pytest.approx([h.optimizer_seconds for h in (full, mixed)])
    costs = [price(graph, graph_stats(graph), hardware, 256) for graph in graphs]
    seconds = [sum(g.forward_seconds + g.backward_seconds for g in cost.groups) for cost in costs]
    saved = [sum(g.saved_bytes for g in cost.groups) for cost in costs]
    assert seconds[1] < 0.8 * seconds[0] and saved[1] < 0.8 * saved[0]


def test_programs_of_both_modes_read_the_copies() -> None:
    model, x = UNet(), torch.randn(4, 3, 16, 16)
    plan = plan_by_hand(model, x, 2, ["middle.conv2d"], precision="bf16")
    programs = ProgramCache(model, plan, as_call(model, x))
    for variant in programs.specializations.values():
        sent = {edge.value.dtype for program in variant.programs for edge in program.sends}
        assert sent == {"bfloat16"}
        assert all(w.master for program in variant.programs for w in program.weights)
