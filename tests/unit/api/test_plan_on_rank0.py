"""What ranks must have alike before rank 0 plans, and the machine that it plans for."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar import UsageError
from autopar.api.options import Options
from autopar.api.planning.hardware import planning_hardware
from autopar.api.planning.plan import PlanRequest
from autopar.api.planning.rank0 import REPORT, RankReport, check_reports, rank_report, refuse_other_models
from autopar.cost.hardware.load import load_hardware
from autopar.ir.graph import Graph
from autopar.runtime.launch.devices import Machine, RankDevice
from autopar.trace.call import Call, as_call
from autopar.trace.lower import lower_model

GIB = 2**30
CPU, GPU = Machine("gloo", "cpu", 1, None), Machine("nccl", "cuda", 1, None)
H200 = "NVIDIA H200"


def traced(width: int = 16) -> tuple[nn.Module, Call, Graph]:
    model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4))
    call = as_call(model, torch.empty(8, 8))
    return model, call, lower_model(model, call, "train", "")


def report(width: int = 16, **options: object) -> RankReport:
    model, call, graph = traced(width)
    return rank_report(0, PlanRequest(model, call, 2, Options.of(options), ""), graph, CPU, None)


def test_a_report_is_sent_as_text() -> None:
    sent = report(pins={"0": 0}, memory="1GiB")
    assert REPORT.validate_json(REPORT.dump_json(sent)) == sent
    expected = {"backend gloo", "input 0 float32[8, 8]", "microbatches None", "pins dict(0=0)", f"memory {GIB}"}
    assert expected <= set(sent.arguments)
    assert sent.device.memory_bytes > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"versions": ("autopar 1", "torch 2")}, r"do not run the same software: rank 0 has autopar .*; rank 2 has"),
        (
            {"plan": ("dp 2", "1f1b")},
            r"do not run the same plan: rank 0 has nothing else; rank 2 has dp 2, 1f1b\. Pass",
        ),
        ({"arguments": ("input 0 float32[9, 8]",)}, r"the same arguments: rank 0 has .*input 0 float32\[8, 8\]"),
    ],
)
def test_reports_that_differ(change: dict[str, tuple[str, ...]], message: str) -> None:
    same = report()
    check_reports([same, replace(same, device=RankDevice("another", 1))])
    with pytest.raises(UsageError, match=f"^The 3 ranks {message}" if "do not" in message else message):
        check_reports([same, same, replace(same, **change)])


def test_options_that_differ_are_named_and_limits_of_waits_are_free() -> None:
    check_reports([report(), report(timeout=1.0, checkpoint_timeout=2.0)])
    message = "rank 0 has tp None, cost auto; rank 1 has tp 2, cost analytic. Pass the same arguments to autopar."
    with pytest.raises(UsageError, match=re.escape(message)):
        check_reports([report(), report(tp=2, cost="analytic")])


def test_models_that_differ_are_told_apart_by_their_lines() -> None:
    texts = []
    for width in (16, 32):
        _, _, graph = traced(width)
        texts.append(json.dumps([*graph.fingerprint_lines, f"fingerprint {graph.fingerprint}"]))
    message = r"do not have the same model: rank 0 has 0\.weight \(16, 8\) float32, .* rank 1 has 0\.weight \(32, 8\)"
    with pytest.raises(UsageError, match=message):
        refuse_other_models(texts)


# -- the machine -----------------------------------------------------------------------------------------------------


def test_the_ranks_device_is_planned_for() -> None:
    devices = [RankDevice("Xeon", 10 * GIB)] * 2
    assert planning_hardware(CPU, Options(), devices).memory_bytes == 10 * GIB
    named = load_hardware("h200-nvlink")
    found = planning_hardware(GPU, Options(hardware="h200-nvlink"), [RankDevice(H200, 100 * GIB)] * 2)
    assert found == named and named.memory_bytes > 100 * GIB  # a file's memory counts where ranks are alike


def test_hosts_that_have_about_the_same_memory(recwarn: pytest.WarningsRecorder) -> None:
    devices = [RankDevice("Xeon", 1000 * 2**20), RankDevice("Xeon", 990 * 2**20)]
    assert planning_hardware(CPU, Options(), devices).memory_bytes == 990 * 2**20
    assert not recwarn


@pytest.mark.parametrize(("machine", "name", "options"), [(CPU, "Xeon", {}), (GPU, H200, {"hardware": "h200-nvlink"})])
def test_the_least_memory_counts(machine: Machine, name: str, options: dict[str, str]) -> None:
    devices = [RankDevice(name, size * GIB) for size in (140, 40, 80, 40)]
    with pytest.warns(
        UserWarning, match=r"have from 40\.0 GiB \(ranks 1, 3\) to 140\.0 GiB of memory: all are planned"
    ):
        assert planning_hardware(machine, Options.of(options), devices).memory_bytes == 40 * GIB


def test_a_given_memory_needs_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    planning_hardware(CPU, Options(memory=GIB), [RankDevice("Xeon", GIB), RankDevice("Xeon", 2 * GIB)])
    assert not recwarn


def test_different_devices_are_named_with_their_ranks() -> None:
    names = [H200] * 6 + ["NVIDIA A100-SXM4-80GB"]
    devices = [RankDevice(name, 80 * GIB) for name in names]
    message = (
        "The 7 ranks have different devices: NVIDIA H200 on ranks 0, 1, 2, 3, … (6 in all); NVIDIA A100-SXM4-80GB on "
        "rank 6. A plan prices all ranks alike. Start them on equal devices, or pass hardware= with"
    )
    with pytest.raises(UsageError, match=f"^{re.escape(message)}"):
        planning_hardware(GPU, Options(), devices)
    with pytest.warns(UserWarning, match=r"describes NVIDIA A100.*, and this run has NVIDIA H200"):
        found = planning_hardware(GPU, Options(hardware="a100-nvlink"), devices)
    assert found == load_hardware("a100-nvlink")
