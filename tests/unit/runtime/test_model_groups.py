"""The default process group of autopar's models, with one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar import UsageError
from autopar.runtime.launch.model_groups import DROPPED, DefaultGroup, close_dropped


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    assert not dist.is_initialized()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def join(group: DefaultGroup, backend: str = "gloo") -> Any:
    return group.join(backend, 0, 1, torch.device("cpu"), 60.0, dist.HashStore())


def test_the_last_model_destroys_the_group() -> None:
    group = DefaultGroup()
    for _ in range(2):
        models = [join(group) for _ in range(3)]
        assert not group.is_users()
        for model in models:
            assert dist.is_initialized()
            group.leave(model)
        assert not dist.is_initialized()


def test_models_share_one_backend() -> None:
    group = DefaultGroup()
    join(group)
    with pytest.raises(UsageError, match=r'open in this process run over gloo, this one .* or pass backend="gloo"'):
        join(group, "nccl")


def test_a_group_of_the_user_is_not_destroyed() -> None:
    group = DefaultGroup()
    model = join(group)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert group.is_users()
    group.leave(model)
    assert dist.is_initialized()


def test_models_that_all_ranks_have_dropped_are_closed() -> None:
    closed: list[int] = []
    for number in (5, 6, 7):
        DROPPED[number] = ExitStack()
        DROPPED[number].callback(closed.append, number)
    close_dropped([[7, 6, 5], [5, 7]])
    assert closed == [5, 7] and list(DROPPED) == [6]
    DROPPED.pop(6)
