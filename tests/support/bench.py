"""A benchmark that takes seconds, a plan of its model, and a check of Chrome traces."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import autopar
from autopar.api.model_source import ModelSource
from autopar.ir.plan import Plan
from autopar.tools.bench.request import BenchRequest

KWARGS: dict[str, Any] = {
    "depth": 4,
    "patch_size": 8,
    "num_classes": 10,
    "img_size": 32,
    "embed_dim": 64,
    "num_heads": 4,
}
TINY = ModelSource("vit_tiny_patch16_224", KWARGS)
FLAGS = ["vit_tiny_patch16_224", "--model-kwargs", *(f"{k}={v}" for k, v in KWARGS.items()), "--devices", "2"]


def request(**changes: Any) -> BenchRequest:
    """Benchmark of a tiny ViT on two processes with four microbatches; ``changes`` are fields of it."""
    given: dict[str, Any] = {
        "source": TINY, "shape": (8, 3, 32, 32), "classes": 10, "devices": 2, "steps": 2, "warmup": 1,
        "constraints": {"pp": 2, "microbatches": 4, "timeout": 60.0}, "microbatch_sizes": (2,), "limit_seconds": 150.0,
    }  # fmt: skip
    return BenchRequest(**given | changes)


@functools.cache
def tiny_plan(pp: int = 2, dp: int = 1, microbatches: int = 4) -> Plan:
    """Plan of the tiny ViT for CPUs, 1F1B."""
    asked: dict[str, Any] = {
        "pp": pp,
        "dp": dp,
        "microbatches": microbatches,
        "schedule": "1f1b",
        "hardware": "cpu-generic",
    }
    return autopar.plan(TINY, pp * dp, batch_size=16, **asked)


def check_trace(trace: dict[str, Any]) -> None:
    """Check a trace as Perfetto reads it: slices have a length, arrows lead from one slice to a later one."""
    events = json.loads(json.dumps(trace))["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert all(e["dur"] > 0 and e["ts"] >= 0 for e in slices)
    ends = {ph: {e["id"]: e for e in events if e["ph"] == ph} for ph in "sf"}
    assert ends["s"].keys() == ends["f"].keys()
    for number, start in ends["s"].items():
        end = ends["f"][number]
        assert start["ts"] <= end["ts"] and start["name"] == end["name"] and end["bp"] == "e"
        for e in (start, end):
            assert any(
                (s["pid"], s["tid"]) == (e["pid"], e["tid"]) and s["ts"] <= e["ts"] < s["ts"] + s["dur"] for s in slices
            )


def early_arrivals(trace: Mapping[str, Any]) -> list[str]:
    """Transfers that arrive before the action that sends them starts, by more than the clocks' error; one line each.

    A sound trace has none. The starts of the two actions are compared, because arrows never go back in time.
    """
    arrows = [event for event in trace["traceEvents"] if event["ph"] == "f"]
    tolerance_us = trace["otherData"]["alignment_error_us"]
    starts = ((arrow["name"], arrow["args"]["sender_start_us"], arrow["args"]["receiver_start_us"]) for arrow in arrows)
    return [
        f"{name}: its sender began at {sender:.1f} µs, it was there at {receiver:.1f} µs"
        for name, sender, receiver in starts
        if receiver < sender - tolerance_us
    ]
