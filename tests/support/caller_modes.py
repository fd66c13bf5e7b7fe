"""Torch's modes and settings that a caller may be in, and a small training run within them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import autopar

Mode = Callable[[], AbstractContextManager[object]]
PLACES = ("one step", "the loop", "everything")
CPU = torch.device("cpu")
MKLDNN: Any = torch.backends.mkldnn
SGD = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9)


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def float32_precision() -> Iterator[None]:
    MKLDNN.matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        MKLDNN.matmul.fp32_precision = "none"


# Modes of the caller alone: they never have an effect.
MODES: Mapping[str, Mode] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast that is off": lambda: torch.autocast("cpu", enabled=False),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "a device": lambda: torch.device("meta"),
    "default device": default_device,
}
# Settings of the process: those at parallelize belong to the run.
SETTINGS: Mapping[str, Mode] = {
    "default dtype": default_dtype,
    "deterministic": deterministic,
    "float32 precision": float32_precision,
}


class MakesTensors(nn.Module):
    """A perceptron whose forward makes tensors of the default dtype, and on the default device without ``device``."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()
        self.device = device
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(F.gelu(self.first(x)), 0.25, self.training)
        made = torch.cumsum(torch.linspace(0.1, 0.7, 16, device=self.device), 0)  # rounded to the default dtype
        return self.second(hidden + made.to(hidden.dtype))


class WeighedLoss(nn.Module):
    """A loss with an autocast region of its own.

    Its scale shows settings that change no number of such a small model.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.eye(4)

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu"):
            mixed = output @ self.mix
        made = torch.ones(len(output), device=output.device)
        settings = torch.are_deterministic_algorithms_enabled(), MKLDNN.matmul.fp32_precision == "bf16"
        scale = 1 + 0.5 * settings[0] + 0.25 * settings[1]
        return (F.cross_entropy(mixed.float(), target, reduction="none") * made).mean() * scale


Results = dict[str, torch.Tensor]


def results(devices: int, mode: Mode, place: str, **options: Any) -> Results:
    """Losses, outputs, gradients and weights of three updates and a call at another batch size, within a mode.

    Args:
        place: one of `PLACES`, what the mode's ``with`` is around.
    """
    torch.manual_seed(0)
    loss_fn = WeighedLoss()
    x, y, more = torch.randn(8, 8), torch.randint(0, 4, (8,)), torch.randn(6, 8)

    def around(what: str) -> AbstractContextManager[object]:
        return mode() if place == what else nullcontext()

    with around("everything"):
        default = torch.get_default_device()
    model = MakesTensors(None if default == CPU else CPU)  # as written, it would run nowhere else
    found: Results = {}
    with around("everything"):
        pm = autopar.parallelize(model, devices, x, loss_fn=loss_fn, optimizer=SGD, microbatches=2, seed=3, **options)
        with pm, around("the loop"):
            for step in range(3):
                with around("one step") if step == 1 else nullcontext():
                    result = pm.train_step(x, y, return_outputs=True)
                    found |= {f"loss {step}": torch.tensor(result.loss, device="cpu", dtype=torch.float64),
                              f"outputs {step}": result.outputs}  # fmt: skip
                    if step == 1:
                        found["new shape"] = pm(more)
            pm.forward_backward(x, y)
            found |= {f"gradient of {name}": gradient for name, gradient in pm.gradients().items()}
            found |= pm.state_dict()
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def assert_equal(found: Results, expected: Results, what: str) -> None:
    """Assert that two runs have equal results, to the last bit."""
    assert found.keys() == expected.keys(), what
    differing = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not differing, f"{what}: {differing}; losses {[found[f'loss {k}'].item() for k in range(3)]}"
    assert {name: t.dtype for name, t in found.items()} == {name: t.dtype for name, t in expected.items()}, what
