"""Lightning's strategies: what they refuse, and what the ranks get. Only one rank runs, in this process."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.utilities.model_summary import summarize
from support.lightning_loops import BATCH, Classifier, loader, model
from torch import nn

from autopar.errors import TrainingError, UsageError
from autopar.integrations.lightning import AutoparStrategy, AutoparTrainerStrategy
from autopar.integrations.lightning.library import lightning_module

warnings.filterwarnings("ignore", category=UserWarning, module="lightning")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
QUIET: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "max_epochs": 1, "limit_train_batches": 2,
}  # fmt: skip


class OwnPrecision(MixedPrecision):
    """A plugin that autopar does not know."""


def fabric(**arguments: Any) -> Fabric:
    return Fabric(accelerator="cpu", strategy=AutoparStrategy(2), **arguments)


def one_rank(**arguments: Any) -> Any:
    """Fabric with one rank, launched."""
    strategy = AutoparStrategy(1, batch_size=BATCH, cost="analytic", **arguments)
    found = Fabric(accelerator="cpu", strategy=strategy)
    found.launch()
    return found


def fitted(own: pl.LightningModule, callbacks: Any = None, **arguments: Any) -> None:
    """Fit with one rank."""
    strategy = AutoparTrainerStrategy(1, batch_size=BATCH, cost="analytic", **arguments)
    pl.Trainer(strategy=strategy, callbacks=callbacks, **QUIET).fit(own, loader())


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: AutoparStrategy(0), "devices=0 must be a whole number of at least 1"),
    (lambda: AutoparStrategy(2, precision="bf16"), "takes no precision. Give Lightning's"),
    (lambda: AutoparTrainerStrategy(2, state_dict_type="part"), "state_dict_type='part' is unknown"),  # type: ignore
    (lambda: fabric(num_nodes=2), r"Fabric\(num_nodes=2\), but this run has 1 node"),
    (lambda: fabric(devices=3), "asked for 3 devices, .* for 2"),
    (lambda: Fabric(accelerator="cpu", strategy=AutoparStrategy(2, backend="nccl")), "backend='nccl', but Fabric's"),
    (lambda: fabric(plugins=OwnPrecision("bf16-mixed", "cpu")), "'bf16-mixed' by OwnPrecision cannot be that of"),
    (lambda: pl.Trainer(accelerator="cpu", strategy=AutoparTrainerStrategy(2), num_nodes=2), "has 1 node"),
    (lambda: pl.Trainer(accelerator="cpu", strategy=AutoparTrainerStrategy(2), devices=3), "asked for 3 devices"),
    (lambda: pl.Trainer(accelerator="cpu", strategy=AutoparTrainerStrategy(2), sync_batchnorm=True), "statistics of"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_contradictions_are_refused_at_once(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()


def test_other_accelerators_are_refused() -> None:
    strategy = AutoparStrategy(2)
    strategy.parallel_devices = [torch.device("mps", 0)]
    with pytest.raises(UsageError, match=r'runs on CPUs and CUDA GPUs. Pass Fabric\(accelerator="cpu"\)'):
        strategy._configure_launcher()


@pytest.mark.parametrize(
    ("given", "precision", "of_ranks"),
    [
        ("32-true", "32-true", None),
        ("bf16-true", "bf16-true", None),
        ("64-true", "64-true", None),
        ("bf16-mixed", "bf16-mixed", "bf16"),
        ("16-mixed", "bf16-mixed", "bf16"),  # Lightning's choice on CPUs
    ],
)
def test_precisions_are_those_of_ranks(given: Any, precision: str, of_ranks: str | None) -> None:
    plugin: Any = fabric(precision=given).strategy.precision
    assert (plugin.precision, plugin.of_ranks) == (precision, of_ranks)


def test_libraries_are_named_where_they_lack() -> None:
    with pytest.raises(UsageError, match=r"Thing needs lightning: pip install 'autopar\[lightning\]'"):
        lightning_module("no.fabric", "no_fabric", "strategies", "Thing")
    assert lightning_module("no.fabric", "lightning.fabric", "strategies", "Thing").Strategy.__name__ == "Strategy"


def test_autopar_alone_imports_no_lightning() -> None:
    code = "import sys, autopar, autopar.integrations.lightning; print('lightning' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# -- Fabric ------------------------------------------------------------------------------------------------------------


def test_several_optimizers_and_late_ones_are_refused() -> None:
    found, own = one_rank(), model()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"VisionTransformer has 2 optimizers\. Ranks have one"):
        found.setup(own, optimizer, optimizer)
    with pytest.raises(UsageError, match=r"clip_gradients takes the module that fabric.setup returned, not VisionTr"):
        found.clip_gradients(own, optimizer, max_norm=1.0)


def test_loaders_stay_as_they_are_and_collectives_have_one_process() -> None:
    found = one_rank()
    own = loader()
    assert found.setup_dataloaders(own)._dataloader is own
    assert found.all_reduce(torch.tensor(3.0), reduce_op="sum").item() == 3 and found.broadcast("x") == "x"
    assert found.all_gather(torch.ones(2)).shape == (2,)
    assert (found.world_size, found.global_rank, found.local_rank, found.node_rank) == (1, 0, 0, 0)


def test_dropout_follows_seed_everything_and_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # variables in which Lightning keeps the seed
        monkeypatch.setenv(name, "0")
    torch.manual_seed(0)
    own = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    x, outputs = torch.randn(4, 3, 2, 2), []
    for seed in (1, 1, 2):
        Fabric.seed_everything(seed, verbose=False)
        found = Fabric(accelerator="cpu", strategy=AutoparStrategy(1, example_inputs=x, cost="analytic"))
        found.launch()
        module = found.setup(own)
        outputs.append(module(x))
        module._forward_module.training = False  # as Lightning restores modes
        torch.testing.assert_close(module(x), own.eval()(x))
        own.train()
        found.strategy.teardown()
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])


def test_a_norm_that_is_not_finite_is_an_error() -> None:
    found, own = one_rank(), model()
    module, optimizer = found.setup(own, torch.optim.SGD(own.parameters(), lr=0.1))
    found.backward(module(torch.full((BATCH, 3, 32, 32), float("inf"))).sum())
    with pytest.raises(TrainingError, match="norm of the gradients is nan"):
        found.clip_gradients(module, optimizer, max_norm=1.0)


# -- Trainer -----------------------------------------------------------------------------------------------------------


class NoOptimizer(Classifier):
    def configure_optimizers(self) -> None:
        return None


class TwoOptimizers(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


class ClipsAlone(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)


class SkipsSteps(Classifier):
    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        return loss if index % 2 else None


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (NoOptimizer, "configure_optimizers of NoOptimizer returned no optimizers. Ranks have one"),
        (TwoOptimizers, "configure_optimizers of TwoOptimizers returned 2 optimizers. Ranks have one"),
        (ClipsAlone, "weights and gradients are on the ranks"),
    ],
)
def test_programs_that_ranks_cannot_follow_are_refused(own: type[Classifier], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fitted(own())


def test_averages_of_this_process_are_refused() -> None:
    with pytest.raises(UsageError, match="StochasticWeightAveraging averages weights of this process"):
        fitted(Classifier(), [StochasticWeightAveraging(1e-2)])


def test_a_step_without_a_loss_changes_nothing() -> None:
    own, reference = SkipsSteps(), SkipsSteps()
    clipped = QUIET | {"gradient_clip_val": 0.5, "limit_train_batches": 4}
    strategy = AutoparTrainerStrategy(1, batch_size=BATCH, cost="analytic")
    pl.Trainer(strategy=strategy, **clipped).fit(own, loader())
    pl.Trainer(**clipped).fit(reference, loader())
    assert own.losses == pytest.approx(reference.losses, abs=1e-6)
    for name, tensor in reference.state_dict().items():
        torch.testing.assert_close(own.state_dict()[name], tensor, atol=1e-6, rtol=0)


class Summary(pl.Callback):
    """Takes Lightning's summary of the model where its own callback does."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.summary = summarize(pl_module, max_depth=-1)
        self.text = str(self.summary)


def test_the_summary_counts_the_parameters_of_the_model() -> None:
    own, callback = Classifier(), Summary()
    own.example_input_array = torch.zeros(BATCH, 3, 32, 32)  # the summary runs the model
    fitted(own, callback)
    assert callback.summary.total_parameters == sum(p.numel() for p in own.parameters())
    assert "PreparedModule" in callback.text and callback.text.count(f"[{BATCH}, 10]") == 1
