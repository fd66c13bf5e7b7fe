"""`AutoparTrainerStrategy`: the Lightning Trainer on the ranks of a plan."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from autopar.api.prepare import PreparedModule, PreparedOptimizer
from autopar.errors import AutoparError, UsageError, WorkerError, caller_level
from autopar.integrations.lightning.checkpoint import (
    Rest,
    is_folder,
    load_folder,
    read_rest,
    save_folder,
)
from autopar.integrations.lightning.library import trainer_module
from autopar.integrations.lightning.part import Part, part_of
from autopar.integrations.lightning.shared import RanksStrategy
from autopar.integrations.lightning.trainer_plugins import RanksPrecision, check_callbacks, the_optimizer
from autopar.ir.plan_constraints import check_choice

STRATEGIES, PLUGINS = trainer_module("strategies"), trainer_module("plugins")
StateDictType = Literal["full", "sharded"]


class AutoparTrainerStrategy(RanksStrategy, STRATEGIES.ParallelStrategy):
    """Strategy of the Lightning Trainer: ``Trainer(strategy=AutoparTrainerStrategy(devices=4, batch_size=256))``.

    The ranks run one module of the LightningModule, which has all trainable parameters; ``training_step`` and all else
    stay as they are. From ``setup`` to ``teardown`` the attribute is a `PreparedModule`; then it is the unmodified
    module again, with the trained weights. Processes and data are as for `AutoparStrategy`.
    """

    def __init__(
        self, devices: int, module: str | None = None, state_dict_type: StateDictType = "full", **arguments: Any
    ) -> None:
        """Take the options of the ranks.

        Args:
            devices: number of ranks. Leave ``devices`` out of ``Trainer(…)``.
            module: name of the module that the ranks run, such as ``task.model``; by default the only child of the
                LightningModule that has parameters.
            state_dict_type: "full" checkpoints are files of Lightning's, with whole tensors, as of any other strategy.
                "sharded" ones are folders that all ranks write, and `AutoparTrainerStrategy` reads under any mesh; they
                keep the counters of random operations too.
            arguments: as for `AutoparStrategy`.
        """
        check_choice("state_dict_type", state_dict_type, get_args(StateDictType))
        self.configure(devices, arguments)
        super().__init__()
        self.num_nodes = 1  # the Trainer sets it
        self.path, self.state_dict_type = module, state_dict_type
        self.part: Part | None = None
        self.prepared: PreparedModule | None = None
        self.changed = self.interrupted = False  # whether the ranks' weights are others, and whether an error ended it
        self.loaded: LoadedFolder | None = None

    @property
    def precision_plugin(self) -> Any:
        own = self._precision_plugin
        return own if own is not None else RanksPrecision(PLUGINS.Precision())

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        self._precision_plugin = None if plugin is None else RanksPrecision(plugin)

    # -- begin and end -----------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        self.check_place("Trainer", self.parallel_devices, self.num_nodes)
        if self._layer_sync is not None:
            raise UsageError(
                "Trainer(sync_batchnorm=True): on ranks batch norm uses the statistics of a replica's microbatches. "
                "Leave it out."
            )

    def setup_environment(self) -> None:
        self.join_processes()
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        """Start the ranks of the module.

        Raises:
            UsageError: as `part_of` and `autopar.prepare`; or a callback or ``configure_optimizers`` does not fit.
        """
        fitting = trainer.state.fn == "fit"
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        self.part = part_of(self.lightning_module, self.path)
        self.changed, self.interrupted = fitting, False
        optimizer = None
        if fitting:
            check_callbacks(trainer.callbacks)
            self.setup_optimizers(trainer)
            optimizer = the_optimizer(self.optimizers, type(self.lightning_module).__name__)
        self.prepared, prepared_optimizer = self.on_ranks(self.part.module, optimizer, self.precision_plugin)
        self.part.put(self.prepared)
        if prepared_optimizer is not None:
            self.optimizers = [prepared_optimizer]
        self.model_to_device()
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        """Move what the ranks do not run, such as metrics."""
        self.lightning_module.to(self.root_device)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """As the Trainer's, on the CPU: one device may not have room for the weights."""
        with super().tensor_init_context(empty_init), torch.device("cpu"):
            yield

    def on_exception(self, exception: BaseException) -> None:
        self.interrupted = True

    def teardown(self) -> None:
        """Put the unmodified module back, with the trained weights, and end the ranks."""
        try:
            if self.part is not None:
                self.part.put(self.part.module)
                self.fetch(self.part.module)
        finally:
            self.optimizers = [own.optimizer if isinstance(own, PreparedOptimizer) else own for own in self.optimizers]
            self.part = self.prepared = self.loaded = None
            self.close_ranks()
            # Without ParallelStrategy's: Lightning's default environment would remove the launcher's WORLD_SIZE.
            super(STRATEGIES.ParallelStrategy, self).teardown()

    def fetch(self, module: nn.Module) -> None:
        """Give the unmodified module the weights of the ranks; under "full" its optimizer their state too.

        After an exception they may be gone; under a launcher they may never be there together again.
        """
        if self.prepared is None or not self.changed:
            return
        optimizer = self.modules[self.prepared]
        try:
            if self.interrupted and self.launch is not None:
                raise WorkerError("A process of the launcher has raised.")
            module.load_state_dict(self.prepared.state_dict())
            if optimizer is not None and self.state_dict_type == "full":
                optimizer.optimizer.load_state_dict(optimizer.state_dict())
        except AutoparError as error:
            if not self.interrupted:
                raise
            warnings.warn(
                f"{self.part} has the weights from before the run, those of the ranks are lost: {error} Go on from the "
                "last checkpoint.",
                stacklevel=caller_level(),
            )

    # -- processes ---------------------------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As `RanksStrategy.reduced`."""
        return self.reduced(tensor, group, reduce_op)

    # -- checkpoints -------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether the ranks read the checkpoint; a file of Lightning's is loaded before there are any."""
        return self.state_dict_type == "sharded"

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole tensors; under "sharded" without those of the ranks."""
        if self.state_dict_type == "full" or self.part is None or self.prepared is None:
            return super().lightning_module_state_dict()
        with self.part.left_out(self.prepared):
            return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Whole state; under "sharded" the ranks write it."""
        return super().optimizer_state(optimizer) if self.state_dict_type == "full" else {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a file of Lightning's; under "sharded" a folder.

        Raises:
            UsageError: "sharded", and the run has ended, or there are storage options.
            CheckpointError: as `ParallelModel.save_checkpoint`.
        """
        if self.state_dict_type == "full":
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if self.prepared is None or storage_options is not None:
            reason = "the ranks have ended with the run" if self.prepared is None else "ranks take no storage_options"
            raise UsageError(f"{filepath} cannot be saved: {reason}. Save by ModelCheckpoint, without storage_options.")
        optimizer = self.modules[self.prepared]
        save_folder(filepath, self.prepared, optimizer, Rest(checkpoint))

    def load_checkpoint(self, checkpoint_path: Any, **options: Any) -> dict[str, Any]:
        """Content of a file of Lightning's, or of a folder without the ranks' parts.

        Raises:
            UsageError: it is a folder, and the strategy has ``state_dict_type="full"``.
        """
        self.loaded = None
        if not is_folder(checkpoint_path):
            return super().load_checkpoint(checkpoint_path, **options)
        if self.state_dict_type == "full":
            raise UsageError(
                f'{checkpoint_path} is a folder that ranks have written. Pass state_dict_type="sharded" to '
                "AutoparTrainerStrategy, with which the ranks read it."
            )
        self.loaded = LoadedFolder(checkpoint_path, read_rest(checkpoint_path, **options))
        return dict(self.loaded.rest.state)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights; from a folder the ranks load theirs, with the optimizer."""
        self.changed = True
        if self.loaded is None or self.part is None or self.prepared is None:
            super().load_model_state_dict(checkpoint, strict)
            return
        with self.part.left_out(self.prepared):
            super().load_model_state_dict(checkpoint, strict)
        load_folder(self.loaded.path, self.prepared, self.modules[self.prepared], self.loaded.rest)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizer's state from a file; from a folder it was loaded with the weights."""
        if self.loaded is None:
            super().load_optimizer_state_dict(checkpoint)


@dataclass(frozen=True)
class LoadedFolder:
    """Folder of a checkpoint whose rest was read, while the ranks have not read their parts."""

    path: Any
    rest: Rest
