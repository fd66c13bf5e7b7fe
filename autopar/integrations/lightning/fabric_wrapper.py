"""Fabric's wrapper around a model, and the plugins that the strategy hands to Fabric."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from autopar.api.prepare import PreparedModule
from autopar.errors import UsageError
from autopar.integrations.lightning.library import fabric_module
from autopar.integrations.lightning.precision import PluginWithoutMixing

PLUGINS, WRAPPERS = fabric_module("plugins"), fabric_module("wrappers")


def prepared_module(module: Any, call: str) -> PreparedModule:
    """A model that is on ranks.

    Raises:
        UsageError: it is none.
    """
    if not isinstance(module, PreparedModule):
        raise UsageError(f"fabric.{call} takes the module that fabric.setup returned, not {type(module).__name__}.")
    return module


def replace_in_wrapper(model: nn.Module, prepared: PreparedModule) -> RemovableHandle:
    """Make the next wrapper of Fabric's around a model hold the prepared module instead; returns how to undo it.

    After a strategy's setup, ``fabric.setup`` registers the unmodified model in its wrapper too, which takes state
    dict, parameters and attributes from it. They would be those of weights that nobody trains.
    """

    def replace(parent: nn.Module, name: str, child: nn.Module | None) -> nn.Module | None:
        del name
        if child is not model or not isinstance(parent, WRAPPERS._FabricModule):
            return None
        handle.remove()
        return prepared

    hook: Any = replace  # torch's annotation has no result
    handle = register_module_module_registration_hook(hook)
    return handle


class NoBackwardSync:
    """Fabric's control over gradient synchronization, which here takes place in the optimizer's step alone."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        del module, enabled
        return nullcontext()


class RanksPrecision(PluginWithoutMixing, PLUGINS.Precision):
    """Fabric's precision plugin; ``fabric.autocast()`` is that of Lightning's."""
