"""Keys of mesh axes differ between models that are open together; a model that follows a closed one has its keys."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from autopar.ir.mesh import Mesh
from autopar.ops.collectives import COMMUNICATORS
from autopar.runtime.comm.axis_communicators import register_axes, unregister, unused_model_name


def test_keys_are_free_again_after_close() -> None:
    before = set(COMMUNICATORS)
    transport: Any = SimpleNamespace(rank=0, symmetric_buffer=lambda ranks: None, groups={(0, 1): None})
    first = register_axes(unused_model_name(), Mesh(1, 2, 1), transport)
    second = register_axes(unused_model_name(), Mesh(1, 2, 1), transport)
    assert first.keys() == second.keys() == {"tp"} and first != second
    unregister(first)
    assert register_axes(unused_model_name(), Mesh(1, 2, 1), transport) == first  # compiled code contains the keys
    unregister(first)
    unregister(second)
    assert set(COMMUNICATORS) == before
