"""Groups of ranks in the device mesh."""

from __future__ import annotations

from autopar.ir.mesh import Mesh
from autopar.ir.tensor_axes import axis_index


def test_groups_of_the_axes() -> None:
    mesh = Mesh(pp=2, tp=2, dp=2)
    assert {axis: sorted({mesh.group(rank, axis) for rank in range(8)}) for axis in mesh.axes} == {
        "pp": [(0, 4), (1, 5), (2, 6), (3, 7)],
        "dp": [(0, 2), (1, 3), (4, 6), (5, 7)],
        "tp": [(0, 1), (2, 3), (4, 5), (6, 7)],
    }
    assert [Mesh(3, 1, 2).group(3, axis) for axis in mesh.axes] == [(1, 3, 5), (2, 3), (3,)]


def test_groups_of_several_tensor_axes() -> None:
    mesh = Mesh(pp=1, tp=4, dp=2, tp_axes=(2, 2))
    assert str(mesh) == "pp 1 × tp (2 × 2) × dp 2" and mesh.axis_sizes == {"tp0": 2, "tp1": 2}
    assert {axis: sorted({mesh.group(rank, axis) for rank in range(8)}) for axis in (*mesh.axes, "tp")} == {
        "pp": [(0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,)],
        "dp": [(0, 4), (1, 5), (2, 6), (3, 7)],
        "tp0": [(0, 2), (1, 3), (4, 6), (5, 7)],
        "tp1": [(0, 1), (2, 3), (4, 5), (6, 7)],
        "tp": [(0, 1, 2, 3), (4, 5, 6, 7)],
    }
    assert [axis_index(mesh.axis_sizes, shard) for shard in range(4)] == [
        {"tp0": i, "tp1": j} for i, j in ((0, 0), (0, 1), (1, 0), (1, 1))
    ]
