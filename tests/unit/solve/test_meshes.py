"""Meshes of a number of devices: which there are, which not and why, and sizes that contradict each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from autopar.cost.hardware.load import load_hardware
from autopar.errors import HardwareError, UsageError
from autopar.ir.network import Network, Port
from autopar.solve.space.constraints import Constraints
from autopar.solve.space.meshes import divisors, nearest, possible_meshes, tensor_factorisations

NODE = replace(load_hardware("h200-nvlink"), devices_per_node=4, network=None)
CLUSTER = replace(NODE, network=Network(Port(1e-5, 5e10)))


def meshes(**asked: Any) -> tuple[list[str], dict[str, str]]:
    """Allowed meshes as text, and the others with their reasons."""
    found = possible_meshes(Constraints(**{"batch": 64, **asked}), CLUSTER)
    return [str(m) for m in found.allowed], {str(m): reason for m, reason in found.refused.items()}


def test_all_factorisations_of_a_node() -> None:
    assert meshes(devices=4) == (
        [
            "pp 1 × tp 1 × dp 4", "pp 2 × tp 1 × dp 2", "pp 4 × tp 1 × dp 1",
            "pp 1 × tp 2 × dp 2", "pp 2 × tp 2 × dp 1", "pp 1 × tp 4 × dp 1",
        ],
        {},
    )  # fmt: skip
    assert meshes(devices=4, tp=2, dp=2)[0] == ["pp 1 × tp 2 × dp 2"]
    assert meshes(devices=4, pp=1, dp=1)[0] == ["pp 1 × tp 4 × dp 1"]


def test_tensor_axes() -> None:
    """Sizes of the axes are searched where tp is a number, and given by a tuple."""
    assert meshes(devices=4, tp=4)[0] == ["pp 1 × tp 4 × dp 1", "pp 1 × tp (2 × 2) × dp 1"]
    assert meshes(devices=4, tp=(2, 2))[0] == ["pp 1 × tp (2 × 2) × dp 1"]
    assert meshes(devices=4, tp=(4,))[0] == ["pp 1 × tp 4 × dp 1"]
    assert tensor_factorisations(6) == [(), (2, 3), (3, 2)]
    assert tensor_factorisations(8) == [(), (2, 4), (4, 2), (2, 2, 2)]
    assert tensor_factorisations(16) == [(), (2, 8), (4, 4), (8, 2), (2, 2, 4), (2, 4, 2), (4, 2, 2)]
    for wrong in ((), (1, 2), (2, 0), (2, 2.0), (2, 2, 2, 2), (True, 2)):
        with pytest.raises(UsageError, match="must be a whole number of ranks, or the sizes of up to 3 axes"):
            Constraints(devices=8, batch=8, tp=wrong)  # type: ignore[arg-type]


def test_what_is_left_out_has_a_reason() -> None:
    allowed, refused = meshes(devices=12, batch=6, pp=1)
    assert allowed == ["pp 1 × tp 2 × dp 6", "pp 1 × tp 4 × dp 3"]
    assert refused == {
        "pp 1 × tp 1 × dp 12": "12 replicas cannot share a batch of 6 evenly",
        "pp 1 × tp 3 × dp 4": "4 replicas cannot share a batch of 6 evenly",
        "pp 1 × tp 6 × dp 2": "groups of 6 ranks cross nodes of 4 devices",
        "pp 1 × tp 12 × dp 1": "groups of 12 ranks cross nodes of 4 devices",
    }
    assert meshes(devices=2, batch=6, microbatches=6)[1] == {
        "pp 1 × tp 1 × dp 2": "a replica has 3 samples for 6 microbatches"
    }
    assert meshes(devices=2, zero=1)[0] == ["pp 1 × tp 1 × dp 2"]


def test_a_group_across_nodes_must_be_asked_for() -> None:
    assert meshes(devices=8, tp=(8,))[0] == ["pp 1 × tp 8 × dp 1"]
    assert "pp 1 × tp 8 × dp 1" not in meshes(devices=8)[0]
    with pytest.raises(HardwareError, match="one node of 4 devices and no network"):
        possible_meshes(Constraints(devices=8, batch=8, tp=8), NODE)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"pp": 2, "tp": 2, "dp": 2}, "pp=2 × tp=2 × dp=2 make 8 devices, not 4. Use devices=8 or pp=1 or tp=1 or "
                                      "dp=1."),
        ({"pp": 1, "tp": 1, "dp": 2}, "pp=1 × tp=1 × dp=2 make 2 devices, not 4. Use devices=2 or pp=2 or tp=2 or "
                                      "dp=4."),
        ({"pp": 3}, "pp=3 needs a multiple of 3 devices, not 4. Use devices=3 or pp=2 or pp=4."),
        ({"tp": 3}, "tp=3 needs a multiple of 3 devices, not 4. Use devices=3 or tp=2 or tp=4."),
        ({"dp": 8}, "dp=8 needs a multiple of 8 devices, not 4. Use devices=8 or dp=4."),
        ({"devices": 12, "pp": 2, "tp": 4}, "pp=2 × tp=4 make 8 devices, not 12. Use devices=8 or pp=3 or tp=6."),
        ({"devices": 5, "dp": 5}, "dp=5: 5 replicas cannot share a batch of 64 samples evenly. Use dp=4 or dp=8, or a "
                                  "batch of 60 or 65."),
        ({"dp": 4, "microbatches": 32}, "microbatches=32, but each of 4 replicas has 16 samples of the batch of 64. "
                                        "Use microbatches=16 or less, or fewer replicas."),
    ],
)  # fmt: skip
def test_sizes_that_contradict_each_other(asked: Mapping[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        possible_meshes(Constraints(**{"devices": 4, "batch": 64, **asked}), CLUSTER)
    assert str(caught.value) == text


def test_a_pin_needs_a_mesh_with_its_stage() -> None:
    allowed, refused = meshes(devices=4, pins={"blocks.1": 0, "head": 1}, tp=1)
    assert allowed == ["pp 2 × tp 1 × dp 2", "pp 4 × tp 1 × dp 1"]
    assert refused == {"pp 1 × tp 1 × dp 4": "head is pinned to stage 1"}
    for asked, stages in (({}, "4 stages"), ({"tp": 2}, "2 stages"), ({"dp": 4}, "1 stage")):
        with pytest.raises(UsageError) as caught:
            meshes(devices=4, pins={"head": 4}, **asked)
        assert str(caught.value) == (
            f"head is pinned to stage 4, but 4 devices make {stages} at most, stages are counted from 0. Pin it to an "
            "earlier stage."
        )
    with pytest.raises(UsageError, match=r"head is pinned to stage -1, stages are 0 to 1\. Pin it to one of these\."):
        meshes(devices=4, pp=2, pins={"head": -1})


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12] and divisors(16) == [1, 2, 4, 8, 16] and divisors(1) == [1]
    assert nearest(5, divisors(64)) == [4, 8] and nearest(100, divisors(8)) == [8] and nearest(1, [1, 2]) == [2]
