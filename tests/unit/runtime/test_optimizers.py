"""Optimizers of any kind: what they need to see, their groups, clipping, and batches in pieces."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import timm.optim
import timm.utils
import torch
import torch.nn.functional as F
from support.cases import ADAMW, data
from support.handmade import even_firsts, in_threads, plan_by_hand, ranks_of
from support.models import Tied, tiny_vit
from support.parity import updated_alike
from support.reference import Reference, assert_all_close, assert_close
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import autopar
from autopar.api.options import Options
from autopar.ir.graph import Weight
from autopar.ir.layout import split_layout
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placement
from autopar.ir.plan_parts import ZeroStage
from autopar.runtime.comm.in_process import InProcessMailboxes, LocalTransport
from autopar.runtime.optim.build import use_fused_kernels
from autopar.runtime.optim.probe import mixes_parameters, needs_full_params, param_kind
from autopar.runtime.rank import Rank
from autopar.runtime.spec import Parameters, RankSpec, TrainingRecipe
from autopar.train import timm_optimizer

Make = Callable[[Any], torch.optim.Optimizer]
LAMB = functools.partial(timm.optim.Lamb, lr=1e-2, weight_decay=0.05)


# -- what an optimizer needs to see -----------------------------------------------------------------------------------


def by_name(name: str, **options: Any) -> Make:
    return lambda groups: timm.optim.create_optimizer_v2(groups, name, lr=0.0, weight_decay=0.05, **options)


def hooked(change: Callable[[list[torch.Tensor]], Any]) -> Make:
    """AdamW whose hook changes gradients before each step: its type does not show it."""

    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        change([p for group in optimizer.param_groups for p in group["params"]])

    def make(groups: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(groups, lr=0.0)
        optimizer.register_step_pre_hook(hook)
        return optimizer

    return make


def centralize(parameters: list[torch.Tensor]) -> None:
    for gradient in (p.grad for p in parameters if p.grad is not None):
        gradient -= gradient.mean()


@pytest.mark.parametrize(
    ("make", "coupled", "wrong"),
    [
        (by_name("sgd"), False, ""),
        (functools.partial(torch.optim.AdamW, lr=torch.tensor(0.0), fused=True), False, ""),
        (functools.partial(torch.optim.Rprop, lr=1e-3), False, ""),
        (functools.partial(torch.optim.Adagrad, lr=0.0, initial_accumulator_value=0.1), False, ""),
        (by_name("adan"), False, ""),
        (by_name("lion"), False, ""),
        (by_name("lookahead_adamw"), False, ""),
        (by_name("lamb"), True, "rows columns filters vector"),
        (by_name("lamb", max_grad_norm=None), False, "rows columns filters"),  # the vector has no weight decay
        (by_name("lookahead_lamb", max_grad_norm=None), False, "rows columns filters"),
        (by_name("lars"), False, "rows columns filters"),
        (by_name("muon"), False, "rows columns filters"),
        (by_name("adamp"), False, "rows columns filters"),
        (by_name("sgdp"), False, "rows columns filters"),
        (by_name("novograd"), False, "rows columns filters vector"),
        (by_name("cadamw"), False, "rows columns filters vector"),
        (by_name("adafactor"), False, "rows columns filters vector"),
        (functools.partial(torch.optim.Adafactor, lr=0.0), False, "rows columns filters vector"),
        (hooked(lambda parameters: nn.utils.clip_grad_norm_(parameters, 1.0)), True, ""),
        (hooked(centralize), False, "rows columns filters vector"),
    ],
)
def test_what_an_optimizer_needs_to_see(make: Make, coupled: bool, wrong: str) -> None:
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((6, 4), (6, 4, 3, 3), (6,))]
    optimizer = make([{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.0}])
    kinds = {
        "rows": param_kind(0, (128, 48), 0), "columns": param_kind(0, (48, 128), 1),
        "filters": param_kind(0, (32, 16, 3, 3), 0),
        "vector": param_kind(1, (128,), 0), "whole": param_kind(1, (48,), None),
    }  # fmt: skip
    before = [p.clone() for p in parameters], repr(optimizer.state_dict())
    assert mixes_parameters(optimizer, list(kinds.values())) == coupled
    found = needs_full_params(optimizer, list(kinds.values()))
    assert " ".join(name for name, kind in kinds.items() if kind in found) == wrong
    # It was tried on others, and knows nothing of it.
    assert all(torch.equal(a, b) for a, b in zip(before[0], parameters, strict=True))
    assert repr(optimizer.state_dict()) == before[1]


@pytest.mark.parametrize(("pp", "dp", "zero"), [(2, 1, 0), (1, 2, 1), (1, 2, 2)])
def test_an_optimizer_that_mixes_parameters_is_refused_where_they_are_apart(pp: int, dp: int, zero: ZeroStage) -> None:
    model, (x, _) = Tied(), data("tied", 8)
    plan = plan_by_hand(model, x, 1, even_firsts(model, x, pp), dp=dp, zero=zero)
    mesh = f"pp {pp} × tp 1 × dp {dp}{f' with ZeRO-{zero}' if zero else ''}"
    expected = (
        rf"Lamb updates each parameter by the gradients of others too .*, and a rank of the mesh {mesh} has only some "
        r"of them\. .* pass max_grad_norm=None to Lamb and clip_grad_norm=1.0 to parallelize"
    )
    with pytest.raises(autopar.UsageError, match=expected):
        in_threads(model, plan, x, F.cross_entropy, optimizer=LAMB)


def test_an_optimizer_that_mixes_parameters_is_right_where_all_are_together() -> None:
    torch.manual_seed(0)
    model, (x, y) = Tied(), data("tied", 8)
    pm = in_threads(model, plan_by_hand(model, x, 2, [], dp=2), x, F.cross_entropy, optimizer=LAMB)
    reference = Reference(model, F.cross_entropy, LAMB)
    for _ in range(3):
        updated_alike(pm, reference, x, y)
    assert_all_close(pm.state_dict(), reference.model.state_dict(), "state")


def fails(parameters: Any) -> torch.optim.Optimizer:
    raise KeyError("no such group")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (functools.partial(torch.optim.LBFGS, lr=1.0), "LBFGS.step needs a closure that evaluates the loss again"),
        (
            lambda p: torch.optim.AdamW(p, lrr=1.0),  # type: ignore[call-arg]
            "optimizer=<lambda> failed on the model's 2 parameters: TypeError",
        ),
        (torch.optim.Muon, "optimizer=Muon failed .* ValueError: Muon only supports 2D parameters"),
        (fails, "optimizer=fails failed on the model's 2 parameters: KeyError: 'no such group'"),
        (list, "optimizer=list returns a list; it must return a torch.optim.Optimizer"),
        (torch.optim.SparseAdam, r"SparseAdam fails in a trial on parameters of shapes \[4\], \[4, 8\]: RuntimeError"),
    ],
)
def test_optimizers_that_no_rank_can_use(make: Make, message: str) -> None:
    model, x = nn.Sequential(nn.Linear(8, 4), nn.Tanh()), torch.randn(4, 8)
    with pytest.raises(autopar.UsageError, match=message):
        in_threads(model, plan_by_hand(model, x, 1, ["1.tanh"]), x, F.cross_entropy, optimizer=make)


# -- whole parameters -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [0, 1])
def test_parts_meet_on_one_shard_and_return(zero: ZeroStage) -> None:
    """Rows, columns, and rows of a fused weight; one of them without a gradient; replicas that own different ones."""
    mesh, sizes = Mesh(1, 2, 2), {"rows": (4, 3), "columns": (3, 4), "fused": (12, 2), "idle": (4, 4), "bias": (5,)}
    layouts = {
        "rows": split_layout(0),
        "columns": split_layout(1),
        "fused": split_layout(0, 3),
        "idle": split_layout(0),
    }
    owners = dict.fromkeys(sizes, 0) | {"columns": 1, "bias": 1} if zero else {}
    make = functools.partial(timm.optim.Lamb, lr=0.1, weight_decay=0.1, max_grad_norm=None)
    start = {name: torch.randn(shape) for name, shape in sizes.items()}
    gradients = {name: torch.randn(shape) for name, shape in sizes.items() if name != "idle"}
    cut = {
        "rows": lambda t, i: t.chunk(2)[i],
        "columns": lambda t, i: t.chunk(2, 1)[i],
        "fused": lambda t, i: t.view(3, 2, 2, 2)[:, i].reshape(6, 2),
        "idle": lambda t, i: t.chunk(2)[i],
        "bias": lambda t, i: t,
    }
    hub, ranks = InProcessMailboxes(), []
    for number in range(4):
        own = {name: cut[name](tensor, number % 2).clone() for name, tensor in start.items()}
        spec = RankSpec(
            rank=number, mesh=mesh, device="cpu", placement=Placement(1), build=lambda *_: nn.Identity(),
            weights=tuple(Weight(n, "parameter", tuple(t.shape), "float32", True) for n, t in own.items()),
            holders={}, stage_edges=(), recipe=TrainingRecipe(F.cross_entropy, make), storage=layouts, owners=owners,
            zero=1 if owners else 0,
            trainable=tuple(Weight(n, "parameter", shape, "float32", True) for n, shape in sizes.items()),
        )  # fmt: skip
        ranks.append(Rank(spec, own, LocalTransport(number, hub)))
    expected = {name: nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    optimizer = make(expected.values())
    for _ in range(2):
        for name, gradient in gradients.items():
            expected[name].grad = gradient.clone()
            for number, rank in enumerate(ranks):
                rank.trainable[name].grad = cut[name](gradient, number % 2) / 2  # of each replica
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(Rank.optimizer_step, ranks, [0] * 4))
        optimizer.step()
    for number, rank in enumerate(ranks):
        for name, tensor in rank.stored.items():
            assert_close(tensor.detach(), cut[name](expected[name].detach(), number % 2), f"{name} of rank {number}")
        updater = rank.updater
        assert {str(updater.layout(name)) for name in updater.optimized} == {"replicated"}
        assert all(list(p.shape) == list(sizes[n]) for n, p in updater.optimized.items())
    held = [sorted(rank.updater.optimized) for rank in ranks]
    assert sorted([*held[0], *held[1], *(held[2] + held[3] if zero else [])]) == sorted([*sizes, "bias"])


# -- groups -----------------------------------------------------------------------------------------------------------


def test_every_rank_has_all_groups() -> None:
    torch.manual_seed(0)
    model, (x, y) = Tied(), data("tied", 8)

    def grouped(parameters: Parameters) -> torch.optim.Optimizer:
        chosen = dict(parameters.named_parameters())
        assert list(chosen) == [name for name, _ in model.named_parameters()]
        assert [p.shape for p in chosen.values()] == [p.shape for p in model.parameters()]
        first = chosen.pop("layers.0.0.weight")
        groups = [{"params": [first], "lr": 0.5}, {"params": list(chosen.values()), "note": "rest"}]
        return torch.optim.Adagrad(groups, lr=0.1)  # which makes its state at once

    plan = plan_by_hand(model, x, 2, even_firsts(model, x, 3), dp=2, zero=1)
    pm = in_threads(model, plan, x, F.cross_entropy, optimizer=grouped)
    ranks = ranks_of(pm)
    own = [[len(group["params"]) for group in rank.updater.optimizer.param_groups] for rank in ranks]  # type: ignore
    assert sum(first for first, _ in own) == 1 and all(len(rank.updater.optimizer.state) == sum(groups)  # type: ignore
                                                       for rank, groups in zip(ranks, own, strict=True))  # fmt: skip
    assert list(pm._call("learning_rates").values()) == [[0.5, 0.1]] * 6
    named = Parameters(dict(model.named_parameters()))
    reference = Reference(model, F.cross_entropy)
    reference.optimizer = grouped(Parameters(dict(reference.model.named_parameters())))
    assert len(named) == len(reference.optimizer.state)
    for _ in range(2):
        updated_alike(pm, reference, x, y)
    assert_all_close(pm.state_dict(), reference.model.state_dict(), "state")


def by_size(parameters: Any, kind: Any = torch.optim.RMSprop) -> torch.optim.Optimizer:
    groups = [[p for p in parameters if p.numel() >= 15], [p for p in parameters if p.numel() < 15]]
    return kind([{"params": own, "lr": lr} for own, lr in zip(groups, (0.1, 0.01), strict=True)])


def by_fan_in(parameters: Any) -> torch.optim.Optimizer:
    """A learning rate for each parameter that depends on its columns: the groups differ in options only."""
    return torch.optim.AdamW([{"params": [p], "lr": 0.1 / p.shape[-1]} for p in parameters], fused=False)


def by_rank_of_tensors(parameters: Any) -> torch.optim.Optimizer:
    groups = [[p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim == 1]]
    return torch.optim.Adagrad([{"params": own, "lr": lr} for own, lr in zip(groups, (0.1, 0.01), strict=True)])


WHOLE_PARAMETERS = functools.partial(timm.optim.Lamb, weight_decay=0.1, max_grad_norm=None)
SIZES = {"rows": (6, 4), "columns": (4, 4), "bias": (14,)}


def part(name: str, whole: torch.Tensor, shard: int) -> torch.Tensor:
    return whole if name == "bias" else whole.chunk(2, int(name == "columns"))[shard]


def shards(make: Make, start: dict[str, torch.Tensor]) -> list[Rank]:
    """Two ranks that have rows of one weight, columns of another one, and a whole bias."""
    hub, layouts, ranks = InProcessMailboxes(), {"rows": split_layout(0), "columns": split_layout(1)}, []
    for number in range(2):
        own = {name: part(name, tensor, number).clone() for name, tensor in start.items()}
        spec = RankSpec(
            rank=number, mesh=Mesh(1, 2, 1), device="cpu", placement=Placement(1), build=lambda *_: nn.Identity(),
            weights=tuple(Weight(n, "parameter", tuple(t.shape), "float32", True) for n, t in own.items()),
            holders={}, stage_edges=(), recipe=TrainingRecipe(F.cross_entropy, make), storage=layouts, owners={},
            trainable=tuple(Weight(n, "parameter", shape, "float32", True) for n, shape in SIZES.items()),
        )  # fmt: skip
        ranks.append(Rank(spec, own, LocalTransport(number, hub)))
    return ranks


@pytest.mark.parametrize(
    "make", [by_size, by_fan_in, by_rank_of_tensors, functools.partial(by_size, kind=WHOLE_PARAMETERS)]
)
def test_groups_are_those_of_whole_parameters(make: Make) -> None:
    start = {name: torch.randn(shape) for name, shape in SIZES.items()}
    ranks = shards(make, start)
    expected = {name: nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    optimizer = make(list(expected.values()))
    for _ in range(2):
        for name, tensor in expected.items():
            tensor.grad = torch.randn_like(tensor)
            for number, rank in enumerate(ranks):
                rank.trainable[name].grad = part(name, tensor.grad, number).clone()
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(Rank.optimizer_step, ranks, [0] * 2))
        optimizer.step()
    for number, rank in enumerate(ranks):
        for name, parameter in rank.trainable.items():
            assert_close(parameter.detach(), part(name, expected[name].detach(), number), f"{name} of rank {number}")


def test_groups_by_shape_of_an_optimizer_with_state_from_the_start() -> None:
    start = {name: torch.randn(shape) for name, shape in SIZES.items()}
    message = (
        r"optimizer=by_size groups parameters by their shapes, and Adagrad makes its state .* parts of 2 of its 3 "
        r"\(tp=2\)\. Group by names"
    )
    with pytest.raises(autopar.UsageError, match=message):
        shards(functools.partial(by_size, kind=torch.optim.Adagrad), start)


@pytest.mark.parametrize("layer_decay", [None, 0.7])
@pytest.mark.parametrize("filter_bias_and_bn", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
def test_groups_are_timms(weight_decay: float, filter_bias_and_bn: bool, layer_decay: float | None) -> None:
    model = tiny_vit(2)
    model.get_parameter("head.weight").requires_grad_(False)
    options: dict[str, Any] = {
        "lr": 1e-3, "weight_decay": weight_decay, "layer_decay": layer_decay, "filter_bias_and_bn": filter_bias_and_bn,
        "betas": (0.8, 0.9),
    }  # fmt: skip
    expected = timm.optim.create_optimizer_v2(model, "adamw", **options)
    made = timm_optimizer(model, "adamw", **options)(Parameters(dict(model.named_parameters())))
    assert type(made) is type(expected)
    for own, other in zip(made.param_groups, expected.param_groups, strict=True):
        assert [id(p) for p in own.pop("params")] == [id(p) for p in other.pop("params")]
        assert own == other
    assert ("lr_scale" in made.param_groups[0]) == (layer_decay is not None)


@pytest.mark.parametrize(
    ("opt", "options", "message"),
    [
        ("lamm", {}, "timm has no optimizer 'lamm'. Did you mean lamb"),
        ("lookforward_adamw", {}, "timm has no optimizer 'lookforward_adamw'. It has "),
        ("lamb", {"max_grad_nom": 1.0}, "timm's lamb has no option 'max_grad_nom'. Did you mean max_grad_norm?"),
        ("adamw", {"betas": (2.0, 0.9)}, "timm's optimizer adamw cannot be made: ValueError: Invalid beta parameter"),
        ("adamw", {"layer_decay": "0.5"}, "timm's optimizer adamw cannot be made: TypeError: unsupported operand"),
        ("adahessian", {}, "timm's adahessian differentiates gradients once more"),
    ],
)
def test_bad_optimizers_of_timm(opt: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(autopar.UsageError) as caught:
        timm_optimizer(nn.Linear(8, 4), opt, lr=1e-3, **options)
    assert message in str(caught.value)


def test_a_model_and_a_name_in_this_order() -> None:
    swapped: Any = ("lamb", nn.Linear(8, 4))
    expected = r"timm_optimizer was given a str and a Linear; it takes a model and the name of an optimizer, such as"
    with pytest.raises(autopar.UsageError, match=expected):
        timm_optimizer(*swapped, lr=1e-3)
    parameters: Any = list(nn.Linear(8, 4).parameters())
    with pytest.raises(autopar.UsageError, match="was given a list and a str"):
        timm_optimizer(parameters, "lamb", lr=1e-3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it needs apex alone")
def test_optimizers_of_other_libraries() -> None:
    with pytest.raises(autopar.UsageError, match="fusedlamb cannot be made: AssertionError: CUDA required for APEX"):
        timm_optimizer(nn.Linear(8, 4), "fusedlamb", lr=1e-3)


def test_groups_of_another_model() -> None:
    made = timm_optimizer(tiny_vit(1), "sgd", lr=0.1)
    model, x = nn.Linear(8, 4), torch.randn(4, 8)
    expected = "None of the 20 parameters that sgd has groups for is among the model's 2"
    with pytest.raises(autopar.UsageError, match=expected):
        in_threads(model, plan_by_hand(model, x, 1, []), x, F.cross_entropy, optimizer=made)


# -- clipping ---------------------------------------------------------------------------------------------------------


def test_what_lamb_clips_itself_is_clipped_over_all_ranks() -> None:
    model = nn.Linear(8, 4)
    lamb = timm_optimizer(model, "lamb", lr=1e-3)
    assert [Options(clip_grad_norm=limit).norm_limit(lamb) for limit in (None, 0.1, 9.0)] == [1.0, 0.1, 1.0]
    with pytest.raises(autopar.UsageError, match=r"clip_grad_value=0\.1: the optimizer clips by norm 1 itself"):
        autopar.parallelize(model, 1, torch.randn(4, 8), optimizer=lamb, clip_grad_value=0.1)
    for plain in (timm_optimizer(model, "lamb", lr=1e-3, max_grad_norm=None), ADAMW, None):
        assert Options(clip_grad_norm=9.0).norm_limit(plain) == 9.0
        assert Options(clip_grad_value=0.1).norm_limit(plain) is None


def test_a_float64_model_is_clipped_by_a_float64_norm() -> None:
    model, sgd = nn.Linear(6, 4).double(), functools.partial(torch.optim.SGD, lr=1.0)
    x, y = torch.randn(5, 6, dtype=torch.float64), torch.randint(0, 4, (5,))
    reference = Reference(model, F.cross_entropy, sgd)
    reference.forward_backward(x, y, 1)
    norm = nn.utils.clip_grad_norm_(reference.model.parameters(), 0.05)
    reference.step()
    with autopar.parallelize(model, 1, x, optimizer=sgd, clip_grad_norm=0.05, microbatches=1) as pm:
        assert pm.train_step(x, y).grad_norm == pytest.approx(norm.item(), rel=1e-12)
        for name, weight in reference.model.state_dict().items():
            torch.testing.assert_close(pm.state_dict()[name], weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("zero", [0, 1])
def test_clipping_by_value(zero: ZeroStage) -> None:
    torch.manual_seed(0)
    model, (x, y) = Tied(), data("tied", 6)
    plan = plan_by_hand(model, x, 3, ["layers.1.0.layer_norm", "head.linear"], dp=2, zero=zero)
    pm = in_threads(model, plan, x, F.cross_entropy, optimizer=ADAMW, clip_grad_value=0.01)
    reference = Reference(model, F.cross_entropy, ADAMW)
    for _ in range(3):
        reference.forward_backward(x, y, 3, 2)
        norm = nn.utils.get_total_norm(reference.gradients().values()).item()
        nn.utils.clip_grad_value_(reference.model.parameters(), 0.01)
        assert nn.utils.get_total_norm(reference.gradients().values()) < 0.9 * norm
        reference.step()
        assert pm.train_step(x, y).grad_norm == pytest.approx(norm, rel=1e-5)  # as it was before
    assert_all_close(pm.state_dict(), reference.model.state_dict(), "state")


# -- batches in pieces ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule_name", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("pp", "dp", "zero"), [(2, 1, 0), (1, 2, 1), (2, 2, 1), (2, 2, 2)])
def test_pieces_equal_the_whole_batch(pp: int, dp: int, zero: ZeroStage, schedule_name: str) -> None:
    torch.manual_seed(0)
    model = Tied()
    x, y = data("tied", 20)
    microbatches, firsts = 1 if zero == 2 else 3, even_firsts(model, x[:8], pp)
    plan = plan_by_hand(model, x[:8], microbatches, firsts, schedule_name, dp=dp, zero=zero)
    pm = in_threads(model, plan, x[:8], F.cross_entropy, optimizer=ADAMW)
    reference = Reference(model, F.cross_entropy, ADAMW)
    for _ in range(2):
        loss = reference.forward_backward(x, y, 1)
        norm = nn.utils.get_total_norm(reference.gradients().values()).item()
        reference.step()
        pieces = list(zip(x.split(8), y.split(8)))
        shares = [len(part) / len(x) for part, _ in pieces]
        losses = [pm.forward_backward(*piece, share=share).loss for piece, share in zip(pieces[:-1], shares)]
        result = pm.train_step(*pieces[-1], share=shares[-1])
        assert sum(a * b for a, b in zip([*losses, result.loss], shares, strict=True)) == pytest.approx(loss, abs=1e-5)
        assert result.grad_norm == pytest.approx(norm, rel=1e-4)
    assert_all_close(pm.state_dict(), reference.model.state_dict(), "state")


@pytest.mark.parametrize("share", [0, -0.5, float("nan"), float("inf"), True, "1/4"])
def test_shares_that_are_none(share: Any) -> None:
    model, x = nn.Linear(8, 4), torch.randn(4, 8)
    pm = in_threads(model, plan_by_hand(model, x, 1, []), x, F.cross_entropy, optimizer=ADAMW)
    with pytest.raises(autopar.UsageError, match="must be a number above 0: this batch's part of all samples"):
        pm.forward_backward(x, torch.arange(4), share=share)


def test_fused_kernels_are_used_on_cuda_where_nothing_else_was_chosen() -> None:
    def fused(make: Any, dtype: torch.dtype = torch.float32, device: str = "cuda") -> list[Any]:
        with FakeTensorMode():  # needs no GPU
            first, second = (nn.Parameter(torch.empty(3, dtype=dtype, device=device)) for _ in range(2))
            optimizer = make([{"params": [first]}, {"params": [second], "foreach": None}, {"params": []}])
            use_fused_kernels(optimizer)
        return [group.get("fused") for group in optimizer.param_groups]

    assert fused(ADAMW) == fused(functools.partial(torch.optim.SGD, lr=0.1)) == [True, True, None]
    assert fused(functools.partial(ADAMW, foreach=False)) == [None, True, None]  # the second group says None itself
    assert fused(functools.partial(ADAMW, fused=False)) == [False] * 3
    assert fused(functools.partial(torch.optim.Adagrad, lr=0.1)) == [None] * 3  # has fused kernels for CPU only
    assert fused(ADAMW, device="cpu") == fused(ADAMW, dtype=torch.complex64) == [None] * 3
