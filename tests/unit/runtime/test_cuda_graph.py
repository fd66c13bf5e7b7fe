"""Parts of CUDA-graph capture that need no GPU: recorded flags, optimizers, message buffers."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autopar
from autopar import UsageError
from autopar.api.options import Options
from autopar.errors import CaptureWarning
from autopar.ir.comm_sizes import MESSAGE_ALIGNMENT, message_bytes
from autopar.ir.plan_parts import Precision
from autopar.runtime.comm.in_process import InProcessMailboxes, LocalTransport
from autopar.runtime.comm.symmetric_p2p import message_slots
from autopar.runtime.engine import cuda_graph as graphed
from autopar.runtime.engine.closure_guard import closure_fingerprint
from autopar.runtime.engine.cuda_graph import is_capturable, make_capturable, tensor_learning_rates
from autopar.runtime.engine.recorded_flags import FlagRecorder
from autopar.runtime.spec import DeviceStepResult, StepRequest


def optimizer_of(kind: Any, **options: Any) -> torch.optim.Optimizer:
    return kind([nn.Parameter(torch.ones(3))], lr=0.1, **options)


def test_answers_are_noted_and_recalled_without_asking() -> None:
    hub = InProcessMailboxes(timeout_seconds=5.0)
    here, there = FlagRecorder(LocalTransport(0, hub)), LocalTransport(1, hub)
    here.record()
    there.send_flags([True, False], 0, 7)
    assert here.receive_flags(2, 1, 7)().tolist() == [1, 0]
    there.start_sum(torch.tensor([1, 0], dtype=torch.int32), (0, 1))
    assert here.sum_flags([True, True], (0, 1)) == [2, 1]
    noted = here.stop()
    for _ in range(2):  # as often as a step is captured
        here.replay(noted)
        here.send_flags([True], 1, 9)
        assert here.receive_flags(2, 1, 7)().tolist() == [1, 0]
        assert here.sum_flags([True, True], (0, 1)) == [2, 1]
        assert here.stop() == noted == [[1, 0], [2, 1]]
    assert hub.boxes.get((0, 1, 9)) is None, "flags were sent while answers were recalled"
    here.record()
    there.send_flags([False], 0, 7)
    assert here.receive_flags(1, 1, 7)().tolist() == [0]
    assert here.stop() == [[0]]  # of this step alone


def test_only_optimizers_that_count_on_the_device_are_captured() -> None:
    adamw, sgd = optimizer_of(torch.optim.AdamW), optimizer_of(torch.optim.SGD)
    assert not is_capturable(adamw)
    for optimizer in (adamw, sgd):
        make_capturable(optimizer)
    assert is_capturable(adamw)
    assert not is_capturable(sgd)


class Counting(torch.optim.AdamW):
    """Counts its steps in Python, which a replay would not run."""

    def step(self, closure: Any = None) -> Any:
        self.count = getattr(self, "count", 0) + 1
        return super().step(closure)


class Renamed(torch.optim.AdamW):
    """Adds nothing to the step."""


class OfItsOwn(torch.optim.Optimizer):
    """Has torch's option, and so keeps its numbers on the device."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "capturable": False})

    def step(self, closure: Any = None) -> Any: ...


def test_python_of_a_step_is_not_captured() -> None:
    kinds = (torch.optim.AdamW, Renamed, OfItsOwn, Counting)
    optimizers = [optimizer_of(kind) for kind in kinds]
    for optimizer in optimizers:
        make_capturable(optimizer)
    assert [is_capturable(optimizer) for optimizer in optimizers] == [True, True, True, False]
    torch.optim.lr_scheduler.StepLR(optimizers[1], 1)
    assert is_capturable(optimizers[1])
    for register in (optimizers[0].register_step_pre_hook, optimizers[0].register_step_post_hook):
        hook = register(lambda *_: None)
        assert not is_capturable(optimizers[0])
        hook.remove()
        assert is_capturable(optimizers[0])


def test_all_numbers_of_a_parameter_are_kept_where_it_is() -> None:
    """Even scalars from before the optimizer was made capturable (NAdam's product of momenta)."""
    optimizer = optimizer_of(torch.optim.NAdam)
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.sum().backward()
    optimizer.step()
    state = optimizer.state[parameter]
    numbers = {key for key, tensor in state.items() if tensor.ndim == 0}
    assert numbers == {"step", "mu_product"}
    optimizer.param_groups[0]["params"] = [on_meta := parameter.to("meta")]
    optimizer.state[on_meta] = state
    make_capturable(optimizer)
    assert {key for key, tensor in optimizer.state[on_meta].items() if tensor.is_meta} == numbers


def test_rates_are_given_for_a_while() -> None:
    optimizer = optimizer_of(torch.optim.AdamW)
    rate = torch.tensor(0.5)
    with pytest.raises(RuntimeError), tensor_learning_rates(optimizer, [rate]):
        assert optimizer.param_groups[0]["lr"] is rate
        raise RuntimeError
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_the_kind_of_a_step_is_all_but_its_content() -> None:
    """Ranks decide by it together what they capture, so it must not depend on what one of them alone is given."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(8, 4), torch.randn(6, 8), torch.randint(0, 4, (6,))
    kinds = []
    with autopar.parallelize(model, 1, x, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), microbatches=2) as pm:
        rank = pm._ranks.rank  # type: ignore[union-attr]
        run = rank.compute
        rank.compute = lambda request: (kinds.append(request.signature), run(request))[1]
        cases: list[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]] = [
            (x, y, {}), (x + 1, y.flip(0), {}), (x, F.one_hot(y, 4).float(), {}), (x[:4], y[:4], {}),
            (x, y, {"return_outputs": True}), (x, y, {"share": 0.5}),
        ]  # fmt: skip
        for inputs, target, options in cases:
            pm.train_step(inputs, target, **options)
    assert kinds[0] == kinds[1]
    assert len(set(kinds)) == 5


class Pools:
    """Stands in for the GPU's: a graph is in a pool from its capture until it is given up, and with its last graph a
    pool is gone for good, as those of torch's allocator are."""

    def __init__(self) -> None:
        self.users: dict[int, int] = {}
        self.capturing = False

    @contextmanager
    def capture(self, graph: PooledGraph, pool: int | None, *_: Any, **__: Any) -> Iterator[None]:
        number = len(self.users) if pool is None else pool
        if self.users.get(number) == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self.users[number] = self.users.get(number, 0) + 1
        graph.pools, graph.number = self, number
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False


class PooledGraph:
    """A graph whose replay computes nothing."""

    pools: Pools | None = None
    number = 0

    def pool(self) -> int:
        return self.number

    def replay(self) -> None: ...

    def __del__(self) -> None:
        if self.pools is not None:
            self.pools.users[self.number] -= 1


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Pools:
    made = Pools()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", PooledGraph)
    monkeypatch.setattr(torch.cuda, "graph", made.capture)
    monkeypatch.setattr(graphed, "static_like", lambda leaf, device: leaf)  # what is captured here is also computed
    return made


class Captured:
    """A model on one rank whose steps become graphs."""

    def __init__(self, loss_fn: Any = F.cross_entropy) -> None:
        torch.manual_seed(0)
        model, sgd = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), functools.partial(torch.optim.SGD, lr=0.1)
        self.pm = autopar.parallelize(model, 1, torch.randn(16, 8), loss_fn=loss_fn, optimizer=sgd, microbatches=1)
        self.rank = self.pm._ranks.rank  # type: ignore[union-attr]
        self.graphs = self.rank.graphs = graphed.CudaGraphCache(self.rank)

    def train(self, *sizes: int) -> list[float]:
        """Losses of a step for each batch size."""
        return [self.pm.train_step(torch.ones(n, 8), torch.arange(n) % 4).loss for n in sizes]

    def sizes(self) -> list[int]:
        """Batch sizes of which there is a graph, the one used longest ago first."""
        return [len(kind.data.inputs[0][0]) for kind in self.graphs.cached_steps.values() if kind.graph and kind.data]


def test_a_kind_gives_up_its_graph_once_it_is_idle(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed, "MAX_GRAPHS", 2)
    monkeypatch.setattr(graphed, "EVICT_AFTER_STEPS", 8)
    monkeypatch.setattr(graphed, "MAX_CACHED_STEPS", 5)
    here = Captured()
    here.train(16, 16, 12, 12)
    assert here.sizes() == []
    here.train(16, 12)
    assert here.sizes() == [16, 12] and pools.users == {0: 2}  # graphs share a pool
    here.train(1, 2, 3, 12)  # as many others as are remembered
    assert here.sizes() == [16, 12] and len(here.graphs.cached_steps) == 5
    here.train(3, 3, 3)  # after 5, step 13: that of 16 was used in step 5
    assert here.sizes() == [16, 12]
    here.train(3)
    assert here.sizes() == [12, 3] and pools.users == {0: 2}
    here.train(4, 5)  # more than are remembered
    assert len(here.graphs.cached_steps) == 5 and here.sizes() == [12, 3]


def test_a_graph_behind_the_last_one_has_a_pool_of_its_own(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed, "MAX_GRAPHS", 1)
    monkeypatch.setattr(graphed, "EVICT_AFTER_STEPS", 2)
    here = Captured()
    here.train(16, 16, 16, 12, 12, 12)
    assert here.sizes() == [12] and pools.users == {0: 0, 1: 1}
    here.graphs.forget()
    assert pools.users == {0: 0, 1: 0}


def test_a_kind_that_is_refused_keeps_nothing_and_goes_on(pools: Pools) -> None:
    here, plain = Captured(), Captured()
    plain.rank.graphs = None
    failed: list[bool] = []

    def fails_once(_: torch.Tensor) -> None:
        if pools.capturing and not failed:
            failed.append(True)
            raise RuntimeError("operation not permitted when stream is capturing")

    here.rank.parameter("0.weight").register_hook(fails_once)  # in the backward, behind another layer's gradients
    sizes = (16, 12, 16, 12, 16, 12)
    with pytest.warns(CaptureWarning, match="without CUDA graphs, which is slower: operation not permitted when"):
        losses = here.train(*sizes)
    refused, captured = here.graphs.cached_steps.values()
    assert (refused.capture_error, captured.capture_error) == ("operation not permitted when stream is capturing", "")
    assert (refused.graph, refused.data, refused.result, refused.step) == (None,) * 4
    assert not refused.marks and not refused.gradients
    assert here.sizes() == [12] and captured.step is not None
    assert losses + here.train(16, 16) == plain.train(*sizes, 16, 16)


class Ramped:
    """Cross-entropy by a weight, which its user or the loss itself changes."""

    def __init__(self, growth: float) -> None:
        self.growth, self.weight, self.epochs = growth, 1.0, 0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.weight += self.growth
        return self.weight * F.cross_entropy(output, target)


def test_a_loss_that_changes_a_number_in_each_step_is_not_captured(pools: Pools) -> None:
    here, plain = Captured(Ramped(1.0)), Captured(Ramped(1.0))
    plain.rank.graphs = None
    sizes = (16,) * 5
    with pytest.warns(CaptureWarning, match=r"loss_fn changes `weight` \(was 2\.0, is 3\.0\) from step to step"):
        losses = here.train(*sizes)
    assert losses == plain.train(*sizes) and here.sizes() == []


def test_a_number_that_a_captured_loss_reads_cannot_be_changed(pools: Pools) -> None:
    loss_fn = Ramped(0.0)
    here = Captured(loss_fn)
    here.train(16, 16, 16)
    loss_fn.epochs = 1  # which the loss does not read
    here.train(16)
    loss_fn.weight = 0.5
    with pytest.raises(UsageError, match=r"^loss_fn reads `weight` \(was 1\.0, is 0\.5\), and .*cuda_graph=False\."):
        here.train(16)


SCALE = 3.0


def settings(options: dict[str, Any], smoothing: float) -> Any:
    count = [0]

    def loss_fn(output: torch.Tensor, target: torch.Tensor, power: int = 2, *, sign: int = 1) -> torch.Tensor:
        count[0] += 1
        scaled = [value * SCALE for value in output]
        return sign * options["weight"] * smoothing * scaled[0] ** power

    return loss_fn


def test_what_a_function_reads() -> None:
    options = {"weight": 0.5, "name": "not read", "deep": {"weight": 1}}
    loss_fn = settings(options, 0.1)
    expected = {
        "SCALE": "3.0", "count.0": "0", "options.weight": "0.5", "power": "2", "sign": "1", "smoothing": "0.1",
    }  # fmt: skip
    assert closure_fingerprint(loss_fn) == expected
    options["weight"] = float("nan")
    assert closure_fingerprint(loss_fn) == closure_fingerprint(loss_fn) == expected | {"options.weight": "nan"}
    part = functools.partial(loss_fn, power=4)
    assert closure_fingerprint(part)["power"] == "4"
    ramped = Ramped(0.25)
    assert closure_fingerprint(ramped) == closure_fingerprint(ramped.__call__) == {"growth": "0.25", "weight": "1.0"}
    several = [Ramped(0.5), Ramped(0.75)]
    assert closure_fingerprint(lambda output, target: several[0](output, target)) == {
        "several.0.growth": "0.5", "several.0.weight": "1.0", "several.1.growth": "0.75", "several.1.weight": "1.0",
    }  # fmt: skip
    assert closure_fingerprint(F.cross_entropy) == {}
    assert closure_fingerprint(nn.CrossEntropyLoss(label_smoothing=0.1))["label_smoothing"] == "0.1"

    def recursive(depth: int) -> Any:
        return recursive(depth - 1) if depth else later

    assert closure_fingerprint(recursive) == {}
    later = 7
    assert closure_fingerprint(recursive) == {"later": "7"}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_abandoned_step_leaves_no_gradient(precision: Precision) -> None:
    """A step that raises in its backward, behind some layers' gradients, and is then run again."""
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(6, 8), torch.arange(6) % 4
    sgd = functools.partial(torch.optim.SGD, lr=0.1)

    def fails(_: torch.Tensor) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    def norms(attempts: int) -> list[float | None]:
        with autopar.parallelize(model, 1, x, optimizer=sgd, microbatches=1, precision=precision) as pm:
            rank = pm._ranks.rank  # type: ignore[union-attr]
            run = rank.compute

            def compute(request: StepRequest) -> DeviceStepResult:
                for _ in range(attempts):
                    leaf = rank.compute_params.copies.get(
                        "0.weight", rank.weights["0.weight"]
                    )  # what the program reads
                    hook = leaf.register_hook(fails)
                    with pytest.raises(RuntimeError, match="not permitted"):
                        run(request)
                    hook.remove()
                    rank.abandon_step()
                return run(request)

            first = pm.train_step(x, y).grad_norm
            rank.compute = compute
            return [first, *(pm.train_step(x, y).grad_norm for _ in range(2))]

    assert norms(2) == norms(0)


def test_the_transport_reaches_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they do with it: tests/integration/collectives and tests/gpu/test_gpu_graphs.py."""
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    with pytest.raises(UsageError, match=r"transport='mpi' is unknown\. It is one of auto, nccl, symmetric"):
        autopar.parallelize(model, 2, x, transport="mpi")
    with pytest.raises(UsageError, match=r"^transport='symmetric' needs GPUs; .* Leave it out\.$"):
        autopar.parallelize(model, 2, x, transport="symmetric")
    monkeypatch.setattr(Options, "check_machine", lambda self, device_type: None)
    with autopar.parallelize(model, 1, x, transport="symmetric") as pm:
        assert pm._ranks.rank.spec.transport == "symmetric"  # type: ignore[union-attr]


@given(st.dictionaries(st.tuples(st.integers(0, 3), st.integers(0, 50)), st.integers(1, 5000)))
def test_messages_lie_apart_and_both_ends_agree(messages: dict[tuple[int, int], int]) -> None:
    """The receiver lays out what each peer sends; a sender knows its own messages alone, and where they begin."""
    sizes = [sum(message_bytes(n) for (peer, _), n in messages.items() if peer == p) for p in range(4)]
    starts = {peer: sum(sizes[:peer]) for peer in range(4)}
    found = message_slots(messages, starts)
    taken = sorted((place, place + messages[key]) for key, (place, _) in found.items())
    assert all(end <= begin for (_, end), (begin, _) in pairwise(taken))
    assert all(place % MESSAGE_ALIGNMENT == 0 for place, _ in found.values())
    for peer in range(4):
        own = {(9, tag): n for (p, tag), n in messages.items() if p == peer}
        sent = message_slots(own, {9: starts[peer]})
        assert {tag: at for (_, tag), at in sent.items()} == {tag: at for (p, tag), at in found.items() if p == peer}
        signals = [signal for (p, _), (_, signal) in found.items() if p == peer]
        assert sorted(signals) == list(range(len(own)))
