"""The Lightning Trainer on ranks has the numbers of the Trainer on one device."""

from __future__ import annotations

import functools
import logging
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.faults import workers
from support.lightning_loops import BATCH, Classifier, ManualClassifier, loader, trainer
from timm.models import VisionTransformer

from autopar.errors import UsageError
from autopar.integrations.lightning import AutoparTrainerStrategy

warnings.filterwarnings("ignore", category=UserWarning, module="lightning")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
PLAIN: dict[str, Any] = {"accumulate_grad_batches": 1, "gradient_clip_val": None}


def strategy(**arguments: Any) -> AutoparTrainerStrategy:
    return AutoparTrainerStrategy(devices=2, batch_size=BATCH, cost="analytic", **arguments)


@functools.cache
def alone() -> Classifier:
    """Two epochs on one device."""
    own = Classifier()
    trainer("auto").fit(own, loader(), loader())
    return own


def assert_like(own: Classifier, other: Classifier) -> None:
    """Compare weights, and losses as far as ``own`` has them."""
    assert own.losses == pytest.approx(other.losses[-len(own.losses) :], abs=1e-5)
    for name, tensor in other.state_dict().items():
        torch.testing.assert_close(own.state_dict()[name], tensor, atol=1e-5, rtol=0, msg=name)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_run_goes_on_from_a_checkpoint_under_another_mesh(kind: Any, tmp_path: Path) -> None:
    first = Classifier()
    trainer(strategy(pp=2, state_dict_type=kind), tmp_path, epochs=1).fit(first, loader(), loader())
    assert type(first.model) is VisionTransformer and workers() == {}
    assert first.losses == pytest.approx(alone().losses[:4], abs=1e-5)

    second, run = Classifier(), trainer(strategy(dp=2, state_dict_type=kind), epochs=2)
    run.fit(second, loader(), loader(), ckpt_path=tmp_path / "last.ckpt")
    assert_like(second, alone())
    assert second.validated[-4:] == pytest.approx(alone().validated[-4:], abs=1e-5)
    if kind == "sharded":
        with pytest.raises(UsageError, match="the ranks have ended with the run"):
            run.save_checkpoint(tmp_path / "after.ckpt")
        return
    run.save_checkpoint(tmp_path / "after.ckpt")
    third, last = Classifier(), trainer("auto", epochs=3)
    last.fit(third, loader(), loader(), ckpt_path=tmp_path / "after.ckpt")
    assert len(third.losses) == 4
    (metrics,) = run.test(third, loader(), verbose=False)
    assert metrics["samples"] == 4 * BATCH and metrics["validation"] == pytest.approx(
        trainer("auto").test(third, loader(), verbose=False)[0]["validation"], abs=1e-5
    )


def test_manual_optimization_in_mixed_precision() -> None:
    reference, own = ManualClassifier(), ManualClassifier()
    trainer("auto", precision="bf16-mixed", **PLAIN).fit(reference, loader(), loader())
    trainer(strategy(pp=2), precision="bf16-mixed", **PLAIN).fit(own, loader(), loader())
    assert own.losses == pytest.approx(reference.losses, abs=1e-3)
    assert own.validated == pytest.approx(reference.validated, abs=1e-3)


class Broken(Classifier):
    """Raises in its fourth step, or presses Ctrl-C."""

    def __init__(self, by_signal: bool) -> None:
        super().__init__()
        self.by_signal = by_signal

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if index == 3:
            assert set(workers()) == {0, 1}
            if self.by_signal:
                os.kill(os.getpid(), signal.SIGINT)
            raise ArithmeticError("no loss today")
        return super().training_step(batch, index)


@pytest.mark.parametrize("by_signal", [False, True])
def test_an_error_or_ctrl_c_ends_the_ranks_and_keeps_the_weights(by_signal: bool) -> None:
    own = Broken(by_signal)
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit if by_signal else ArithmeticError):
            trainer(strategy(pp=2)).fit(own, loader())
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores it from then on
    assert workers() == {} and type(own.model) is VisionTransformer
    changed = {name: t for name, t in own.state_dict().items() if not torch.equal(t, Classifier().state_dict()[name])}
    assert changed  # by the update after the second batch
