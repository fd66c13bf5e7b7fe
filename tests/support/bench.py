"""A benchmark that takes seconds, and what a timeline must be."""

from __future__ import annotations

import json
from typing import Any

from autopar.api.model_source import ModelSource
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
    """Two processes, a tiny ViT, two microbatches a rank."""
    given: dict[str, Any] = {
        "source": TINY, "shape": (8, 3, 32, 32), "classes": 10, "devices": 2, "steps": 2, "warmup": 1,
        "constraints": {"pp": 2, "microbatches": 4, "timeout": 60.0}, "microbatch_sizes": (2,), "limit_seconds": 150.0,
    }  # fmt: skip
    return BenchRequest(**given | changes)


def check_trace(trace: dict[str, Any]) -> None:
    """As Perfetto reads it: JSON, slices with a length, every arrow with two ends inside slices, forwards in time."""
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
