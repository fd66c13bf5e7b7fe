"""Replicas under ZeRO-1 and in mixed precision: flat gradients, reduce-scatter, weights gathered for the next step."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import timm.utils
import torch
import torch.nn.functional as F
from support.effort import only
from support.handmade import even_firsts, in_threads, plan_by_hand, ranks_of
from support.models import Autocast, Tied, TwoHeads, UNet, loss_in_bf16, loss_of_some, main_loss, tiny_vit
from support.parity import images_and_labels
from support.reference import Reference
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.ir.plan_parts import ZeroStage
from autopar.runtime.comm.in_process import InProcessMailboxes, LocalTransport
from autopar.runtime.params import flat_buckets as buckets
from autopar.runtime.params.flat_buckets import flat_buckets
from autopar.runtime.params.grad_buffer import GradBuffer
from autopar.runtime.rank import Rank

# A larger eps than the default: parameters whose true gradient is zero would amplify the order of sums.
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)
Data = tuple[torch.Tensor, torch.Tensor]


def tokens(batch: int) -> Data:
    return torch.randint(0, 32, (batch, 5)), torch.randint(0, 32, (batch,))


def on_all(pm: Any, call: Callable[[Rank], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(ranks_of(pm))) as threads:
        return list(threads.map(call, ranks_of(pm)))


def counted(pm: Any, monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, torch.dtype]]:
    """Elements that the first rank hands to collectives from now on, by call and dtype."""
    calls: Counter[tuple[str, torch.dtype]] = Counter()
    transport = ranks_of(pm)[0].transport
    for name in ("start_sum", "start_reduce_scatter", "start_all_gather", "start_broadcast"):
        start = getattr(transport, name)

        def count(tensor: torch.Tensor, *args: Any, name: str = name, call: Any = start) -> Any:
            calls[name, tensor.dtype] += tensor.numel()
            return call(tensor, *args)

        monkeypatch.setattr(transport, name, count)
    return calls


@pytest.fixture
def unpadded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No bucket is padded: segments of unequal length (or of equal ones), summed and handed on one by one."""
    monkeypatch.setattr(buckets, "is_padded", lambda loads, element_bytes: False)
    monkeypatch.setattr(buckets.FlatBucket, "even", False)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x), self.b(x)


def loss_by_label(outputs: tuple[torch.Tensor, torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    """Loss of the first head, and of the second one if the first label is 1."""
    loss = F.cross_entropy(outputs[0], y)
    return loss + F.cross_entropy(outputs[1], y) if y[0] == 1 else loss


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_replicas_with_other_gradients_call_in_one_order(zero: ZeroStage) -> None:
    """One replica has no gradient of a head, so that its bucket starts behind the backward, the other's within."""
    torch.manual_seed(0)
    model, x, y = Heads(), torch.randn(8, 8), torch.tensor([0] * 4 + [1] * 4)
    states = []
    for dp in (1, 2):
        plan = plan_by_hand(model, x, 2 // dp, [], dp=dp, zero=zero if dp > 1 else 0)
        pm = in_threads(model, plan, x, loss_by_label, optimizer=ADAMW)
        losses = [pm.train_step(x, y).loss for _ in range(3)]
        states.append((losses, dict(pm.state_dict())))
    assert states[1][0] == pytest.approx(states[0][0], abs=1e-5)
    for name, tensor in states[0][1].items():
        torch.testing.assert_close(states[1][1][name], tensor, rtol=0, atol=1e-5, msg=name)


# -- gradients ---------------------------------------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_no_microbatch_costs_a_call_per_parameter() -> None:
    calls = []
    for microbatches in (2, 3, 4):
        model, (x, y) = tiny_vit(2), images_and_labels(12)
        with autopar.parallelize(
            model, 1, x, optimizer=ADAMW, microbatches=microbatches, precision="bf16", batch_size=12
        ) as pm:
            pm.train_step(x, y)  # memory is there
            with Calls() as counter:
                pm.forward_backward(x, y)
            calls.append(counter.calls)
            assert len(pm.gradients()) == 32
    moves = ["aten._foreach_copy_.default", "aten._foreach_add_.List", "aten._foreach_zero_.default"]
    summed = [{name: own[name] for name in (*moves, "aten.add_.Tensor")} for own in calls]
    # Two buckets: masters' of bf16 copies, and what is read in float32. Copied are weights, gradients of the first
    # microbatch, low-precision ones of the second; losses are added too.
    assert summed[0] == dict(zip(summed[0], (1 + 2 + 1, 2, 0, 1), strict=True))
    for before, after in pairwise(summed):
        assert {name: after[name] - before[name] for name in after} == dict(zip(after, (1, 2, 0, 0), strict=True))


def collected(**options: Any) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter], GradBuffer]:
    """Parameters of a convolution and a linear layer, bf16 copies of the first two, and their gradients."""
    weights = {
        "conv": torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last),
        "linear": torch.randn(3, 5),
        "bias": torch.randn(5),
    }
    parameters = {name: nn.Parameter(t) for name, t in weights.items()}
    about = [
        autopar.ir.graph.Weight(n, "parameter", tuple(t.shape), *(("bfloat16", True, (n,), "float32") if t.ndim > 1 else
                                                            ("float32", True, (n,))))
        for n, t in weights.items()
    ]  # fmt: skip
    gradients = GradBuffer(parameters, flat_buckets(about, {}, 1, **options))
    copies = {n: nn.Parameter(p.detach().bfloat16()) for n, p in parameters.items() if p.ndim > 1}
    for name, copy in copies.items():
        gradients.watch(name, copy)
    return parameters, copies, gradients


def test_sums_are_those_of_float32_in_the_order_of_microbatches() -> None:
    torch.manual_seed(0)
    parameters, copies, gradients = collected()
    leaves = {**parameters, **copies}
    for _ in range(2):  # steps: the memory of the first is used again
        expected: dict[str, torch.Tensor] = {}
        for microbatch in range(4):
            read = [n for n in leaves if (n, microbatch) not in {("linear", 0), ("bias", 2), ("conv", 3)}]
            scale = {name: torch.randn(leaves[name].shape).to(leaves[name].dtype) for name in read}
            sum((leaves[name] * scale[name]).float().sum() for name in read).backward()  # type: ignore[union-attr]
            gradients.flush()
            assert all(leaf.grad is None for leaf in leaves.values())
            for name in read:
                expected[name] = expected[name] + scale[name].float() if name in expected else scale[name].float()
        gradients.attach_to_params()
        for name, parameter in parameters.items():
            assert parameter.grad is not None and torch.equal(parameter.grad, expected[name])
            assert parameter.grad.stride() == parameter.stride()
        memory = {
            parameter.grad.untyped_storage().data_ptr()
            for parameter in parameters.values()
            if parameter.grad is not None
        }
        assert len(memory) == 2
        gradients.detach_from_params()
        assert all(parameter.grad is None for parameter in parameters.values())
        gradients.clear()
        gradients.attach_to_params()
        assert all(parameter.grad is None for parameter in parameters.values())
    assert gradients.num_bytes == 4 * 128 * 2 + 4 * 128


# -- one device --------------------------------------------------------------------------------------------------------

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Data]]] = {
    "vit": (lambda: tiny_vit(2), images_and_labels),
    "tied": (Tied, tokens),
}


def stepped_alike(pm: Any, reference: Reference, x: Any, y: Any, dp: int, atol: float) -> None:
    loss = reference.forward_backward(x, y, 2, dp)
    norm = nn.utils.get_total_norm(reference.gradients().values()).item()
    reference.step()
    result = pm.train_step(x, y)
    assert (result.loss, result.grad_norm) == (pytest.approx(loss, abs=atol), pytest.approx(norm, rel=10 * atol))


def plain_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


CELLS = [
    (*case, precision, padding)
    for case in (("vit", 1, 2), ("vit", 2, 2), ("tied", 2, 3), ("tied", 3, 2))
    for precision in ("fp32", "bf16")
    for padding in ("padded", "unpadded")
]
KEPT = [
    ("vit", 1, 2, "bf16", "unpadded"), ("vit", 2, 2, "bf16", "padded"), ("tied", 2, 3, "fp32", "unpadded"),
    ("tied", 3, 2, "bf16", "padded"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "pp", "dp", "precision", "padding"), only(KEPT, CELLS))
def test_equals_one_device(
    name: str, pp: int, dp: int, precision: Any, padding: str, request: pytest.FixtureRequest
) -> None:
    if padding == "unpadded":
        request.getfixturevalue("unpadded")
    torch.manual_seed(0)
    make, data = MODELS[name]
    model = make()
    x, y = data(4 * dp)
    plan = plan_by_hand(model, x, 2, even_firsts(model, x, pp) if precision == "fp32" else [], dp=dp, zero=1)
    if precision == "bf16":
        firsts = {"vit": ["blocks.1.norm1.layer_norm"], "tied": ["layers.1.0.layer_norm", "mean"]}[name][: pp - 1]
        plan = plan_by_hand(model, x, 2, firsts, dp=dp, zero=1, precision="bf16")
    pm = in_threads(model, plan, x, F.cross_entropy, optimizer=ADAMW)
    even = {bucket.even for rank in ranks_of(pm) for bucket in rank.updater.grad_buffer.buckets}
    assert even == {padding == "padded"}
    reference = Reference(model, F.cross_entropy, ADAMW)
    if precision == "bf16":
        reference = Reference(Autocast(model, torch.bfloat16), loss_in_bf16, ADAMW)
    # A sum in another order moves a weight by 1e-7, and what it rounds to in bf16 by 1e-3 of it.
    first, later = (1e-5, 1e-5) if precision == "fp32" else (1e-5, 2e-3)
    stepped_alike(pm, reference, x, y, dp, first)
    for key, tensor in plain_names(reference.model.state_dict()).items():
        torch.testing.assert_close(pm.state_dict()[key], tensor, rtol=0, atol=1e-5)
    for batch in (4, 2):  # accumulated, shown in between, and summed at last
        x, y = data(batch * dp)
        reference.forward_backward(x, y, 2, dp)
        pm.forward_backward(x, y)
        found, expected = pm.gradients(), plain_names(reference.gradients())
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=later, atol=later)
    stepped_alike(pm, reference, x, y, dp, later)
    assert pm.gradients() == {}
    stepped_alike(pm, reference, *data(4 * dp), dp, later)
    state = pm.state_dict()
    for key, tensor in plain_names(reference.model.state_dict()).items():
        torch.testing.assert_close(state[key], tensor, rtol=0, atol=later)
    pm.eval()
    reference.model.eval()
    for batch in (4 * dp, 1):  # a batch of one leaves replicas without work
        x, _ = data(batch)
        torch.testing.assert_close(pm(x), reference.forward(x, 2, dp)[0], rtol=later, atol=10 * later)


@pytest.mark.parametrize("precision", only(["fp32", "bf16-params"], ["fp32", "bf16", "bf16-params"]))
@pytest.mark.parametrize(
    "firsts", [pytest.param([], id="pp=1", marks=pytest.mark.full), pytest.param(["middle.linear"], id="pp=2")]
)
def test_owners_change_no_number(precision: Any, firsts: list[str]) -> None:
    """With two replicas, reduce-scatter and all-reduce add in equal order, so results agree to the last bit."""
    torch.manual_seed(0)
    model, x = TwoHeads(), torch.randn(8, 8)
    make = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.5)
    targets = ([1] * 8, [1, 1, 1, 1, 0, 1, 1, 1], [0] + [1] * 7, [0] * 8, [2] * 8)
    for loss_fn in (main_loss, loss_of_some):
        states = []
        for zero in (0, 1):
            plan = plan_by_hand(model, x, 2, firsts, dp=2, zero=zero, precision=precision)
            pm = in_threads(model, plan, x, loss_fn, optimizer=make)
            for y in targets:
                pm.forward_backward(x, torch.tensor(y))
                pm.train_step(x, torch.tensor(y))
            states.append(pm.state_dict())
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
        changed = {name for name, t in states[1].items() if not torch.equal(t, model.state_dict()[name])}
        some = {"side.weight", "side.bias", "other.weight", "other.bias"}
        assert changed == set(model.state_dict()) - (some if loss_fn is main_loss else set())


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_masters_lie_on_one_replica(zero: ZeroStage) -> None:
    torch.manual_seed(0)
    model, (x, y) = tiny_vit(2), images_and_labels(8)
    plan = plan_by_hand(model, x, 1, [], dp=2, zero=zero, precision="bf16")
    pm = in_threads(model, plan, x, F.cross_entropy, optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    pm.train_step(x, y)
    pieces = [sum(p.numel() for p in rank.updater.updated.values()) for rank in ranks_of(pm)]
    assert sum(pieces) == sum(p.numel() for p in model.parameters()) and max(pieces) < 1.1 * min(pieces)
    standing = on_all(pm, Rank.standing_bytes)
    pm.state_dict()
    assert on_all(pm, Rank.standing_bytes) == standing
    for rank in ranks_of(pm):
        for name in rank.compute_params.copies:
            assert rank.weights[name].isnan().all() and rank.weights[name].untyped_storage().nbytes() == 4


def test_channels_last_survives() -> None:
    torch.manual_seed(0)
    model = UNet().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x, y = torch.randn(8, 3, 8, 8).contiguous(memory_format=torch.channels_last), torch.rand(8, 1, 8, 8)
    states = []
    for zero in (0, 1, 2, 3):
        plan = plan_by_hand(model, x, 1, [], dp=2, zero=zero, precision="bf16")
        pm = in_threads(model, plan, x, F.mse_loss, optimizer=ADAMW)
        for _ in range(3):
            pm.train_step(x, y)
        for rank in ranks_of(pm):
            for name, parameter in model.named_parameters():
                assert rank.compute_params.copies[name].stride() == parameter.stride()
                for own in (rank.stored, rank.updater.grad_buffer.views):
                    if name in own and own[name].shape == parameter.shape:
                        assert own[name].stride() == parameter.stride()
        states.append(pm.state_dict())
        pm.forward_backward(x, y)
        assert pm.gradients().keys() == dict(model.named_parameters()).keys()
        assert all(tensor.is_contiguous() for tensor in (*states[-1].values(), *pm.gradients().values()))
    for name, tensor in states[0].items():
        assert all(torch.equal(state[name], tensor) for state in states[1:])


# -- what travels, and when --------------------------------------------------------------------------------------------


def test_a_step_scatters_gradients_and_gathers_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = tiny_vit(2), images_and_labels(8)
    plan = plan_by_hand(model, x, 2, [], dp=2, zero=1, precision="bf16")
    pm = in_threads(model, plan, x, F.cross_entropy, optimizer=ADAMW)
    held = ranks_of(pm)[0].updater.grad_buffer.buckets
    low = sum(bucket.numel for bucket in held if bucket.copy_dtype == torch.bfloat16)
    full = sum(bucket.numel for bucket in held if bucket.copy_dtype is None)
    assert low > 10 * full > 0
    pm.train_step(x, y)
    calls = counted(pm, monkeypatch)
    for steps in (1, 2):
        pm.train_step(x, y)
        del calls["start_sum", torch.float64], calls["start_sum", torch.int32]  # losses and norm, flags
        assert calls == {
            ("start_reduce_scatter", torch.float32): steps * (low + full),
            ("start_all_gather", torch.bfloat16): steps * low,
            ("start_all_gather", torch.float32): steps * full,
        }
    calls.clear()
    pm.state_dict()
    assert calls == {("start_all_gather", torch.float32): low + full}
    pm(x)
    pm(x)
    pm.forward_backward(x, y)
    del calls["start_sum", torch.float64]
    assert calls == {("start_all_gather", torch.float32): low + 2 * full, ("start_all_gather", torch.bfloat16): low}


class Unused(nn.Module):
    """Has a layer that nothing reads, where a backward would come first."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.unused = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.body(x)))


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_no_bucket_waits_for_what_is_never_read(zero: ZeroStage, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = Unused(), torch.randn(8, 8), torch.randint(0, 4, (8,))
    plan = plan_by_hand(model, x, 1, [], dp=2, zero=zero)
    pm = in_threads(model, plan, x, F.cross_entropy, optimizer=ADAMW)
    rank = ranks_of(pm)[0]
    name = "start_reduce_scatter" if zero else "start_sum"
    call, noted = getattr(rank.transport, name), []

    def note(tensor: torch.Tensor, *args: Any) -> Any:
        if tensor.dtype == torch.float32:
            noted.append(str(rank.current_step.current_action if rank.current_step else None))
        return call(tensor, *args)

    monkeypatch.setattr(rank.transport, name, note)
    for _ in range(2):
        pm.train_step(x, y)
    assert noted == ["0B0", "0B0"]
    state = pm.state_dict()
    assert all(torch.equal(state[n], t) == n.startswith("unused") for n, t in model.state_dict().items())


@pytest.mark.parametrize("zero", [1, 3])
def test_copies_follow_masters(zero: ZeroStage) -> None:
    """Both replicas read the same copies after every way of changing weights."""
    torch.manual_seed(0)
    model, (x, y) = tiny_vit(2), images_and_labels(8)
    plan = plan_by_hand(model, x, 2, [], dp=2, zero=zero, precision="bf16")
    pm = in_threads(model, plan, x, F.cross_entropy, optimizer=ADAMW)
    name = "blocks.0.mlp.fc1.weight"

    def check_copies() -> None:
        expected = pm.state_dict()[name].bfloat16()
        for rank in ranks_of(pm):
            sharded = rank.sharded
            assert sharded is not None
            sharded.read((sharded.bucket_of[name],))
            assert torch.equal(rank.compute_params.copies[name].detach(), expected)

    pm.train_step(x, y)
    pm.forward_backward(x, y)
    pm._call("zero_grad")
    check_copies()
    pm.train_step(x, y)
    pm.load_state_dict(model.state_dict())
    pm.forward_backward(x, y)
    check_copies()


def test_averages_are_of_all_masters() -> None:
    torch.manual_seed(0)
    model, (x, y) = tiny_vit(2), images_and_labels(8)
    average = functools.partial(timm.utils.ModelEmaV3, decay=0.5)
    found = []
    for zero in (0, 1, 2, 3):
        plan = plan_by_hand(model, x, 1, [], dp=2, zero=zero, precision="bf16")
        pm = in_threads(model, plan, x, F.cross_entropy, optimizer=ADAMW, ema=average)
        for _ in range(3):
            pm.train_step(x, y)
        outputs = []
        pm.eval()
        with pm.ema_weights():
            outputs.append(pm(x))
        outputs.append(pm(x))
        found.append((pm.ema_state_dict(), pm.state_dict(), outputs))
    for again in found[1:]:
        for one, other in zip(found[0][:2], again[:2], strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)  # type: ignore[call-overload]
        assert all(torch.equal(a, b) for a, b in zip(found[0][2], again[2], strict=True))
    assert not torch.equal(*found[1][2])


def test_memory_is_taken_once() -> None:
    """Gradients lie in one buffer a bucket; weights read in float32 in what gathers fill; nothing grows."""
    model, (x, y) = tiny_vit(2), images_and_labels(8)
    plan = plan_by_hand(model, x, 2, [], dp=2, zero=1, precision="bf16")
    pm = in_threads(model, plan, x, F.cross_entropy, optimizer=ADAMW)
    rank = ranks_of(pm)[0]
    places = []
    for _ in range(3):
        pm.train_step(x, y)
        gradients = rank.updater.grad_buffer
        assert isinstance(gradients, GradBuffer)
        places.append([flat.data_ptr() for flat in gradients.flats if flat is not None])
        assert gradients.num_bytes == sum(4 * b.numel for b in gradients.buckets)
    assert places[0] == places[1] == places[2]
    norm = rank.weights["norm.weight"]
    assert norm.untyped_storage().nbytes() == 4 * next(b for b in gradients.buckets if "norm.weight" in b.names).numel


def test_collectives_of_threads() -> None:
    hub = InProcessMailboxes()
    transports = [LocalTransport(rank, hub) for rank in range(3)]
    flats = [torch.arange(6.0) * 10**rank for rank in range(3)]
    for transport, flat in zip(transports, flats):
        transport.start_broadcast(flat.clone(), [0, 1, 2], 0)  # another call before
    for delivery in [t.start_reduce_scatter(f, [0, 1, 2]) for t, f in zip(transports, flats)]:
        delivery()
    assert [flats[i][2 * i : 2 * i + 2].tolist() for i in range(3)] == [[0, 111], [222, 333], [444, 555]]
    for delivery in [t.start_all_gather(f, [0, 1, 2]) for t, f in zip(transports, flats)]:
        delivery()
    assert all(flat.tolist() == [0, 111, 222, 333, 444, 555] for flat in flats)
    with pytest.raises(AssertionError, match="5 elements for 3 ranks"):
        transports[0].start_all_gather(torch.zeros(5), [0, 1, 2])


# -- real processes ----------------------------------------------------------------------------------------------------


PADDINGS = [(1, "padded"), (2, "padded"), (1, "unpadded")]


@pytest.mark.parametrize(("pp", "padding"), only([(2, "padded")], PADDINGS))
def test_processes_equal_one_device(pp: int, padding: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """With checkpoints that go to another mesh and back."""
    torch.manual_seed(0)
    model, (x, y) = tiny_vit(2), images_and_labels(8)
    firsts = ["blocks.1.norm1.layer_norm"][: pp - 1]
    if padding == "unpadded":  # one large weight: the workers make their own buckets
        model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 1536), nn.GELU(), nn.Linear(1536, 10))
    reference = Reference(Autocast(model, torch.bfloat16), loss_in_bf16, ADAMW)
    plan = plan_by_hand(model, x, 2, firsts, dp=2, zero=1, precision="bf16")
    options: dict[str, Any] = {"loss_fn": F.cross_entropy, "optimizer": ADAMW}
    with autopar.parallelize(model, 2 * pp, x, plan=plan, **options) as pm:
        made = flat_buckets(pm._spec.weights, pm._spec.owners, 2)
        assert all(bucket.even for bucket in made) == (padding == "padded")
        for step in range(2):
            stepped_alike(pm, reference, x, y, 2, 1e-5 if step == 0 else 2e-3)
        state = pm.state_dict()
        for key, tensor in plain_names(reference.model.state_dict()).items():
            torch.testing.assert_close(state[key], tensor, rtol=0, atol=2e-3)
        pm.forward_backward(x, y)
        assert pm.gradients().keys() == dict(model.named_parameters()).keys()
        pm.zero_grad()
        pm.save_checkpoint(tmp_path / "shared")
        on = pm.train_step(x, y)
        after = pm.state_dict()
        pm.load_checkpoint(tmp_path / "shared")  # weights, state and copies as they were
        again = pm.train_step(x, y)
        assert (again.loss, again.grad_norm) == (on.loss, on.grad_norm)
        assert all(torch.equal(t, after[name]) for name, t in pm.state_dict().items())
    whole = plan_by_hand(model, x, 4, [], precision="bf16")
    with autopar.parallelize(model, 1, x, plan=whole, **options) as alone:
        alone.load_checkpoint(tmp_path / "shared")
        assert all(torch.equal(t, state[name]) for name, t in alone.state_dict().items())
        assert alone.train_step(x, y).loss == pytest.approx(on.loss, abs=1e-5)
        for name, tensor in alone.state_dict().items():
            torch.testing.assert_close(tensor, after[name], rtol=0, atol=1e-4)
        alone.save_checkpoint(tmp_path / "alone")
        expected = alone.state_dict()
    with autopar.parallelize(model, 2 * pp, x, plan=plan, **options) as pm:
        pm.train_step(x, y)
        pm.load_checkpoint(tmp_path / "alone")
        assert all(torch.equal(t, expected[name]) for name, t in pm.state_dict().items())
