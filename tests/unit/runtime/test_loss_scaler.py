"""The loss scaler against torch's own."""

from __future__ import annotations

import pytest
import torch

from autopar.runtime.optim.loss_scaler import LossScaler

FINITE, OVERFLOW = 1.0, float("inf")


@pytest.mark.parametrize("norms", [
    [FINITE] * 7,
    [OVERFLOW, FINITE, FINITE, FINITE, OVERFLOW, FINITE, FINITE],
    [FINITE, FINITE, float("nan"), FINITE, FINITE, FINITE, OVERFLOW, OVERFLOW],
])  # fmt: skip
def test_goes_the_way_of_grad_scaler(norms: list[float]) -> None:
    ours, theirs = LossScaler(growth_interval=3), torch.amp.GradScaler("cpu", growth_interval=3)
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    assert LossScaler().state_dict() == torch.amp.GradScaler("cpu").state_dict()
    for norm in norms:
        theirs.scale(parameter.sum()).backward()
        assert parameter.grad is not None
        parameter.grad.mul_(norm)
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        assert ours.update(norm) is (norm == FINITE)
        assert ours.state_dict() == theirs.state_dict()


def test_goes_on_from_a_saved_state() -> None:
    first, second = LossScaler(growth_interval=3), LossScaler()
    for norm in (OVERFLOW, FINITE, FINITE):
        first.update(norm)
    second.load_state_dict(first.state_dict())
    assert second.update(FINITE) and second.scale == 65536.0
    assert second.state_dict() == {**first.state_dict(), "scale": 65536.0, "_growth_tracker": 0}


def test_gradients_are_unscaled() -> None:
    gradients = [torch.full((2,), 65536.0), torch.tensor([131072.0])]
    LossScaler().unscale(gradients)
    assert [g.tolist() for g in gradients] == [[1.0, 1.0], [2.0]]
    LossScaler().unscale([])


def test_recovers_from_any_number_of_overflows() -> None:
    scaler = LossScaler(growth_interval=1)
    assert not any(scaler.update(float("inf")) for _ in range(500))
    gradient = torch.full((2,), 3.0) * scaler.scale
    scaler.unscale([gradient])
    assert gradient.tolist() == [3.0, 3.0]
    assert scaler.update(1.0) and scaler.scale == 2.0**-23
