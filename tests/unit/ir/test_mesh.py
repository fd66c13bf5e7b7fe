"""Groups of ranks in the device mesh."""

from __future__ import annotations

from autopar.ir.mesh import MESH_AXES, Mesh


def test_groups_of_the_axes() -> None:
    mesh = Mesh(pp=2, tp=2, dp=2)
    assert {axis: sorted({mesh.group(rank, axis) for rank in range(8)}) for axis in MESH_AXES} == {
        "pp": [(0, 4), (1, 5), (2, 6), (3, 7)],
        "dp": [(0, 2), (1, 3), (4, 6), (5, 7)],
        "tp": [(0, 1), (2, 3), (4, 5), (6, 7)],
    }
    assert [Mesh(3, 1, 2).group(3, axis) for axis in MESH_AXES] == [(1, 3, 5), (2, 3), (3,)]
