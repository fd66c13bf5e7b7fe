"""Loops of Lightning Fabric on ranks have the numbers of the same loop on one device."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from support.faults import workers
from support.lightning_loops import BATCH, FabricLoop, model

from autopar.api.checkpoint import read_weights
from autopar.errors import CheckpointError, UsageError
from autopar.integrations.lightning import AutoparStrategy

warnings.filterwarnings("ignore", category=UserWarning, module="lightning")


def alone(**arguments: Any) -> Fabric:
    return Fabric(accelerator="cpu", devices=1, **arguments)


def on_ranks(mesh: dict[str, Any], **arguments: Any) -> Fabric:
    strategy = AutoparStrategy(devices=2, batch_size=BATCH, cost="analytic", **mesh)
    return Fabric(accelerator="cpu", strategy=strategy, **arguments)


@functools.cache
def expected() -> tuple[list[float], dict[str, torch.Tensor], list[float]]:
    """Losses of two epochs on one device, weights after them, norms of gradients."""
    loop = FabricLoop(alone())
    return loop.run() + loop.run(), loop.module.state_dict(), loop.norms


def test_a_loop_goes_on_from_a_checkpoint_under_another_mesh(tmp_path: Path) -> None:
    losses, weights, norms = expected()
    first = FabricLoop(on_ranks({"pp": 2, "microbatches": 2}))
    assert first.fabric.world_size == 1 and first.fabric.is_global_zero
    assert first.run() == pytest.approx(losses[:4], abs=1e-5) and first.norms == pytest.approx(norms[:2], rel=1e-4)
    first.fabric.save(tmp_path / "checkpoint", {**first.state(), "seen": torch.tensor([7])})
    first.fabric.save(tmp_path / "checkpoint", {**first.state(), "seen": torch.tensor([8])})
    assert sorted(path.name for path in (tmp_path / "checkpoint").glob("rest-*")) == ["rest-2.ckpt"]
    saved = first.module.state_dict()
    first.fabric.strategy.teardown()

    second = FabricLoop(on_ranks({"dp": 2}))
    state = second.state()
    left = second.fabric.load(tmp_path / "checkpoint", state)
    assert state["epoch"] == 1 and left["seen"].tolist() == [8] and list(left) == ["seen"]
    assert second.run() == pytest.approx(losses[4:], abs=1e-5)
    for name, tensor in second.module.state_dict().items():
        torch.testing.assert_close(tensor, weights[name], atol=1e-5, rtol=0)
    with pytest.raises(UsageError, match="has no 'teacher'; it has 'epoch', 'model', 'optimizer', 'scheduler', 'seen'"):
        second.fabric.load(tmp_path / "checkpoint", {"teacher": 1})
    with pytest.raises(UsageError, match=r"Give what fabric\.setup"):
        second.fabric.load(tmp_path / "checkpoint", {"optimizer": second.optimizer})
    second.fabric.load(tmp_path / "checkpoint", {"model": second.module})  # its optimizer stays as it is
    assert all(torch.equal(tensor, saved[name]) for name, tensor in second.module.state_dict().items())
    assert len(second.optimizer.state_dict()["state"][0]) == 3
    second.fabric.strategy.teardown()
    assert workers() == {}
    assert all(torch.equal(tensor, saved[name]) for name, tensor in read_weights(tmp_path / "checkpoint").items())


def test_mixed_precision_and_a_checkpoint_of_another_strategy(tmp_path: Path) -> None:
    clip = {"clip_val": 1e-3}
    reference = FabricLoop(alone(precision="bf16-mixed"), clip=clip)
    losses = reference.run()
    reference.fabric.save(tmp_path / "file.ckpt", reference.state())
    losses += reference.run()
    loop = FabricLoop(on_ranks({"pp": 2}, precision="bf16-mixed"), clip=clip)
    assert loop.module.pm.plan.precision == "bf16"
    assert loop.run() == pytest.approx(losses[:4], abs=1e-4)
    loop.fabric.load(tmp_path / "file.ckpt", loop.state())
    assert loop.run() == pytest.approx(losses[4:], abs=1e-4)
    loop.fabric.strategy.teardown()


def test_a_model_without_an_optimizer_is_evaluated(tmp_path: Path) -> None:
    fabric = on_ranks({"pp": 2}, precision="64-true")
    own: Any = model()
    fabric.launch()
    module = fabric.setup(own)
    x = torch.randn(BATCH, 3, 32, 32)
    module.eval()
    with torch.inference_mode():
        output = module(x)
    torch.testing.assert_close(output, own.eval()(x.double()).detach().float())
    assert len(list(module.parameters())) == len(list(own.parameters())) and module.num_classes == 10
    with pytest.raises(UsageError, match=r"AdamW comes too late: .* fabric.setup\(model, optimizer\)"):
        fabric.setup_optimizers(torch.optim.AdamW(own.parameters()))
    with pytest.raises(UsageError, match=r"forward_features runs modules of the model"):
        module.forward_features(x)
    fabric.save(tmp_path / "checkpoint", {"model": module})
    with torch.no_grad():
        own.head.weight.zero_()
    module.load_state_dict(own.state_dict())
    fabric.load_raw(tmp_path / "checkpoint", module)
    with torch.inference_mode():
        torch.testing.assert_close(module(x), output)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"is not a checkpoint: it has no checkpoint.json"):
        fabric.load(tmp_path / "empty", {"model": module})
    with pytest.raises(CheckpointError, match="is a file, and ranks write checkpoints to a folder"):
        fabric.save(tmp_path / "checkpoint" / "checkpoint.json", {"model": module})
    with pytest.raises(UsageError, match="Say what to load"):
        fabric.load(tmp_path / "checkpoint")
    fabric.strategy.teardown()
