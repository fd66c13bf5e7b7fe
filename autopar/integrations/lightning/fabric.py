"""`AutoparStrategy`: Lightning Fabric on the ranks of a plan."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from math import isfinite
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from autopar.api.prepare import PreparedModule
from autopar.errors import TrainingError, UsageError
from autopar.integrations.lightning.checkpoint import (
    Rest,
    is_folder,
    load_folder,
    load_weights,
    read_rest,
    save_folder,
)
from autopar.integrations.lightning.fabric_state import check_names, optimizer_of, restored, single
from autopar.integrations.lightning.fabric_wrapper import (
    NoBackwardSync,
    RanksPrecision,
    prepared_module,
    replace_in_wrapper,
)
from autopar.integrations.lightning.library import fabric_module
from autopar.integrations.lightning.shared import RanksStrategy

STRATEGIES, PLUGINS = fabric_module("strategies"), fabric_module("plugins")


class AutoparStrategy(RanksStrategy, STRATEGIES.Strategy):
    """Strategy of Lightning Fabric: ``Fabric(strategy=AutoparStrategy(devices=4, batch_size=256))``.

    ``fabric.setup(model, optimizer)`` plans the split and starts the ranks; the loop stays as it is. In a plain script
    ``fabric.launch()`` starts no processes: ``fabric.world_size`` is 1, and batches are global ones. Under torchrun
    each process is a rank, and ``fabric.setup_dataloaders`` after ``fabric.setup`` gives it its part of the data.

    ``fabric.save`` writes a folder, from all ranks, that ``fabric.load`` reads under any mesh. A sum by
    ``fabric.all_reduce`` counts each data-parallel replica once; ``fabric.all_gather`` has a row for each process.
    """

    def __init__(self, devices: int, **arguments: Any) -> None:
        """Take the options of the ranks.

        Args:
            devices: number of ranks. Leave ``devices`` out of ``Fabric(…)``.
            arguments: as for `autopar.prepare`, such as ``batch_size`` (global), ``example_inputs``, ``pp`` or
                ``plan``, but no ``precision``, which is Fabric's. ``seed`` is that of ``fabric.seed_everything`` by
                default.
        """
        self.parallel_devices: list[Any] = []  # Fabric sets it, and _num_nodes
        self._num_nodes = 1
        self.configure(devices, arguments)
        super().__init__()
        self._backward_sync_control = NoBackwardSync()
        self.awaited: RemovableHandle | None = None

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @property
    def precision(self) -> Any:
        return self._precision if self._precision is not None else RanksPrecision(PLUGINS.Precision())

    @precision.setter
    def precision(self, plugin: Any) -> None:
        self._precision = None if plugin is None else RanksPrecision(plugin)

    def _configure_launcher(self) -> None:
        self.check_place("Fabric", self.parallel_devices, self.num_nodes)

    def setup_environment(self) -> None:
        self.join_processes()
        super().setup_environment()

    def teardown(self) -> None:
        """End the ranks of all models, as the end of the process does too."""
        self.close_ranks()
        super().teardown()

    def module_to_device(self, module: nn.Module) -> None:
        """Leave the module where it is: its weights go to the ranks, and one device may not have room for them."""

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """As Fabric's, on the CPU: one device may not have room for the weights."""
        stack = ExitStack()
        stack.enter_context(super().module_init_context(empty_init))
        stack.enter_context(torch.device("cpu"))
        return stack

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Optimizer], *scheduler: Any) -> Any:
        """Start the ranks of a model and its optimizer.

        Raises:
            UsageError: there are several optimizers; or as `autopar.prepare`.
        """
        if len(optimizers) != 1:
            raise UsageError(
                f"{type(module).__name__} has {len(optimizers)} optimizers. Ranks have one: build it with a parameter "
                "group for each, and call fabric.setup(model, optimizer)."
            )
        prepared, optimizer = self.on_ranks(module, optimizers[0], self.precision)
        self.await_wrapper(module, prepared)
        return prepared, [optimizer], *scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Start the ranks of a model without an optimizer, which can be evaluated or give gradients."""
        prepared, _ = self.on_ranks(module, None, self.precision)
        self.await_wrapper(module, prepared)
        return prepared

    def await_wrapper(self, module: nn.Module, prepared: PreparedModule) -> None:
        """As `replace_in_wrapper`, in place of an earlier one whose wrapper has not come."""
        if self.awaited is not None:
            self.awaited.remove()
        self.awaited = replace_in_wrapper(module, prepared)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Raise a UsageError: ranks get their optimizer when they start."""
        raise UsageError(
            f"{type(optimizer).__name__} comes too late: ranks get their optimizer when they start. Call "
            "fabric.setup(model, optimizer) in place of fabric.setup_module(model) and fabric.setup_optimizers(…)."
        )

    def clip_gradients_norm(
        self, module: Any, optimizer: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = True
    ) -> torch.Tensor:
        """Clip by the norm of the gradients of all ranks; returns it as it was before, [].

        Raises:
            TrainingError: it is not finite.
        """
        norm = prepared_module(module, "clip_gradients").clip_grad_norm_(max_norm, norm_type)
        if error_if_nonfinite and not isfinite(norm.item()):
            raise TrainingError(
                f"The norm of the gradients is {norm.item()}, so they cannot be clipped. Lower the learning rate, or "
                "pass error_if_nonfinite=False."
            )
        return norm

    def clip_gradients_value(self, module: Any, optimizer: Any, clip_val: float) -> None:
        """Clip the elements of the gradients."""
        prepared_module(module, "clip_gradients").clip_grad_value_(clip_val)

    # -- processes ---------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As `RanksStrategy.reduced`."""
        return self.reduced(tensor, group, reduce_op)

    # -- checkpoints -------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: dict[str, Any] | None = None
    ) -> None:
        """Save a folder if the state has a model that is on ranks, else a file.

        Raises:
            UsageError: the state has several such models, or a filter for one.
            CheckpointError: as `ParallelModel.save_checkpoint`.
        """
        modules = {key: value for key, value in state.items() if isinstance(value, PreparedModule)}
        if not modules:
            super().save_checkpoint(path, state, storage_options=storage_options, filter=filter)
            return
        key, module = single(modules)
        own, _ = optimizer_of(module, state)
        if {key, own} & (filter or {}).keys():
            raise UsageError(
                f"filter={list(filter or {})}: the ranks write all of a model and its optimizer. To save some of the "
                "weights, pick them from model.state_dict() and save those."
            )
        others = {name: value for name, value in state.items() if name not in (key, own)}
        rest = self._convert_stateful_objects_in_state(others, filter or {})
        save_folder(path, module, self.modules.get(module), Rest(rest, key, own))

    def load_checkpoint(self, path: Any, state: Any = None, strict: bool = True, **options: Any) -> dict[str, Any]:
        """Load a folder that `save_checkpoint` wrote under any mesh, or a file of Fabric's; returns what is left over.

        A model that is loaded without its optimizer gets its weights alone.

        Raises:
            UsageError: the state does not fit the checkpoint.
            CheckpointError: as `ParallelModel.load_checkpoint`.
        """
        if not is_folder(path):
            return super().load_checkpoint(path, state, strict=strict, **options)
        if isinstance(state, PreparedModule):
            load_weights(path, state)
            return {}
        if not isinstance(state, dict) or not state:
            raise UsageError(
                f'{path} has parts of a model. Say what to load, such as {{"model": model, "optimizer": optimizer}}; '
                "autopar.api.checkpoint.read_weights(path) reads the weights."
            )
        rest = read_rest(path, **options)
        check_names(path, state, rest, strict)
        module = state.get(rest.module)
        if isinstance(module, PreparedModule):
            own, _ = optimizer_of(module, state)
            if self.modules.get(module) is None or (own is not None and own == rest.optimizer):
                load_folder(path, module, self.modules.get(module), rest)
            else:
                load_weights(path, module)
        return restored(state, rest.state)
