"""`autopar doctor` on GPUs: a message by each transport. Skips itself with fewer than two."""

from __future__ import annotations

import pytest
import torch

from autopar.tools.doctor.devices import seen_gpus
from autopar.tools.doctor.transfers import TRANSPORTS, pair_transfers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def test_each_transport_carries_a_message() -> None:
    gpus = seen_gpus().gpus
    result = pair_transfers(gpus, (0, 1))
    assert not result.failed
    expected = TRANSPORTS if 1 in gpus[0].peers else TRANSPORTS[:2]
    assert tuple(transfer.transport for transfer in result.transfers) == expected
    assert all(0 < transfer.seconds < 1 for transfer in result.transfers)
