"""Data-parallel replicas under every ZeRO stage, against one device: over threads, then over real processes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import timm.optim
import torch
import torch.nn.functional as F
from support.cases import ADAMW, data
from support.effort import only
from support.handmade import even_firsts, in_threads, plan_by_hand, ranks_of
from support.models import Normed, Tied, TwoHeads, UNet, Updating, loss_of_some, main_loss
from support.parity import updated_alike
from support.reference import Reference, assert_all_close, assert_close
from torch import nn

import autopar
from autopar.api.batch import partition
from autopar.ir.grad_buckets import group_weights
from autopar.ir.graph import Weight
from autopar.ir.layout import broadcast_layout, split_layout
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placement
from autopar.ir.plan_parts import ZeroStage
from autopar.ir.pytree import leaves
from autopar.runtime.comm.in_process import InProcessMailboxes, LocalTransport
from autopar.runtime.engine.records import ActionTiming
from autopar.runtime.params.flat_buckets import replica_owners
from autopar.runtime.params.full_params import FullParams
from autopar.runtime.params.grad_reduce import packed, unpacked
from autopar.runtime.rank import Rank
from autopar.runtime.spec import RankSpec, TrainingRecipe, rank_text
from autopar.schedule.actions import Action
from autopar.schedule.generate import generate
from autopar.schedule.simulate import simulate
from autopar.tools.bench.bubble import bubble_bound_seconds

# pp, dp, ZeRO stage
MESHES: list[tuple[int, int, ZeroStage]] = [
    (1, 2, 0), (1, 4, 1), (2, 2, 0), (2, 2, 1), (3, 2, 1), (1, 4, 2), (3, 2, 2)
]  # fmt: skip


def several(zero: ZeroStage, count: int) -> int:
    """Number of microbatches; ZeRO-2 is for one."""
    return 1 if zero == 2 else count


MODELS: dict[str, tuple[Any, Any]] = {
    "tied": (Tied, F.cross_entropy),
    "unet": (UNet, F.mse_loss),
    "normed": (Normed, F.cross_entropy),
    "updating": (Updating, F.cross_entropy),
}


def outputs_agree(pm: Any, reference: Reference, x: Any, train: bool) -> None:
    """Outputs in order of the global batch; ends in train mode."""
    dp = pm.plan.mesh.dp
    pm.train(train)
    reference.model.train(train)
    for actual, expected in zip(leaves(pm(x)), reference.forward(x, pm.plan.microbatches, dp), strict=True):
        assert_close(actual, expected, f"output, train={train}")
    pm.train()
    reference.model.train()


CELLS = [(name, *mesh) for name in MODELS for mesh in MESHES]
KEPT = [("tied", 2, 2, 0), ("tied", 3, 2, 1), ("unet", 2, 2, 1), ("unet", 3, 2, 2), ("normed", 1, 4, 1),
        ("updating", 1, 2, 0), ("updating", 1, 4, 2)]  # fmt: skip


@pytest.mark.parametrize(("name", "pp", "dp", "zero"), only(KEPT, CELLS))
def test_equals_one_device(name: str, pp: int, dp: int, zero: ZeroStage) -> None:
    torch.manual_seed(0)
    make, loss_fn = MODELS[name]
    model = make()
    x, y, microbatches = *data(name, 5 * dp), several(zero, 3)  # of 2, 2, 1 on each replica
    plan = plan_by_hand(model, x, microbatches, even_firsts(model, x, pp), dp=dp, zero=zero)
    pm = in_threads(model, plan, x, loss_fn, optimizer=ADAMW)
    reference = Reference(model, loss_fn, ADAMW)
    for batch in (5, 2):  # accumulated
        x, y = data(name, batch * dp)
        result = pm.forward_backward(x, y, return_outputs=True)
        assert result.loss == pytest.approx(reference.forward_backward(x, y, microbatches, dp), abs=1e-5)
        assert len(result.outputs) == len(x)
        assert_all_close(pm.gradients(), reference.gradients(), "gradient")
    pm.optimizer_step()
    reference.step()
    assert pm.gradients() == {}
    for _ in range(2):
        updated_alike(pm, reference, *data(name, 5 * dp))
    assert_all_close(pm.state_dict(), reference.model.state_dict(), "state")
    outputs_agree(pm, reference, data(name, 4 * dp)[0], train=True)
    outputs_agree(pm, reference, data(name, 4 * dp)[0], train=False)
    outputs_agree(pm, reference, data(name, 2 * dp + 1)[0], train=False)  # replicas may get unequal parts, or none
    outputs_agree(pm, reference, data(name, 1)[0], train=False)
    fresh = make()
    fresh.load_state_dict(pm.state_dict())
    pm.load_state_dict(make().state_dict())
    pm.load_state_dict(fresh.state_dict())
    assert all(torch.equal(t, fresh.state_dict()[n]) for n, t in pm.state_dict().items())
    updated_alike(pm, reference, *data(name, 5 * dp))
    assert_all_close(pm.state_dict(), reference.model.state_dict(), "state after evaluation and loading")


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("loss_fn", [main_loss, loss_of_some])
@pytest.mark.parametrize("stages", [1, 2])
def test_a_head_that_only_some_replicas_read(stages: int, loss_fn: Any, zero: ZeroStage) -> None:
    torch.manual_seed(0)
    model, x = TwoHeads(), torch.randn(6, 8)
    decaying = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.5)
    plan = plan_by_hand(model, x, several(zero, 3), even_firsts(model, x, stages), dp=2, zero=zero)
    pm = in_threads(model, plan, x, loss_fn, optimizer=decaying)
    reference = Reference(model, loss_fn, decaying)
    for y in ([1] * 6, [1, 1, 1, 1, 0, 1], [0, 1, 1, 1, 1, 1], [0] * 6, [2] * 6):
        updated_alike(pm, reference, x, torch.tensor(y))
        assert_all_close(pm.state_dict(), reference.model.state_dict(), "state")


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_clipping_by_the_global_norm(zero: ZeroStage) -> None:
    torch.manual_seed(0)
    model = Tied()
    x, y = data("tied", 6)
    microbatches = several(zero, 3)
    plan = plan_by_hand(model, x, microbatches, ["layers.1.0.layer_norm", "head.linear"], dp=2, zero=zero)
    pm = in_threads(model, plan, x, F.cross_entropy, optimizer=ADAMW, clip_grad_norm=0.05)
    reference = Reference(model, F.cross_entropy, ADAMW)
    for _ in range(3):
        reference.forward_backward(x, y, microbatches, 2)
        norm = nn.utils.clip_grad_norm_(reference.model.parameters(), 0.05)
        assert norm > 0.05
        reference.step()
        assert pm.train_step(x, y).grad_norm == pytest.approx(norm.item(), rel=1e-5)
    assert_all_close(pm.state_dict(), reference.model.state_dict(), "state")


@pytest.mark.parametrize(("pp", "dp", "zero"), [(1, 2, 0), (2, 1, 0), (2, 2, 1), (1, 2, 2)])
def test_groups_by_original_names(pp: int, dp: int, zero: ZeroStage) -> None:
    torch.manual_seed(0)
    model = Tied()
    x, y = data("tied", 8)

    def group_weights(parameters: Any) -> torch.optim.Optimizer:
        groups = timm.optim.param_groups_weight_decay(parameters, 0.5, no_weight_decay_list=["embed.weight"])
        return torch.optim.AdamW(groups, lr=1e-2)

    expected = [{"params": [], "weight_decay": 0.0}, {"params": [], "weight_decay": 0.5}]
    reference = Reference(model, F.cross_entropy, lambda p: torch.optim.SGD(p, lr=1.0))
    for name, parameter in reference.model.named_parameters():
        expected[parameter.ndim > 1 and name != "embed.weight"]["params"].append(parameter)
    reference.optimizer = torch.optim.AdamW(expected, lr=1e-2)
    plan = plan_by_hand(model, x, several(zero, 2), even_firsts(model, x, pp), dp=dp, zero=zero)
    pm = in_threads(model, plan, x, F.cross_entropy, optimizer=group_weights)
    for _ in range(3):
        updated_alike(pm, reference, x, y)
    assert_all_close(pm.state_dict(), reference.model.state_dict(), "state")
    assert pm.learning_rates() == [1e-2, 1e-2]


def test_gradients_are_summed_once_a_step_and_while_the_last_backward_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    x, y = torch.randn(12, 8), torch.randint(0, 4, (12,))
    pm = in_threads(model, plan_by_hand(model, x, 3, ["1.linear"], dp=2), x, F.cross_entropy, optimizer=ADAMW)
    ranks = ranks_of(pm)
    noted: list[list[str]] = [[] for _ in ranks]
    for rank, notes in zip(ranks, noted, strict=True):

        def start_sum(
            tensor: torch.Tensor,
            over: Any,
            root: int | None = None,
            rank: Rank = rank,
            notes: list[str] = notes,
            start: Any = rank.transport.start_sum,
        ) -> Any:
            if tuple(over) == rank.spec.replica_ranks and tensor.is_floating_point():
                assert rank.current_step is not None
                notes.append(str(rank.current_step.current_action))
            return start(tensor, over, root)

        monkeypatch.setattr(rank.transport, "start_sum", start_sum)
    pm.train_step(x, y)
    assert noted == [["0B2"], ["0B2"], ["1B2"], ["1B2"]]
    pm.forward_backward(x, y)
    pm.train_step(x, y)
    pm.forward_backward(x, y)
    pm.optimizer_step()
    assert noted == [[f"{stage}B2"] * 2 + ["None"] for stage in (0, 0, 1, 1)]


@pytest.mark.parametrize(("zero", "expected"), [(0, [5, 5]), (1, [3, 2]), (2, [3, 2])])
def test_zero_divides_the_state_of_the_optimizer(zero: ZeroStage, expected: list[int]) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(5)))
    x, y = torch.randn(8, 16), torch.randn(8, 16)
    weight = 16 * 16 * 4 * 2 + 4  # two moments and a step count
    pm = in_threads(
        model, plan_by_hand(model, x, several(zero, 2), [], dp=2, zero=zero), x, F.mse_loss, optimizer=ADAMW
    )
    pm.train_step(x, y)
    assert [pm.stats()[rank].optimizer_bytes for rank in range(2)] == [n * weight for n in expected]


@pytest.mark.parametrize("zero", [1, 2])
def test_a_replica_that_owns_nothing(zero: ZeroStage) -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(8, 4, bias=False), torch.randn(8, 8), torch.randint(0, 4, (8,))
    halve = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    plan = plan_by_hand(model, x, 1, [], dp=4, zero=zero)
    pm = in_threads(model, plan, x, F.cross_entropy, optimizer=ADAMW, lr_scheduler=halve)
    reference = Reference(model, F.cross_entropy, ADAMW)
    scheduler = halve(reference.optimizer)
    for _ in range(2):
        updated_alike(pm, reference, x, y)
        pm.lr_scheduler.step()
        scheduler.step()
        assert pm.learning_rates() == scheduler.get_last_lr()
    assert_all_close(pm.state_dict(), reference.model.state_dict(), "state")
    assert sorted(pm.stats()[rank].optimizer_bytes for rank in range(4)) == [0, 0, 0, 8 * 4 * 4 * 2 + 4]


def sized(**numel: int) -> list[Weight]:
    """Flat weights of so many times 128 elements, to which buckets align."""
    return [Weight(name, "parameter", (128 * n,), "float32", True, (name,)) for name, n in numel.items()]


def test_owners_are_balanced_on_every_stage() -> None:
    stages = [sized(a=8, b=5, c=3, tied=6), sized(d=4, tied=6)]
    owners = replica_owners(stages, {"tied": (0, 1)}, 2)
    assert owners == {"tied": 0, "a": 1, "b": 0, "c": 1, "d": 1}


def test_buckets_fill_in_the_order_of_a_backward() -> None:
    weights = [*sized(a=2, b=2, c=9, d=1), Weight("half", "parameter", (256,), "float16", True, ("half",))]
    groups = group_weights(weights, 1, 128 * 16)
    assert [[w.name for w in group] for group in groups] == [["half"], ["d"], ["c"], ["b", "a"]]


def test_full_params_travel_in_buckets_of_one_owner_and_dtype() -> None:
    weights = [*sized(a=2, b=3, c=9, d=1, e=2), Weight("half", "parameter", (1,), "float16", True, ("half",))]
    parts = {w.name: nn.Parameter(torch.zeros(w.shape, dtype=getattr(torch, w.dtype))) for w in weights}
    spec = RankSpec(
        rank=0,
        mesh=Mesh(1, 2, 1),
        device="cpu",
        placement=Placement(1),
        build=lambda *_: nn.Identity(),
        weights=tuple(weights),
        holders={},
        stage_edges=(),
        recipe=TrainingRecipe(F.cross_entropy),
        storage={w.name: split_layout(0) for w in weights},
    )
    full = FullParams(parts, parts, spec, LocalTransport(0, InProcessMailboxes()))
    assert full.owners == {"c": 0, "b": 1, "a": 1, "e": 1, "d": 1, "half": 1}
    assert full.full["c"].shape == (2 * 9 * 128,) and full.full.keys() == {"c"}
    for name, part in parts.items():
        part.grad = torch.zeros_like(part) if name != "e" else None
    assert [*full.buckets()] == [(0, ["c"]), (1, ["half"]), (1, ["d", "b", "a"])]


def test_packing_keeps_shapes_values_and_memory_formats() -> None:
    like = [torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), torch.randn(3), torch.randn(())]
    given = [torch.randn(t.shape) for t in like]
    back = unpacked(packed(given, like), like)
    assert all(torch.equal(a, b) for a, b in zip(given, back, strict=True))
    assert [t.stride() for t in back] == [t.stride() for t in like]
    one = torch.randn(4, 4)
    assert packed([one], [one]).data_ptr() == one.data_ptr()


def test_batches_are_cut_by_replica_first() -> None:
    assert partition(10, 2, 3) == [2, 2, 1, 2, 2, 1]
    assert partition(5, 2, 2) == [2, 1, 1, 1]
    assert partition(1, 2, 4) == [1]


def test_a_batch_that_replicas_cannot_share() -> None:
    model, x = nn.Linear(8, 4), torch.randn(8, 8)
    pm = in_threads(model, plan_by_hand(model, x, 2, [], dp=4), x, F.cross_entropy, optimizer=ADAMW)
    expected = "A batch of 7 cannot be trained on by 4 data-parallel replicas in equal parts. Pass 4 or 8 samples"
    with pytest.raises(autopar.UsageError, match=expected):
        pm.train_step(torch.randn(7, 8), torch.randint(0, 4, (7,)))
    with pytest.raises(autopar.UsageError, match=r"A batch of 3 .* Pass 4 samples"):
        pm.forward_backward(torch.randn(3, 8), torch.randint(0, 4, (3,)))
    assert pm.gradients() == {}
    assert pm(torch.randn(3, 8)).shape == (3, 4)


def test_a_loss_that_is_not_finite_names_its_microbatch_in_the_global_batch() -> None:
    model, x = nn.Linear(8, 4), torch.randn(8, 8)
    pm = in_threads(model, plan_by_hand(model, x, 2, [], dp=2), x, F.cross_entropy, optimizer=ADAMW)
    x[5] = float("nan")
    for step in range(2):
        with pytest.warns(
            autopar.NonFiniteLossWarning, match=rf"The loss of step {step} is nan: microbatches \[2\] of 4"
        ):
            pm.train_step(x if step == 0 else x * 1, torch.zeros(8, dtype=torch.int64))
        pm.load_state_dict(model.state_dict())


def test_a_rank_is_named_by_the_axes_that_there_are() -> None:
    assert rank_text(Mesh(4), 3, Placement(4)) == "rank 3 (stage 3)"
    assert rank_text(Mesh(4), 3, Placement(4, 2, is_v=True)) == "rank 3 (stages 3 and 4)"
    assert rank_text(Mesh(1), 0, Placement(1)) == "rank 0 (stage 0)"
    assert rank_text(Mesh(1, 1, 4), 2, Placement(1)) == "rank 2 (replica 2)"
    assert rank_text(Mesh(2, 2, 2), 5, Placement(2)) == "rank 5 (stage 1, replica 0, shard 1)"


def test_the_bubble_bound_takes_the_slowest_rank_of_each_stage() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), torch.randn(8, 8)
    plan = plan_by_hand(model, x, 2, ["1.linear"], dp=2)
    seconds = {0: (1.0, 2.0), 1: (3.0, 1.0), 2: (2.0, 2.0), 3: (1.0, 4.0)}  # forward and backward
    spans = {
        rank: (
            ActionTiming(Action("F", rank // 2, 0), 0.0, forward),
            ActionTiming(Action("B", rank // 2, 0), 5.0, 5.0 + backward),
        )
        for rank, (forward, backward) in seconds.items()
    }
    expected = simulate(generate("1f1b", Placement(2), 2), [3.0, 2.0], [2.0, 4.0]).step_seconds
    assert bubble_bound_seconds(plan, spans) == expected


# -- the tensor axis: what the runtime adds to programs that run on it ------------------------------------------------


def sharded(rank: int, mesh: Mesh, owners: Mapping[str, int] | None = None, zero: ZeroStage = 0) -> Rank:
    """A rank that holds a split, a shared and a replicated weight."""
    shapes = {"split": (2, 3), "shared": (4,), "replicated": (5,)}
    spec = RankSpec(
        rank=rank,
        mesh=mesh,
        device="cpu",
        placement=Placement(mesh.pp),
        build=lambda *_: nn.Identity(),
        weights=tuple(Weight(n, "parameter", shape, "float32", True) for n, shape in shapes.items()),
        holders={},
        stage_edges=(),
        recipe=TrainingRecipe(F.cross_entropy, functools.partial(torch.optim.SGD, lr=1.0)),
        storage={"split": split_layout(0), "shared": broadcast_layout()},
        owners=owners or {},
        zero=zero,
    )
    return Rank(spec, {n: torch.zeros(shape) for n, shape in shapes.items()}, LocalTransport(rank, HUBS[mesh]))


HUBS = {Mesh(1, 2, 1): InProcessMailboxes(), Mesh(1, 2, 2): InProcessMailboxes()}


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_step_over_shards_and_replicas(zero: ZeroStage) -> None:
    mesh, owners = Mesh(1, 2, 2), {"split": 0, "shared": 1, "replicated": 0} if zero else {}
    ranks = [sharded(rank, mesh, owners, zero) for rank in range(4)]
    gradients = {
        name: [torch.randn(ranks[0].weights[name].shape) for _ in range(4)]
        for name in ("split", "shared", "replicated")
    }
    gradients["replicated"][1] = gradients["replicated"][0]  # equal on the shards of a replica
    gradients["replicated"][3] = gradients["replicated"][2]
    for rank in ranks:
        for name, parameter in rank.trainable.items():
            parameter.grad = gradients[name][rank.spec.rank].clone()
    assert set(ranks[1].gradients()) == {"split", "shared"}  # a copy of what rank 0 gives
    with ThreadPoolExecutor(4) as threads:
        norms = [result.grad_norm for result in threads.map(Rank.optimizer_step, ranks, [0] * 4)]
        states = list(threads.map(Rank.state, ranks))
    whole = {
        "split": torch.cat(
            [gradients["split"][0] + gradients["split"][2], gradients["split"][1] + gradients["split"][3]]
        ),
        "shared": torch.stack(gradients["shared"]).sum(0),
        "replicated": gradients["replicated"][0] + gradients["replicated"][2],
    }
    norm = nn.utils.get_total_norm(whole.values()).item()
    assert norms == [pytest.approx(norm, rel=1e-5)] * 4
    for number, rank in enumerate(ranks):
        expected = whole | {"split": whole["split"].chunk(2)[number % 2]}
        assert not zero or sorted(rank.stored) == sorted(n for n in owners if owners[n] == rank.place.replica)
        for state in (rank.stored, states[number]):
            for name, tensor in state.items():
                assert_close(tensor.detach(), -expected[name], name)
    assert [sorted(state) for state in states] == [["replicated", "shared", "split"], ["split"], [], []]


def test_shards_draw_the_same_random_numbers() -> None:
    seeds = [sharded_spec.rank_seed for sharded_spec in (sharded(r, Mesh(1, 2, 2)).spec for r in range(4))]
    assert seeds == [0, 0, 1, 1]


# -- real processes ---------------------------------------------------------------------------------------------------


WORLDS = [(1, 2, 1), (1, 4, 0), (2, 2, 0), (2, 2, 1), (1, 2, 2), (2, 2, 2)]


@pytest.mark.parametrize(("pp", "dp", "zero"), only([(2, 2, 2)], WORLDS))
def test_processes_equal_one_device(pp: int, dp: int, zero: ZeroStage) -> None:
    torch.manual_seed(0)
    name = "normed" if pp == 1 else "tied"
    make, loss_fn = MODELS[name]
    model = make()
    x, y = data(name, 5 * dp)
    microbatches = several(zero, 3)
    plan = plan_by_hand(model, x, microbatches, even_firsts(model, x, pp), dp=dp, zero=zero)
    reference = Reference(model, loss_fn, ADAMW)
    with autopar.parallelize(model, pp * dp, x, loss_fn=loss_fn, optimizer=ADAMW, plan=plan) as pm:
        assert (pm.data_rank, pm.data_size) == (0, 1)
        outputs_agree(pm, reference, x, train=False)
        for _ in range(2):
            loss = reference.forward_backward(x, y, microbatches, dp)
            assert pm.forward_backward(x, y).loss == pytest.approx(loss, abs=1e-5)
            assert_all_close(pm.gradients(), reference.gradients(), "gradient")
        pm.optimizer_step()
        reference.step()
        for _ in range(2):
            updated_alike(pm, reference, x, y)
        assert_all_close(pm.state_dict(), reference.model.state_dict(), "state")
        outputs_agree(pm, reference, x[:-1], train=False)
        assert pm.measure_memory(x, y).keys() == pm.stats().keys() == set(range(pp * dp))


@pytest.mark.parametrize("zero", only([2], [0, 1, 2]))
def test_the_predicted_peak_counts_gradients_that_wait_for_their_bucket(zero: ZeroStage) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.ReLU())), nn.Linear(512, 10))
    x, y = torch.randn(8, 512), torch.randint(0, 10, (8,))
    with autopar.parallelize(model, 2, x, optimizer=ADAMW, dp=2, zero=zero, microbatches=1) as pm:
        pm.train_step(x, y)
        measured = pm.measure_memory(x, y)
        for own, predicted in zip(measured.values(), pm.plan.prediction.peak_bytes, strict=True):
            assert 0.9 * predicted < own < 1.02 * predicted
