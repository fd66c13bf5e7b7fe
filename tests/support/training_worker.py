"""Script for ranks of torchrun: optimizers, schedules, accumulation and weight averages under every mesh of this size.

Every rank compares with the unmodified model on one device. Arguments: the folder for results, a cost model.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm.optim
import timm.scheduler
import timm.utils
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.tools.parity.difference import difference
from autopar.train import schedule, timm_optimizer
from support.effort import full
from support.models import tiny_vit
from support.reference import replica_part
from support.traces import share

MICROBATCHES, STEPS = 2, 3
SIZES = (8, 8, 4)  # of the parts of an accumulated batch
Mesh = tuple[int, int, int]  # pp, tp, dp; ZeRO-1 where dp is more than 1
TP, DP, PP, BOTH, ALL = (1, 2, 1), (1, 1, 2), (2, 1, 1), (2, 2, 1), (1, 2, 2)
EMA = functools.partial(timm.utils.ModelEmaV3, decay=0.9, use_warmup=True)


@dataclass(frozen=True)
class Case:
    """An optimizer by timm's name and options or by callable, with the rest of a training recipe.

    Attributes:
        resumed: whether training starts from the checkpoint of the mesh before.
        later: meshes that only a full run tests.
    """

    meshes: tuple[Mesh, ...]
    opt: str | Callable[[Any], torch.optim.Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    constraints: dict[str, Any] = field(default_factory=dict)
    schedule: dict[str, Any] | None = None
    accumulate: bool = False
    ema: bool = False
    resumed: bool = False
    later: tuple[Mesh, ...] = ()


COSINE = {
    "sched": "cosine", "epochs": 20, "warmup_epochs": 2, "min_lr": 1e-4, "step_on_epochs": False,
    "updates_per_epoch": 1,
}  # fmt: skip
LAMB = {"lr": 1e-2, "weight_decay": 0.05}
CASES = {
    "lamb": Case((TP, DP, PP), "lamb", LAMB, later=(DP, PP)),
    "lamb that clips its trust": Case((TP,), "lambc", LAMB | {"max_grad_norm": 0.1}, later=(TP,)),
    "lamb clipped by the caller too": Case((TP,), "lamb", LAMB, {"clip_grad_norm": 0.05}),
    "lars": Case((TP, DP), "lars", {"lr": 1.0, "weight_decay": 0.05}, later=(TP,)),
    "muon": Case((TP,), "muon", {"lr": 1e-2, "weight_decay": 0.05}),
    "adafactor": Case((TP, DP), functools.partial(torch.optim.Adafactor, lr=1e-2), later=(TP,)),
    "lookahead over lamb": Case((TP,), "lookahead_lamb", LAMB | {"max_grad_norm": None}, later=(TP,)),
    "clipped by value": Case(
        (TP, DP), functools.partial(torch.optim.SGD, lr=1.0), {}, {"clip_grad_value": 0.01}, later=(TP,)),
    "layer decay": Case(
        (TP, PP), "adamw", {"lr": 1e-2, "weight_decay": 0.05, "layer_decay": 0.5, "eps": 1e-3},
        schedule=COSINE, resumed=True, later=(TP,)),
    "accumulation": Case(
        (TP, DP, BOTH), functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9), accumulate=True, later=(TP, BOTH)),
    "resumed": Case(
        (DP, TP, PP, BOTH, ALL), "lamb", LAMB, schedule=COSINE, ema=True, resumed=True,
        later=(PP, BOTH, ALL)),
    "average": Case((TP, DP), functools.partial(torch.optim.SGD, lr=0.5), ema=True, later=(TP,)),
}  # fmt: skip


class WorstErrors:
    """Error of the worst tensor of each quantity, 1 being the tolerance."""

    def __init__(self) -> None:
        self.worst: dict[str, float] = {}

    def __call__(self, quantity: str, actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
        assert list(actual) == list(expected), quantity
        for name in expected:
            self.worst[quantity] = max(self.worst.get(quantity, 0.0), difference(actual[name], expected[name]).excess)

    def number(self, quantity: str, actual: float, expected: float) -> None:
        self(quantity, {"": torch.tensor(actual)}, {"": torch.tensor(expected)})


class OneDevice:
    """The unmodified model on one device, with optimizer and scheduler of timm or torch."""

    def __init__(self, model: nn.Module, case: Case) -> None:
        self.model, self.case = model, case
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = (
            timm.optim.create_optimizer_v2(model, case.opt, **case.options)
            if isinstance(case.opt, str)
            else case.opt(trained)
        )
        self.scheduler = None
        if case.schedule is not None:
            options = dict(case.schedule)
            options["num_epochs"] = options.pop("epochs")
            self.scheduler = timm.scheduler.create_scheduler_v2(self.optimizer, **options)[0]
        self.ema = EMA(model)

    def learning_rates(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def backward(self, x: torch.Tensor, y: torch.Tensor, share: float) -> float:
        loss = F.cross_entropy(self.model(x), y)
        (loss * share).backward()
        return loss.item()

    def update(self, step: int) -> float:
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).item()
        limits = self.case.constraints
        if "clip_grad_norm" in limits:
            nn.utils.clip_grad_norm_(parameters, limits["clip_grad_norm"])
        if "clip_grad_value" in limits:
            nn.utils.clip_grad_value_(parameters, limits["clip_grad_value"])
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step_update(step)
        self.ema.update(self.model, step=step)
        return norm


def pieces(case: Case, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
    """Inputs, targets and share of the batch of each call of one update."""
    generator = torch.Generator().manual_seed(step)
    for size in SIZES if case.accumulate else (8,):
        x = torch.randn(size, 3, 32, 32, generator=generator, dtype=torch.float64)
        yield x, torch.randint(0, 10, (size,), generator=generator), size / sum(SIZES) if case.accumulate else 1.0


def run(case: Case, plan: autopar.Plan, slots: dict[str, list[list[int]]], checkpoint: Path) -> dict[str, float]:
    """Errors by quantity; ``slots`` receives the shapes of the optimizer's state."""
    torch.manual_seed(0)
    model = tiny_vit(2, embed_dim=32, num_heads=4).double()
    compare = WorstErrors()
    optimizer = timm_optimizer(model, case.opt, **case.options) if isinstance(case.opt, str) else case.opt
    with autopar.parallelize(
        model, plan.mesh.devices, torch.zeros(8, 3, 32, 32, dtype=torch.float64), optimizer=optimizer, plan=plan,
        lr_scheduler=schedule(**case.schedule) if case.schedule else None, ema=EMA if case.ema else None,
        **case.constraints,
    ) as pm:  # fmt: skip
        one_device = OneDevice(model, case)
        if case.resumed and checkpoint.exists():
            pm.load_checkpoint(checkpoint)
        for step in range(1, pm.num_updates + 1):
            for piece in pieces(case, step):
                one_device.backward(*piece)
            one_device.update(step)
        for step in range(pm.num_updates + 1, pm.num_updates + STEPS + 1):
            compare("learning rates", *({str(i): torch.tensor(lr) for i, lr in enumerate(lrs)}
                                      for lrs in (pm.learning_rates(), one_device.learning_rates())))  # fmt: skip
            *before, last = pieces(case, step)
            for call, (x, y, share) in [(pm.forward_backward, p) for p in before] + [(pm.train_step, last)]:
                result = call(replica_part(x, pm), replica_part(y, pm), share=share)
                compare.number("loss", result.loss, one_device.backward(x, y, share))
            assert result.grad_norm is not None
            compare.number("norm", result.grad_norm, one_device.update(step))
            if case.schedule is not None:
                pm.lr_scheduler.step_update(step)
        state = pm.state_dict()
        compare("weights", state, dict(model.state_dict()))
        if case.ema:
            compare_averages(compare, pm, one_device)
            assert all(torch.equal(a, b) for a, b in zip(pm.state_dict().values(), state.values(), strict=True))
        if case.resumed:
            pm.save_checkpoint(checkpoint)
        updater = pm._ranks.rank.updater  # type: ignore[union-attr]
        assert updater.optimizer is not None
        slots |= {n: [list(t.shape) for t in updater.optimizer.state.get(p, {}).values() if isinstance(t, torch.Tensor)]
                  for n, p in updater.optimized.items()}  # fmt: skip
    return compare.worst


def compare_averages(compare: WorstErrors, pm: autopar.ParallelModel, one_device: OneDevice) -> None:
    """Compare weight averages, and the outputs of the model with them."""
    expected = dict(one_device.ema.module.state_dict())
    compare("averages", pm.ema_state_dict(), expected)
    x = next(pieces(one_device.case, 0))[0]
    pm.eval()
    with pm.ema_weights(), torch.no_grad():
        compare("outputs of averages", {"": pm(replica_part(x, pm))}, {"": replica_part(one_device.ema.module(x), pm)})
        compare("weights within", pm.state_dict(), expected)
    one_device.model.eval()
    with torch.no_grad():
        compare("outputs after", {"": pm(replica_part(x, pm))}, {"": replica_part(one_device.model(x), pm)})


def main() -> None:
    torch.set_num_threads(1)
    folder, hardware = Path(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    example = torch.zeros(8, 3, 32, 32, dtype=torch.float64)
    chosen = {mesh for case in CASES.values() for mesh in case.meshes if full() or mesh not in case.later}
    meshes = sorted(mesh for mesh in chosen if mesh[0] * mesh[1] * mesh[2] == world)
    for pp, tp, dp in meshes:
        planned = ""
        if rank == 0:  # planning once is enough
            planned = autopar.plan(
                tiny_vit(2, embed_dim=32, num_heads=4).double(), world, example, hardware=hardware, pp=pp, tp=tp, dp=dp,
                microbatches=MICROBATCHES, memory="64GiB", zero=1 if dp > 1 else None,
            ).to_json()  # fmt: skip
        plans = [planned]
        dist.broadcast_object_list(plans)
        for name, case in CASES.items():
            if (pp, tp, dp) not in case.meshes or ((pp, tp, dp) in case.later and not full()):
                continue
            slots: dict[str, list[list[int]]] = {}
            error, worst = "", {}
            try:
                worst = run(case, autopar.Plan.from_json(plans[0]), slots, folder / f"{name}-{world}")
            except Exception:
                error = traceback.format_exc()
            file = folder / f"{name}+{pp}-{tp}-{dp}+{rank}.json"
            file.write_text(json.dumps({"worst": worst, "slots": slots, "error": error}))
            if error:
                os._exit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    share()
    main()
