"""Every model family under every mesh, with real processes, against one device.

Ranks start once for two and once for four; the worker (`mesh_worker`) runs all its cells there and leaves
one file per model and mesh.
"""

from __future__ import annotations

import json
from math import prod

import pytest
from support.effort import full, only
from support.forks import SCRIPTS, run_ranks
from support.hardware import slow_compute
from support.mesh_models import MODELS

from autopar.ir.layout import REPLICATED, TP, Layout

MESHES = {2: ("1-2-1", "1-1-2"), 4: ("1-4-1", "2-2-1", "1-1-4", "2-1-2", "1-2-2")}
CELLS = [(name, mesh) for name in MODELS for meshes in MESHES.values() for mesh in meshes]
# Two axes of two ranks and two pairs of axes; models with ZeRO-1 where replicas share.
KEPT = [
    ("vit", "1-2-1"), ("vit-3-heads", "1-2-1"), ("swin", "1-2-1"), ("tied", "1-1-2"),
    ("vit", "2-2-1"), ("resnet18", "2-1-2"),
]  # fmt: skip
# An operation that is never split in these models would make the comparison worthless.
QUANTITIES = {"moved", "outputs", "loss", "gradients", "norm", "weights", "state", "eval"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict]:
    folder = tmp_path_factory.mktemp("meshes")
    hardware = slow_compute(folder)
    failures = []
    cells = CELLS if full() else KEPT
    for ranks in MESHES:
        chosen = [f"{name}={mesh}" for name, mesh in cells if mesh in MESHES[ranks]]
        done = run_ranks(ranks, SCRIPTS / "mesh_worker.py", str(folder), str(hardware), *chosen)
        if done.returncode:
            failures.append(done.stderr[-3000:])
    read = {}
    for file in sorted(folder.glob("*.json")):
        data = json.loads(file.read_text())
        if data["error"]:
            failures.append(f"{file.stem}: {data['error']}")
        name, mesh = file.stem[:-6], file.stem[-5:]
        read[name, mesh] = data
    assert not failures, "\n".join(failures)
    return read


@pytest.mark.parametrize(("name", "mesh"), only(KEPT, CELLS))
def test_equals_one_device(results: dict[tuple[str, str], dict], name: str, mesh: str) -> None:
    worst = results[name, mesh]["worst"]
    assert worst.keys() == QUANTITIES
    for quantity, (excess, tensor) in worst.items():
        assert excess <= 1, f"{quantity}: {tensor} is {excess:.2f} times its tolerance off"


@pytest.mark.parametrize(("name", "mesh"), [cell for cell in only(KEPT, CELLS) if cell.values[1][2] != "1"])
def test_each_rank_holds_only_its_shard(results: dict[tuple[str, str], dict], name: str, mesh: str) -> None:
    result, tp, itemsize = results[name, mesh], int(mesh[2]), MODELS[name].dtype.itemsize
    layouts = {weight: Layout.parse(text) for weight, text in result["layouts"].items()}
    # Of 4 ranks the plan may make one axis or two, `tp0` and `tp1`.
    ranks = {split.axis: tp if split.axis == TP else 2 for layout in layouts.values() for split in layout.splits}
    assert ranks
    for weight, parameter in MODELS[name].make().named_parameters():
        whole, held = parameter.numel() * itemsize, [num_bytes for num_bytes in result["weights"][weight] if num_bytes]
        layout = layouts.get(weight, REPLICATED)
        parts = prod(ranks[split.axis] for split in layout.splits)
        if layout.ragged:
            assert sum(held) == whole * len(held) // parts and max(held) < whole, weight
        else:
            assert set(held) == {whole // parts}, weight


def test_fused_queries_keys_and_values_are_split_by_heads(results: dict[tuple[str, str], dict]) -> None:
    assert results["vit", "1-2-1"]["layouts"]["blocks.0.attn.qkv.weight"] == "tp:0x3"
    assert results["vit-3-heads", "1-2-1"]["layouts"].get("blocks.0.attn.qkv.weight") != "tp:0x3"
