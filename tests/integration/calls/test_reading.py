"""Results that are read after the call: what they are, when they warn, and which errors they bring."""

from __future__ import annotations

import functools
import json
import os
import pickle
import re
import signal
import warnings
from collections.abc import Iterator
from functools import reduce
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.faults import FAULT_SECONDS, alive, mlp, wait_for, workers
from support.forks import run_on_two
from support.handmade import plan_by_hand
from support.training import digits, small
from torch._dynamo.exc import Unsupported
from torch._inductor.exc import InductorError

import autopar
from autopar import DeviceMemoryError, NonFiniteLossWarning, StepResult, UsageError, WorkerError
from autopar.api.batch_agreement import BatchAgreement, check_same_samples, checksum, fingerprint
from autopar.api.step_result import MAX_STEPS_IN_FLIGHT, StepMetrics
from autopar.ir.mesh import Mesh
from autopar.train import Checkpoints, JsonLog, Trainer, evaluation_loader, training_loader

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)
torch.manual_seed(0)
X, Y = torch.randn(6, 8), torch.randint(0, 4, (6,))


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    assert workers() == {}


def start(loss_fn: Any = F.cross_entropy, late: bool = True, **options: Any) -> autopar.ParallelModel:
    """A model on two workers, which reply to steps as those on GPUs do if they are to be ``late``."""
    torch.manual_seed(0)
    plan = plan_by_hand(mlp(), X, 3, ["2.linear"])
    pm = autopar.parallelize(mlp(), 2, X, loss_fn=loss_fn, optimizer=ADAMW, plan=plan, seed=1, **options)
    if late:
        pm._ranks.on_gpu = [True, True]  # type: ignore[union-attr]
    return pm


# -- the value ---------------------------------------------------------------------------------------------------------


def test_a_result_reads_its_numbers_once_and_when_they_are_asked_for() -> None:
    asked = []

    def read() -> StepMetrics:
        asked.append(True)
        return StepMetrics(0.5, 0.1, 2.0)

    result = StepResult(read, "outputs")
    assert not result.ready and not asked
    assert (result.loss, result.grad_norm, result.skipped, result.step_seconds) == (0.5, 2.0, False, 0.1)
    assert result.ready and len(asked) == 1
    shown = "StepResult(loss=0.5, step_seconds=0.1, grad_norm=2.0, outputs='outputs', skipped=False)"
    assert repr(result) == repr(StepResult(read, "outputs")) == shown
    assert repr(pickle.loads(pickle.dumps(StepResult(read, "outputs")))) == shown


# -- workers -----------------------------------------------------------------------------------------------------------


def test_late_results_are_those_of_plain_calls() -> None:
    found = []
    for late in (False, True):
        with start(late=late) as pm:
            results = []
            for step in range(5):
                results.append(pm.forward_backward(X * step, Y, share=0.5))
                assert results[-1].ready != late
                results.append(pm.train_step(X + step, Y, share=0.5))
                assert [r.ready for r in results] == [True] * (len(results) - (MAX_STEPS_IN_FLIGHT if late else 0)) + [
                    not late
                ] * (MAX_STEPS_IN_FLIGHT if late else 0)
            kept = pm.train_step(X, Y, return_outputs=True)
            assert kept.ready and kept.outputs.shape == (6, 4)
            norms = pm.forward_backward(X, Y), pm.optimizer_step()
            state = pm.state_dict()
        # Read after the end: closing waits for what is under way.
        values = [(r.loss, r.grad_norm, r.skipped) for r in [*results, kept]]
        found.append((values, norms[0].loss, norms[1], state))
    assert found[0][:3] == found[1][:3]
    assert all(torch.equal(tensor, found[1][3][name]) for name, tensor in found[0][3].items())


def test_a_late_loss_that_is_not_finite_warns_where_it_is_read() -> None:
    with start() as pm:
        assert repr(pm) == f"ParallelModel({pm.plan.model.name}, {pm.plan.mesh})"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            first, second = pm.train_step(X * torch.nan, Y), pm.train_step(X, Y)
        with pytest.warns(NonFiniteLossWarning, match=r"loss of step 0 is nan: microbatches \[0, 1, 2\]") as told:
            assert first.loss != first.loss
        assert told[0].filename == __file__
        with pytest.warns(NonFiniteLossWarning, match="loss of step 1 is nan") as told:  # read by nobody else
            pm.train_step(X, Y)
            pm.train_step(X, Y)
        assert told[0].filename == __file__
        with pytest.warns(NonFiniteLossWarning, match="loss of step 3 is nan"):
            pm.close()  # that of step 2 too
    assert second.ready and repr(pm).endswith(", closed)")


def test_an_error_of_a_late_step_is_raised_by_its_call() -> None:
    def broken(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("no loss today")

    pm = start(broken)
    with pytest.raises(
        WorkerError, match=r"Rank 1 \(stage 1\) failed during train_step in action 1F0: ArithmeticError"
    ):
        pm.train_step(X, Y)


@pytest.mark.parametrize("read", [False, True])
def test_a_worker_that_dies_after_its_reply_is_named_by_what_comes_next(read: bool) -> None:
    pm = start()
    result = pm.train_step(X, Y)
    pids = workers()
    os.kill(pids[1], signal.SIGKILL)
    wait_for(lambda: not alive(pids[1]), FAULT_SECONDS)
    during = "train_step of step 0" if read else "train_step"
    with pytest.raises(WorkerError, match=rf"^Rank 1 \(stage 1\) died during {during}: killed by SIGKILL"):
        _ = result.loss if read else pm.train_step(X, Y)
    for _ in range(2):
        with pytest.raises(UsageError, match="workers are gone: Rank 1"):
            _ = result.loss
    pm.close()


def test_an_error_that_may_come_from_an_earlier_step_says_so() -> None:
    def sometimes(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if target.max() > 10:
            raise ArithmeticError("no loss today")
        return F.cross_entropy(output, target % 4)

    pm = start(sometimes)
    pm.train_step(X, Y)
    with pytest.raises(
        WorkerError, match=r"(?s)may come from what was launched before and not read yet: train_step of step 0\."
    ):
        pm.train_step(X, Y + 20)
    pm.close()


# -- memory ------------------------------------------------------------------------------------------------------------


def full(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore words of torch")


def hides_that_it_is_full(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """As torch.compile does where memory runs out in what it has compiled as a whole."""
    try:
        return full(output, target)
    except torch.OutOfMemoryError:
        raise Unsupported("Attempt to trace generator") from None


def is_full_while_compiling(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """As inductor does where memory runs out while it compiles."""
    try:
        return full(output, target)
    except torch.OutOfMemoryError as error:
        raise InductorError(error, None) from None


def gives_up(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that has its own answer to a lack of memory."""
    try:
        return full(output, target)
    except torch.OutOfMemoryError:
        raise ValueError("no room for the large loss") from None


OUT_OF_MEMORY = (
    r"ran out of memory during train_step in action {action}, with {region} on cpu: CUDA out of memory\. Tried to "
    r"allocate 2\.00 GiB\. Its peak was .*B of .*iB; the plan predicted 0 B\. Use more microbatches, "
    r"recompute=\"all\" or more devices; or pass memory= with less than 0 B"
)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("loss_fn", [full, hides_that_it_is_full, is_full_while_compiling])
def test_out_of_memory_names_rank_stage_and_peaks(late: bool, loss_fn: Any) -> None:
    pm = start(loss_fn, late)
    expected = OUT_OF_MEMORY.format(action="1F0", region=r"2\.linear to 5\.dropout")
    with pytest.raises(DeviceMemoryError, match=rf"^Rank 1 \(stage 1\) {expected}"):
        pm.train_step(X, Y)


@pytest.mark.parametrize("loss_fn", [full, hides_that_it_is_full])
def test_out_of_memory_in_this_process(loss_fn: Any) -> None:
    plan = plan_by_hand(mlp(), X, 3, [])
    pm = autopar.parallelize(mlp(), 1, X, loss_fn=loss_fn, optimizer=ADAMW, plan=plan)
    expected = OUT_OF_MEMORY.format(action="0F0", region=r"0\.linear to 5\.dropout")
    with pytest.raises(DeviceMemoryError, match=rf"^Rank 0 \(stage 0\) {expected}"):
        pm.train_step(X, Y)
    with pytest.raises(UsageError, match="was closed: DeviceMemoryError during train_step"):
        pm.train_step(X, Y)


def test_what_is_raised_while_handling_a_lack_of_memory_is_an_error_of_its_own() -> None:
    with pytest.raises(WorkerError, match="ValueError: no room for the large loss"):
        start(gives_up, False).train_step(X, Y)
    plan = plan_by_hand(mlp(), X, 3, [])
    pm = autopar.parallelize(mlp(), 1, X, loss_fn=gives_up, optimizer=ADAMW, plan=plan)
    with pytest.raises(ValueError, match="no room for the large loss"):
        pm.train_step(X, Y)


# -- the training loop -------------------------------------------------------------------------------------------------


def run(folder: Path, late: bool, stop_at: int | None = None) -> list[dict[str, Any]]:
    """The lines of a run's log; one that is to ``stop_at`` an update has Ctrl-C there."""
    data = digits()
    with autopar.parallelize(small(), 2, torch.empty(20, 1, 8, 8), optimizer=ADAMW, pp=2, microbatches=2) as pm:
        if late:
            pm._ranks.on_gpu = [True, True]  # type: ignore[union-attr]
        loader = training_loader(pm, data, 20, seed=1)
        every = Checkpoints(folder, every=3)
        stop = Stop(stop_at)
        trainer = Trainer(
            pm, loader, evaluation_loader(data, 20, pm), epochs=2, callbacks=(JsonLog(folder), every, stop)
        )
        stop.late = late
        if stop_at is None:
            trainer.fit()
        else:
            with pytest.raises(KeyboardInterrupt):
                trainer.fit()
            assert trainer.saved == trainer.position and trainer.position.update == stop_at
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if k not in ("samples_per_second", "peak_bytes", "data_share")} for line in lines
    ]


class Stop(autopar.train.Callback):
    """Ctrl-C after some update; and whether callbacks hear of updates when they are over or later."""

    def __init__(self, at: int | None) -> None:
        self.at, self.late = at, False
        self.behind: list[int] = []

    def on_step(self, trainer: autopar.train.TrainerView, report: Any) -> None:
        self.behind.append(trainer.position.update - report.update)

    def on_update(self, trainer: autopar.train.TrainerView) -> None:
        if trainer.position.update == self.at:
            os.kill(os.getpid(), signal.SIGINT)

    def on_end(self, trainer: autopar.train.TrainerView) -> None:
        # Updates 3, 6 and 9 are followed by a checkpoint, 5 and 10 by an evaluation: all before is told then.
        late = [2, 1, 0, 1, 0, 0, 2, 1, 0, 0] if self.at is None else [2, 1, 0, 0]
        expected = late if self.late else [0] * len(late)
        assert self.behind == expected, self.behind


def test_a_run_with_late_results_writes_the_same_log(tmp_path: Path) -> None:
    early, late = run(tmp_path / "early", False), run(tmp_path / "late", True)
    assert early == late and [line["update"] for line in late] == list(range(1, 11))


def test_ctrl_c_with_late_results_saves_all_that_was_done(tmp_path: Path) -> None:
    early, late = run(tmp_path / "early", False, 4), run(tmp_path / "late", True, 4)
    assert early == late and [line["update"] for line in late] == [1, 2, 3, 4]


# -- what ranks of a launcher tell each other --------------------------------------------------------------------------


def test_a_mark_tells_batches_apart() -> None:
    x, y = torch.randn(8, 3, 20, 20), torch.arange(8)
    own = fingerprint([x, y])
    assert (
        int(own)
        == int(fingerprint([x.clone(), y.clone()]))
        == int(fingerprint([x.to(memory_format=torch.channels_last), y]))
    )
    for other in ([x.roll(1, 0), y], [x, y.roll(1)], [x], [y, x], [-x, y], [x[:4], y[:4]]):
        assert int(fingerprint(other)) != int(own)
    for odd in (torch.zeros(0, 3), torch.tensor(True), torch.zeros(4, 0), torch.randn(2, 3, dtype=torch.complex64)):
        assert int(fingerprint([odd])) != 0


class Told:
    """Ranks of a launcher, for which the others' rows are given, and their texts."""

    def __init__(self, others: list[list[int]], refused: bool = False, call: str = "a step", *earlier: str) -> None:
        self.others = [
            [*row, refused, checksum(call, reduce(lambda sum, c: checksum(c, sum), earlier, 0))] for row in others
        ]
        self.texts: list[Any] = ["too few" if refused else [*earlier, call]] * len(others)
        self.gathers: list[Any] = []

    def exchange(self, row: Any, uses_files: bool = False) -> Any:
        return lambda: [list(map(int, row)), *self.others]

    def gathered(self, text: Any) -> list[Any]:
        self.gathers.append(text)
        return [text, *self.texts]


def test_an_agreement_names_the_ranks_that_differ() -> None:
    mesh = Mesh(1, 2, 2)
    with pytest.raises(UsageError, match=r"^Ranks 2 and 3 were given different inputs or targets, but share each"):
        check_same_samples([5, 5, 6, 7], mesh)
    check_same_samples([5, 0, 6, 6], mesh)  # rank 1 has nothing to compare
    pipelines = Mesh(2, 1, 2)
    check_same_samples([5, 6, 7, 6], pipelines)
    with pytest.raises(UsageError, match=r"^Ranks 0 and 2 were given .* but share a replica \(pp=2, tp=1\)"):
        check_same_samples([5, 6, 7, 6], pipelines, whole_replicas=True)
    ranks: Any = Told([[4, 1, 9, 8, 70, 5], [4, 0, 9, 9, 71, 6], [4, 0, 9, 9, 71, 6]])
    agreement = BatchAgreement(ranks, mesh, 2)
    agreement.fingerprints = lambda given: (9, 9)  # type: ignore[method-assign]
    with pytest.raises(UsageError, match=r"^Ranks 0 and 1 were given .* 2 calls ago, so that updates since are wrong"):
        agreement.start("a step", 4, 70, 5, [])()
    assert agreement.any_flag and (agreement.kinds, agreement.shapes) == ((70, 70, 71, 71), (5, 5, 6, 6))
    ranks.others[2][0] = 5
    with pytest.raises(UsageError, match=r"different sizes: 4 on data rank 0, 4 on data rank 1, 5 on data rank 1"):
        agreement.start("a step", 4, 70, 5, [])()


def test_content_is_compared_on_the_first_batches_of_a_signature_and_then_sampled() -> None:
    ranks: Any = Told([[4, 0, 7, 0, 70, 5]])
    agreement = BatchAgreement(ranks, Mesh(1, 2, 1), 1)
    refused: dict[int, list[int]] = {70: [], 71: []}
    for kind, number in [*product((70,), range(1, 34)), (71, 1)]:
        try:
            agreement.start("a step", 4, kind, 5, [torch.ones(4)])()
        except UsageError:
            refused[kind].append(number)
    assert refused == {70: [1, 2, 3, 16, 32], 71: [1]} and not ranks.gathers


def test_a_call_that_a_rank_refuses_or_does_not_make_is_an_error_of_all() -> None:
    row = [4, 1, 0, 0, 70, 5]
    cases = (
        (Told([row], refused=True), "^Rank 1 refused its part of a step, so nothing has changed on any rank: too few$"),
        (Told([row], call="no step"), "^The ranks make different calls: a step on rank 0, no step on rank 1. Nothing"),
    )
    for ranks, error in cases:
        told: Any = ranks
        agreement = BatchAgreement(told, Mesh(1, 2, 1), 1)
        with pytest.raises(UsageError, match=error):
            agreement.start("a step", 4, 70, 5, [])()
        assert agreement.any_flag and not agreement.num_batches
        agreement.refuse(UsageError("too many"))
        assert ranks.gathers[-1] == "too many"


def test_calls_that_are_not_compared_by_themselves_are_compared_with_the_next_one() -> None:
    row = [0, 0, 0, 0, 0, 0]
    ranks: Any = Told([row], False, "stats", "zero_grad", "step(1)")
    agreement = BatchAgreement(ranks, Mesh(1, 2, 1), 1)

    def note(*calls: str) -> None:
        for call in calls:
            agreement.note(call)

    note("zero_grad", "step(1)")
    agreement.compare("stats")
    assert not ranks.gathers and not agreement.earlier
    for calls, error in (
        (
            ("zero_grad", "step(2)"),
            r"calls: step\(2\) and then stats on rank 0, step\(1\) and then stats on rank 1\. Each",
        ),
        (("zero_grad",), r"calls: stats on rank 0, step\(1\) and then stats on rank 1\. Each rank has carried out all"),
        ((), r"calls: stats on rank 0, zero_grad and then step\(1\) and then stats on rank 1\. Each rank"),
    ):
        note(*calls)
        with pytest.raises(UsageError, match=error):
            agreement.compare("stats")
    # A refused call compares nothing: the next one does.
    note("zero_grad", "step(1)")
    agreement.ranks = refusing = Told([row], refused=True)  # type: ignore[assignment]
    with pytest.raises(UsageError, match="Rank 1 refused its part of stats"):
        agreement.compare("stats")
    agreement.ranks = ranks
    agreement.compare("stats")
    # Of many calls the last are kept, and all are compared.
    note(*["step(1)"] * 99)
    assert len(agreement.earlier) < 20 and refusing.gathers == [""]
    with pytest.raises(UsageError, match="different calls"):
        agreement.compare("stats")


TALK = """
import os, sys
import torch
import torch.distributed as dist
from support import traces; traces.share()
from support.handmade import plan_by_hand
from support.models import Tied
import autopar
from autopar.runtime.launch.spmd import SpmdBackend

torch.set_num_threads(1)
rank = int(os.environ["RANK"])
torch.manual_seed(0)
x, y = torch.randint(0, 32, (8, 5)), torch.randint(0, 32, (8,))
counts = {"exchange": 0, "object": 0}

def counted(owner, name, what):
    function = getattr(owner, name)
    def call(*args, **kwargs):
        counts[what] += 1
        return function(*args, **kwargs)
    setattr(owner, name, call)

counted(SpmdBackend, "exchange", "exchange")
for name in ("all_gather_object", "gather_object", "broadcast_object_list", "send_object_list"):
    counted(dist, name, "object")
for mesh, firsts in ((dict(tp=2), []), (dict(dp=2), []), ({}, ["layers.1.1.linear"])):
    plan = plan_by_hand(Tied(), x, 2, firsts, **mesh)
    with autopar.parallelize(Tied(), 2, x, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan=plan) as pm:
        own = [t.chunk(pm.data_size)[pm.data_rank] for t in (x, y)]
        counts.update(exchange=0, object=0)
        answers = []
        for step in range(4):
            pm.learning_rates()
            pm.train_step(*own).loss
            answers.append(pm.any_rank_so_far(step == 1 and rank == 1))
        assert counts == {"exchange": 4, "object": 0}, (mesh, counts)
        assert answers == [False, False, True, False], answers
        outputs = pm.eval()(own[0])
        assert outputs.shape[0] == 8 // pm.data_size
        given = [outputs] if pm.data_size == 1 else []
        both = [None, None]
        dist.all_gather_object(both, outputs)
        assert pm.data_size == 2 or torch.equal(*both)
        try:
            pm.train()(own[0][: 2 + 2 * rank])
            raise SystemExit("unequal parts were accepted")
        except autopar.UsageError as error:
            assert "different sizes: 2 on data rank 0, 4 on data rank" in str(error), error

def full(output, target):
    raise torch.OutOfMemoryError("CUDA out of memory.")

print(f"rank {rank} agrees", flush=True)
pm = autopar.parallelize(Tied(), 2, x, loss_fn=full, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan=plan)
pm.train_step(x, y)
"""


def test_ranks_of_a_launcher_exchange_one_row_of_numbers_a_step(tmp_path: Path) -> None:
    done = run_on_two(tmp_path, TALK)
    assert sorted(re.findall(r"rank \d agrees", done.stdout)) == ["rank 0 agrees", "rank 1 agrees"], done.stderr[-3000:]
    assert done.returncode != 0
    expected = r"DeviceMemoryError: Rank 1 \(stage 1\) ran out of memory during train_step in action 1F0, with layers.1"
    assert re.search(expected, done.stderr), done.stderr[-3000:]
