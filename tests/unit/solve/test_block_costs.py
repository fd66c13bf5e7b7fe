"""Times of the model's blocks in a plan, and the memory of its alternatives."""

from __future__ import annotations

from typing import Any

import pytest
from support.explained_plans import MIXER, RESNET, VIT, planned

from autopar.errors import PlanError
from autopar.ir.plan import Plan

CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "pipeline": (VIT.name, 4, {"pp": 4, "microbatches": 4}),
    "chunks": (VIT.name, 2, {"pp": 2, "schedule": "interleaved", "chunks": 2, "microbatches": 4}),
    "split backwards": (VIT.name, 2, {"pp": 2, "schedule": "zb-h1", "microbatches": 4}),
    "shards": (VIT.name, 4, {"pp": 2, "tp": 2, "microbatches": 2}),
    "recomputing": (VIT.name, 2, {"pp": 2, "recompute": "all", "microbatches": 4}),
    "recomputing in part": (VIT.name, 2, {"pp": 2, "microbatches": 4, "memory": "39MiB"}),
    "sharded parameters": (VIT.name, 4, {"dp": 4, "zero": 3}),
    "convolutions": (RESNET.name, 2, {"pp": 2, "microbatches": 4}),
    "mixer": (MIXER.name, 2, {"pp": 2, "microbatches": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_blocks_sum_up_to_their_stages(name: str) -> None:
    model, devices, constraints = CASES[name]
    plan = planned(model, devices, *constraints.items())
    levels = {stage.recompute for stage in plan.stages}
    assert levels == {"all"} if name == "recomputing" else (levels == {"none"}) is (name != "recomputing in part")
    for s, stage in enumerate(plan.stages):
        own = [block for block in plan.block_costs if block.stage == s]
        assert sum(block.forward_seconds for block in own) == pytest.approx(stage.forward_seconds, rel=1e-9)
        assert sum(block.backward_seconds for block in own) == pytest.approx(stage.backward_seconds, rel=1e-9)
        assert sum(block.params for block in own) == stage.params
    assert Plan.from_json(plan.to_json()) == plan


def test_blocks_are_in_order_and_have_the_model_s_names() -> None:
    plan = planned(VIT.name, 4, ("pp", 4), ("microbatches", 4))
    names = list(dict.fromkeys(block.name for block in plan.block_costs))
    assert names == ["patch_embed", "pos_embed", *(f"blocks.{i}" for i in range(4)), "norm", "head"]
    assert [block.stage for block in plan.block_costs] == sorted(block.stage for block in plan.block_costs)


def test_a_block_of_another_stage_is_refused() -> None:
    plan = planned(VIT.name, 2, ("pp", 2), ("microbatches", 4))
    broken = plan.to_json().replace('"name": "norm",\n      "stage": 1', '"name": "norm",\n      "stage": 2')
    with pytest.raises(PlanError, match=r"field block_costs\.\d+\.stage: is 2, the plan has stages 0 to 1\."):
        Plan.from_json(broken)


def test_alternatives_have_the_memory_of_their_plans() -> None:
    constraints = {"pp": 4, "microbatches": 4}
    plan = planned(VIT.name, 4, *constraints.items())
    for label, devices, changes in (
        ("uniform cuts", 4, {"balance": "uniform"}),
        ("equal parameters", 4, {"balance": "params"}),
        ("one device", 1, {"pp": 1}),
    ):
        row = next(a for a in plan.alternatives if a.label == label)
        other = planned(VIT.name, devices, *(constraints | changes).items())
        assert row.peak_bytes == max(other.prediction.peak_bytes), label
        assert row.step_seconds == pytest.approx(other.prediction.step_seconds), label


def test_an_alternative_that_does_not_fit_has_no_memory() -> None:
    rows = planned(VIT.name, 2, ("pp", 2), ("microbatches", 4), ("memory", "39MiB")).alternatives
    assert rows and all(row.step_seconds is None and row.peak_bytes is None for row in rows)
