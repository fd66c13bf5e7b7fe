"""Script for ranks of torchrun: models under every given mesh of this many ranks, compared with one device.

Arguments: the folder for results, a cost model, then cells, as vit=1-2-1 (pp, tp, dp).
"""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.ir.layout import REPLICATED
from autopar.ir.plan_parts import ZeroStage
from autopar.ir.pytree import leaves
from autopar.runtime.launch.spmd import SpmdBackend
from autopar.tools.parity.compare import EPSILON
from autopar.tools.parity.difference import difference
from support.mesh_models import BATCH, MODELS, Case
from support.reference import Reference, replica_part
from support.traces import share

MICROBATCHES = 4  # of the global batch; equal sizes under every mesh, so that each model is traced once
State = dict[str, torch.Tensor]
# As in autopar.tools.parity: AdamW would turn the rounding noise of a zero gradient into a full step.
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, eps=EPSILON)


@dataclass
class Result:
    """Comparison of one model under one mesh: per quantity the worst tensor of any rank, 1 being the tolerance."""

    worst: dict[str, tuple[float, str]]
    weights: dict[str, list[int]]  # bytes of each weight on each rank
    layouts: dict[str, str]  # of the weights that are not replicated
    error: str = ""

    def compare(self, quantity: str, actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
        if list(actual) != list(expected):
            self.worst[quantity] = (float("inf"), f"names differ: {set(actual) ^ set(expected)}")
        for name in actual.keys() & expected.keys():
            excess = difference(actual[name], expected[name]).excess
            if excess > self.worst.get(quantity, (-1.0, ""))[0]:
                self.worst[quantity] = (excess, name)

    def compare_bitwise(self, quantity: str, actual: State, expected: State) -> None:
        self.compare(quantity, actual, expected)
        if not all(torch.equal(actual[n], expected[n]) for n in expected):
            self.worst[quantity] = (float("inf"), "not bitwise")


def named(output: object) -> dict[str, torch.Tensor]:
    return {str(i): leaf.detach() for i, leaf in enumerate(leaves(output))}


def replica_parts(outputs: Sequence[torch.Tensor], pm: autopar.ParallelModel) -> State:
    return named([replica_part(output, pm) for output in outputs])


def run(case: Case, mesh: tuple[int, int, int], hardware: str, zero: ZeroStage, saved: State) -> tuple[Result, State]:
    """Comparison and final state; ``saved`` is loaded first, and then replaced by the initial state."""
    torch.manual_seed(0)
    model, x = case.make().train().to(case.dtype), case.x()
    x = x.to(case.dtype) if x.is_floating_point() else x
    y = torch.randint(0, case.classes, (BATCH,))
    pp, tp, dp = mesh
    result = Result({}, {}, {})
    reference = Reference(model, case.loss_fn, ADAMW)
    plan = None
    if dist.get_rank() == 0:  # planning once is enough
        plan = autopar.plan(
            model, pp * tp * dp, x, hardware=hardware, pp=pp, tp=tp, dp=dp, microbatches=MICROBATCHES // dp,
            memory="64GiB", zero=zero if dp > 1 else None,
        ).to_json()  # fmt: skip
    planned = [plan]
    dist.broadcast_object_list(planned)
    plan = autopar.Plan.from_json(planned[0] or "")
    with autopar.parallelize(model, pp * tp * dp, x, loss_fn=case.loss_fn, optimizer=ADAMW, plan=plan) as pm:
        result.layouts = {n: str(layout) for n, layout in pm._programs.storage.items() if layout != REPLICATED}
        initial = pm.state_dict()
        pm.load_state_dict(saved)
        result.compare_bitwise("moved", pm.state_dict(), saved)
        pm.load_state_dict(initial)
        mine, target = replica_part(x, pm), replica_part(y, pm)
        for step in range(3):
            # In a copy, because a forward pass in training mode updates batch statistics.
            before = Reference(reference.model).forward(x, MICROBATCHES) if step == 0 else []
            loss = reference.forward_backward(x, y, MICROBATCHES)
            got = pm.forward_backward(mine, target, return_outputs=step == 0)
            if step == 0:
                result.compare("outputs", named(got.outputs), replica_parts(before, pm))
            result.compare("loss", {"loss": torch.tensor(got.loss)}, {"loss": torch.tensor(loss)})
            result.compare("gradients", pm.gradients(), reference.gradients())
            norm = nn.utils.get_total_norm(reference.gradients().values()).detach().float()
            result.compare("norm", {"norm": torch.tensor(pm.optimizer_step().grad_norm)}, {"norm": norm})
            reference.step()
        state = pm.state_dict()
        expected = dict(reference.model.state_dict())
        if dp > 1:  # replicas differ in batch statistics; those of replica 0 are saved
            expected |= {n: state[n] for n, _ in reference.model.named_buffers() if n in state}
        result.compare("weights", state, expected)
        model.load_state_dict(state)
        pm.load_state_dict(state)
        result.compare_bitwise("state", pm.state_dict(), state)
        reference.model.load_state_dict(state)
        reference.model.eval()
        pm.eval()
        result.compare("eval", named(pm(mine)), replica_parts(reference.forward(x, MICROBATCHES), pm))
        assert isinstance(pm._ranks, SpmdBackend)
        held: list[dict[str, int]] = [{}] * dist.get_world_size()
        dist.all_gather_object(held, {n: t.nbytes for n, t in pm._ranks.rank.weights.items()})
        result.weights = {n: [h.get(n, 0) for h in held] for h in held for n in h}
    every: list[dict[str, tuple[float, str]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(every, result.worst)
    result.worst = {quantity: max(worst[quantity] for worst in every) for quantity in result.worst}
    return result, state


def main() -> None:
    torch.set_num_threads(1)
    share()
    folder, hardware = Path(sys.argv[1]), sys.argv[2]
    meshes: dict[str, list[str]] = {}
    for cell in sys.argv[3:]:
        name, mesh = cell.split("=")
        meshes.setdefault(name, []).append(mesh)
    dist.init_process_group("gloo")
    for name in meshes:
        # The state of each mesh is loaded under the next mesh; the first mesh loads a fresh state.
        torch.manual_seed(1)
        fresh = MODELS[name].make().to(MODELS[name].dtype).state_dict()
        state = {weight: tensor + 1 for weight, tensor in fresh.items()}
        for mesh in meshes[name]:
            try:
                zero = 1 if name in ("vit", "resnet18", "tied") else 0
                pp, tp, dp = map(int, mesh.split("-"))
                result, state = run(MODELS[name], (pp, tp, dp), hardware, zero, state)
            except Exception:
                result = Result({}, {}, {}, traceback.format_exc())
            if dist.get_rank() == 0 or result.error:
                suffix = f"-rank{dist.get_rank()}" if result.error else ""
                file = folder / f"{name}-{mesh}{suffix}.json"
                file.write_text(json.dumps(asdict(result)))
            if result.error:
                os._exit(1)
    dist.destroy_process_group()


main()
