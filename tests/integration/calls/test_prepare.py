"""`autopar.prepare`: loops that users write have the numbers of one device, and mistakes are errors."""

from __future__ import annotations

import copy
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import timm.optim
import timm.utils
import torch
import torch.nn.functional as F
from support.effort import only
from support.forks import SCRIPTS, run_ranks
from support.models import tiny_vit
from support.prepared_loops import assert_same, assert_same_state, batches, gradients, grouped_sgd, on_ranks, run
from torch import nn

import autopar
from autopar.api.prepare import PreparedModule, PreparedOptimizer
from autopar.errors import MissingAttributeError, ResumeWarning, UsageError

X, Y = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 4
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
Pair = tuple[PreparedModule, PreparedOptimizer]
Prepared = Callable[..., Pair]


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.fixture
def prepared() -> Iterator[Prepared]:
    """Prepares a copy of a small model on one device, in this process, in two microbatches; closed at the end."""
    opened: list[PreparedModule] = []

    def prepare(make: Any = sgd, model: nn.Module | None = None, devices: int = 1, **options: Any) -> Pair:
        options = {"example_inputs": X, "microbatches": 2} | options
        module, optimizer = on_ranks(model or mlp(), make, devices, **options)
        opened.append(module)
        return module, optimizer

    yield prepare
    for module in opened:
        module.pm.close()


def step(module: nn.Module, optimizer: torch.optim.Optimizer, times: int = 1) -> None:
    for _ in range(times):
        F.cross_entropy(module(X), Y).backward()
        optimizer.step()
        optimizer.zero_grad()


# -- numbers -----------------------------------------------------------------------------------------------------------

MESHES: list[tuple[int, dict[str, Any]]] = [
    (2, {"pp": 2, "microbatches": 2}), (2, {"dp": 2, "zero": 3}), (2, {"dp": 2}), (2, {"dp": 2, "zero": 1}),
    (2, {"tp": 2}), (4, {"pp": 2, "tp": 2, "microbatches": 2}), (2, {"pp": 2, "microbatches": 3}),
]  # fmt: skip


@pytest.mark.parametrize(("devices", "mesh"), only(MESHES[:2], MESHES), ids=str)
def test_a_loop_equals_that_of_one_device(devices: int, mesh: dict[str, Any], prepared: Prepared) -> None:
    """Accumulation, several forwards, clipping, groups, a schedule; then the state goes on elsewhere."""
    model, data = tiny_vit(depth=2), batches(4)
    alone = copy.deepcopy(model)
    optimizer = grouped_sgd(alone)
    expected = run(alone, optimizer, data)
    module, own = prepared(grouped_sgd, model, devices, example_inputs=data[0][0], **mesh)
    shown = run(module, own, data)
    assert shown.losses == pytest.approx(expected.losses, abs=1e-5)
    assert shown.norms == pytest.approx(expected.norms, rel=1e-4)
    assert_same(shown.gradients, expected.gradients)
    assert_same(module.state_dict(), dict(alone.state_dict()))
    assert_same_state(own.state_dict(), optimizer.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(module.eval()(data[0][0][:5]), alone.eval()(data[0][0][:5]), rtol=1e-4, atol=1e-5)

    other, other_optimizer = prepared(grouped_sgd, model, example_inputs=data[0][0])
    other.load_state_dict(module.state_dict())
    other_optimizer.load_state_dict(own.state_dict())
    unmodified = copy.deepcopy(model)
    unmodified.load_state_dict(module.state_dict())
    unmodified_optimizer = grouped_sgd(unmodified)
    unmodified_optimizer.load_state_dict(own.state_dict())
    module.train()
    pairs = [(alone.train(), optimizer), (module, own), (other, other_optimizer), (unmodified, unmodified_optimizer)]
    for one, its_optimizer in pairs:
        F.cross_entropy(one(data[0][0]), data[0][1]).backward()
        its_optimizer.step()
    for one, _ in pairs[1:]:
        assert_same(dict(one.state_dict()), dict(alone.state_dict()))


def test_under_torchrun_each_process_feeds_its_part(tmp_path: Path) -> None:
    done = run_ranks(2, SCRIPTS / "prepared_worker.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("agrees") >= 2, done.stdout


def parts_of_the_batch(f: Any) -> torch.Tensor:
    out = f(X)
    return F.cross_entropy(out[:3], Y[:3]) + out[5:].square().mean()


def in_place(f: Any) -> torch.Tensor:
    out = f(X)
    out.div_(2).clamp_(-1, 1)
    out[0] = 0
    return F.cross_entropy(out, Y)


def all_pairs(f: Any) -> torch.Tensor:
    one, other = F.normalize(f(X)), F.normalize(f(0.9 * X))
    return F.cross_entropy(one @ other.T, torch.arange(8))


def gradient_of_outputs(f: Any) -> torch.Tensor:
    out = f(X)
    (gradient,) = torch.autograd.grad(F.cross_entropy(out, Y), out, create_graph=True)
    return gradient.square().sum() + out.sum()


@pytest.mark.parametrize("loss", [parts_of_the_batch, in_place, all_pairs, gradient_of_outputs])
def test_losses_of_the_loop(loss: Callable[[Any], torch.Tensor], prepared: Prepared) -> None:
    module, _ = prepared()
    loss(module).backward()
    alone = mlp()
    loss(alone).backward()
    assert_same(gradients(module), gradients(alone), atol=1e-6)


class Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        hidden = self.first(x).relu()
        return {"out": self.last(hidden), "hidden": [hidden], "mean": hidden.mean(), "samples": len(x)}


def test_a_loss_of_features_reaches_only_what_made_them(prepared: Prepared) -> None:
    model = Features()
    module, _ = prepared(model=model)
    for one in (module, model):
        out = one(X)
        (out["hidden"][0][::2].abs().sum() / out["samples"] + out["mean"]).backward()
    assert gradients(module).keys() == {"first.weight", "first.bias"}
    assert_same(gradients(module), gradients(model), atol=1e-6)


def test_a_head_of_this_process_trains_behind_the_ranks(prepared: Prepared) -> None:
    module, optimizer = prepared()
    alone, own = mlp(), nn.Linear(4, 3)
    head = copy.deepcopy(own)
    pairs = [(module, optimizer, head, sgd(head)), (alone, sgd(alone), own, sgd(own))]
    for body, body_optimizer, last, last_optimizer in pairs:
        for _ in range(2):
            F.cross_entropy(last(body(X)), Y % 3).backward()
            for each in (body_optimizer, last_optimizer):
                each.step()
                each.zero_grad()
    assert_same(dict(module.state_dict()), dict(alone.state_dict()))
    assert_same(dict(head.state_dict()), dict(own.state_dict()))


def test_orders_of_calls(prepared: Prepared) -> None:
    """zero_grad before the backward, a backward in a thread, an evaluation between forward and backward."""
    module, optimizer = prepared()
    loss = F.cross_entropy(module(X), Y)
    optimizer.zero_grad()
    module.eval()
    with torch.inference_mode():
        module(X[:3])
    module.train()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    optimizer.step()
    before = module.state_dict()
    optimizer.zero_grad()
    optimizer.step()  # without gradients nothing changes
    assert_same(module.state_dict(), before, atol=0)
    alone = mlp()
    step(alone, sgd(alone))
    assert_same(module.state_dict(), dict(alone.state_dict()))


def test_statistics_of_an_evaluation_between_forward_and_backward(prepared: Prepared) -> None:
    """Before an evaluation replicas take over the running statistics of the first one, which autograd has saved."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    module, _ = prepared(model=model, devices=2, dp=2, microbatches=1)
    loss = F.cross_entropy(module(X), Y)
    module.eval()
    with torch.no_grad():
        module(X)
    loss.backward()
    halves = [F.cross_entropy(model(X[part]), Y[part]) for part in (slice(4), slice(4, 8))]
    (sum(halves) / 2).backward()  # type: ignore[union-attr]
    assert_same(gradients(module), gradients(model), atol=1e-6)


# -- optimizers and schedules ------------------------------------------------------------------------------------------

OPTIMIZERS: list[Callable[[nn.Module], torch.optim.Optimizer]] = [
    lambda model: timm.optim.Lamb(model.parameters(), lr=1e-2, max_grad_norm=0.1),  # counts its steps in the group
    lambda model: timm.optim.Adan(model.parameters(), lr=1e-2),
    lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-1),  # has state from the start
    lambda model: torch.optim.AdamW(model.named_parameters(), lr=torch.tensor(1e-2)),
    lambda model: torch.optim.SGD(model[0].requires_grad_(False) and model.parameters(), lr=0.1, momentum=0.9),  # type: ignore[index]
]


@pytest.mark.parametrize("make", OPTIMIZERS, ids=["lamb", "adan", "adagrad", "adamw", "frozen"])
def test_an_optimizer_resumes_from_its_state_dict(make: Any, prepared: Prepared) -> None:
    module, optimizer = prepared(make)
    alone = mlp()
    own = make(alone)
    step(module, optimizer, 3)
    step(alone, own, 3)
    resumed, resumed_optimizer = prepared(make)
    resumed.load_state_dict(module.state_dict())
    resumed_optimizer.load_state_dict(optimizer.state_dict())
    step(resumed, resumed_optimizer, 2)
    step(alone, own, 2)
    assert_same(resumed.state_dict(), dict(alone.state_dict()))


SCHEDULES: list[Callable[[Any], Any]] = [
    lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6),  # changes betas too
    lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
]


@pytest.mark.parametrize("make", SCHEDULES, ids=["one cycle", "plateau"])
def test_schedules_of_either_optimizer(make: Callable[[Any], Any], prepared: Prepared) -> None:
    alone, own = mlp(), mlp()
    optimizer = ADAMW(own.parameters())
    before = make(optimizer)
    module, returned = autopar.prepare(own, optimizer, 1, example_inputs=X, cost="analytic")
    other, other_optimizer = prepared(lambda model: ADAMW(model.parameters()))
    alone_optimizer = ADAMW(alone.parameters())
    triples = [
        (module, returned, before),
        (other, other_optimizer, make(other_optimizer)),
        (alone, alone_optimizer, make(alone_optimizer)),
    ]
    for one, its_optimizer, schedule in triples:
        for _ in range(4):
            step(one, its_optimizer)
            schedule.step(*([1.0] if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))
    for one in (module, other):
        assert_same(dict(one.state_dict()), dict(alone.state_dict()))
    module.pm.close()


@pytest.mark.parametrize("devices", only([1], [1, 2]))
def test_a_checkpoint_has_the_rate_that_the_schedule_has_set(devices: int, prepared: Prepared, tmp_path: Path) -> None:
    """The ranks get it with the next step only, and recursive schedules go on from the group's rate."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def cosine(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)

    def go_on(module: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any) -> None:
        for _ in range(3):
            step(module, optimizer)
            schedule.step()

    module, optimizer = prepared(make)
    schedule = cosine(optimizer)
    go_on(module, optimizer, schedule)
    module.pm.save_checkpoint(tmp_path, extra={"schedule": schedule.state_dict()})
    go_on(module, optimizer, schedule)
    other, other_optimizer = prepared(make, devices=devices, pp=devices)
    other_schedule = cosine(other_optimizer)
    other_schedule.load_state_dict(other.pm.load_checkpoint(tmp_path)["schedule"])
    go_on(other, other_optimizer, other_schedule)
    assert_same(other.state_dict(), module.state_dict(), atol=1e-7)


def test_a_schedule_may_be_built_before_the_optimizer_is_prepared_or_after(prepared: Prepared, tmp_path: Path) -> None:
    def make(model: nn.Module, scheduled: bool = False) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if scheduled:
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)  # adds initial_lr to the groups
        return optimizer

    for saved, loaded in ((True, False), (False, True)):
        module, _ = prepared(lambda model, scheduled=saved: make(model, scheduled))
        module.pm.save_checkpoint(tmp_path)
        other, _ = prepared(lambda model, scheduled=loaded: make(model, scheduled))
        with warnings.catch_warnings():
            warnings.simplefilter("error", ResumeWarning)
            other.pm.load_checkpoint(tmp_path)


def test_averages(prepared: Prepared) -> None:
    module, optimizer = prepared(ema=functools.partial(timm.utils.ModelEmaV3, decay=0.9))
    alone = mlp()
    own, average = sgd(alone), timm.utils.ModelEmaV3(alone, decay=0.9)
    for number in range(3):
        step(module, optimizer)
        step(alone, own)
        average.update(alone, step=number + 1)
    with module.pm.ema_weights():
        assert_same(module.state_dict(), dict(average.module.state_dict()))


def test_an_overflow_skips_the_update(prepared: Prepared) -> None:
    module, optimizer = prepared(precision="fp16")
    before = module.state_dict()
    (module(X) * float("inf")).sum().backward()
    optimizer.step()
    assert optimizer.skipped
    assert_same(module.state_dict(), before, atol=0)
    step(module, optimizer)
    assert not optimizer.skipped


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    module, optimizer = on_ranks(mlp(), sgd, 1, example_inputs=X)
    yield module, optimizer
    module.pm.close()


def with_gradients(module: PreparedModule) -> PreparedModule:
    F.cross_entropy(module(X), Y).backward()
    return module


def scaled_step(module: PreparedModule, optimizer: PreparedOptimizer) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(F.cross_entropy(module(X), Y)).backward()
    scaler.step(optimizer)


MISTAKES: list[tuple[Callable[[PreparedModule, PreparedOptimizer], Any], str]] = [
    (lambda m, o: sum(p.square().sum() for p in m.parameters()), "weights and gradients are on the ranks"),
    (lambda m, o: next(m.parameters()).data, "weights and gradients are on the ranks"),
    (lambda m, o: nn.init.zeros_(next(m.parameters())), "weights and gradients are on the ranks"),
    (lambda m, o: nn.utils.clip_grad_norm_(with_gradients(m).parameters(), 1.0), "module.clip_grad_norm_"),
    (lambda m, o: nn.utils.clip_grad_norm_(with_gradients(m).unmodified.parameters(), 1.0), "module.clip_grad_norm_"),
    (lambda m, o: nn.utils.clip_grad_value_(with_gradients(m) and o.param_groups[0]["params"], 1.0), "unmodified"),
    (lambda m, o: setattr(next(m.parameters()), "requires_grad", False), "requires_grad is set too late"),
    (lambda m, o: m.unmodified.requires_grad_(False), "requires_grad is set too late"),
    (lambda m, o: m.requires_grad_(False), "change the model before autopar.prepare"),
    (lambda m, o: [child.eval() for child in m.modules()], "not the modules of Sequential"),
    (lambda m, o: m.apply(print), "change the model before autopar.prepare"),
    (lambda m, o: list(m.buffers()), "change the model before autopar.prepare"),
    (lambda m, o: setattr(m, "head", nn.Linear(1, 1)), "head is set too late"),
    (lambda m, o: m.half(), "cannot become torch.float16"),
    (lambda m, o: copy.deepcopy(m), "ema="),
    (lambda m, o: torch.compile(m), "ranks compile their own code"),
    (lambda m, o: m(X.clone().requires_grad_()), "requires grad"),
    (lambda m, o: m.clip_grad_norm_(1.0, norm_type=1), "2-norm"),
    (lambda m, o: m.load_state_dict(m.state_dict(), assign=True), "assign"),
    (lambda m, o: m.load_state_dict({}), "6 names missing|4 names missing"),
    (lambda m, o: o.add_param_group({"params": []}), "cannot be added"),
    (lambda m, o: copy.deepcopy(o), "state_dict"),
    (scaled_step, 'precision="fp16"'),
    (lambda m, o: o.optimizer.step(), "returned the one to step"),
]


@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_mistakes_are_errors(number: int, pair: Pair) -> None:
    mistake, message = MISTAKES[number]
    with pytest.raises(UsageError, match=message):
        mistake(*pair)


def test_a_step_after_a_backward_of_the_unmodified_model(prepared: Prepared) -> None:
    module, optimizer = prepared()
    F.cross_entropy(module.unmodified(X), Y).backward()
    with pytest.raises(UsageError, match="Call the module that it returned"):
        optimizer.step()


def test_the_unmodified_model_trains_by_itself_again(prepared: Prepared) -> None:
    module, _ = prepared()
    F.cross_entropy(module(X), Y).backward()
    module(X[:3])  # traces the model again, which reads its gradients
    copied, model = copy.deepcopy(module.unmodified), module.unmodified
    for one in (copied, model):
        if one is model:
            module.pm.close()
        loop = sgd(one)
        F.cross_entropy(one(X), Y).backward()
        loop.step()
    assert_same(model.state_dict(), copied.state_dict(), atol=0)
    assert not any(p.requires_grad for p in model.requires_grad_(False).parameters())
    assert {type(p) for p in (*model.parameters(), *copied.parameters())} == {nn.Parameter}


def test_graphs_end(prepared: Prepared) -> None:
    module, optimizer = prepared()
    out, stale = module(X), module(X)
    F.cross_entropy(out, Y).backward()
    with pytest.raises(UsageError, match="has run already"):
        out.sum().backward()
    module.clip_grad_norm_(1.0)
    with pytest.raises(UsageError, match="have been clipped"):
        module(X).sum().backward()
    optimizer.step()
    with pytest.raises(UsageError, match="weights have changed"):
        stale.sum().backward()


class Classifier(nn.Module):
    """A model with a method and an attribute beside its forward."""

    num_classes = 4

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)

    def save(self) -> dict[str, Any]:
        return self.state_dict()

    def describe(self) -> str:
        return f"{self.num_classes} classes"


def test_attributes_are_those_of_the_model_but_for_its_weights(prepared: Prepared) -> None:
    module, _ = prepared(model=Classifier())
    assert (module.num_classes, module.describe(), module.training) == (4, "4 classes", True)
    with pytest.raises(MissingAttributeError, match="not the trained ones"):
        _ = module.head
    assert not hasattr(module, "module"), "scripts would unwrap it and save weights that are not trained"
    with pytest.raises(UsageError, match="only its forward runs on the ranks"):
        module.features(X)
    with pytest.raises(UsageError, match="not the trained ones"):
        module.save()
    with pytest.raises(UsageError, match="num_classes is set too late"):
        module.num_classes = 5
    assert sum(p.numel() for p in module.parameters()) == 36
    assert [*nn.Sequential(module, nn.Softmax(1)).state_dict()] == ["0.head.weight", "0.head.bias"]


def test_a_warning_names_the_line_of_the_call(prepared: Prepared) -> None:
    module, _ = prepared()
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(autopar.AutocastWarning) as seen:
        module(X)
    assert [warning.filename for warning in seen] == [__file__]


def test_a_part_of_a_state_dict_is_loaded_without_strict(prepared: Prepared) -> None:
    module, _ = prepared()
    state = module.state_dict()
    result = module.load_state_dict({"0.bias": torch.ones(16), "other": torch.ones(1)}, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["0.weight", "2.weight", "2.bias"], ["other"])
    assert_same(module.state_dict(), {**state, "0.bias": torch.ones(16)}, atol=0)


def wrapped(model: nn.Module) -> tuple[nn.Module, Any]:
    return nn.DataParallel(model), sgd(model)


def with_gradient(model: nn.Module) -> tuple[nn.Module, Any]:
    model(X).sum().backward()
    return model, sgd(model)


REFUSED: list[tuple[Callable[[nn.Module], tuple[Any, Any]], str]] = [
    (lambda model: (model, [sgd(model)]), "For several optimizers build one"),
    (lambda model: (model, ADAMW), "takes an optimizer over the model's parameters"),
    (wrapped, "DataParallel, which splits or replicates it already"),
    (with_gradient, "have gradients already"),
    (lambda model: (model, torch.optim.LBFGS(model.parameters())), "needs a closure"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_refused(make: Callable[[nn.Module], tuple[Any, Any]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        autopar.prepare(*make(mlp()), 1, example_inputs=X, cost="analytic")
