"""Precision of Lightning's programs: what the ranks carry out, and what is left to Lightning."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from autopar.errors import UsageError

# Lightning's precisions, as that of the ranks. Lightning itself converts a model to a "true" one.
PRECISIONS: Mapping[str, str | None] = {
    "32-true": None, "bf16-true": None, "16-true": None, "64-true": None, "bf16-mixed": "bf16", "16-mixed": "fp16"
}  # fmt: skip
PLUGINS = ("Precision", "MixedPrecision", "HalfPrecision", "DoublePrecision")  # Lightning's classes that have these


def precision_of_ranks(plugin: Any) -> str | None:
    """Precision of the ranks under a plugin of Lightning's; None for the model's own.

    Raises:
        UsageError: ranks cannot compute in it, or it is a class that autopar does not know.
    """
    name = plugin.precision
    if name not in PRECISIONS or type(plugin).__name__ not in PLUGINS:
        raise UsageError(
            f"precision={name!r} by {type(plugin).__name__} cannot be that of ranks. Use {', '.join(PRECISIONS)}."
        )
    return PRECISIONS[name]


class PluginWithoutMixing:
    """A precision plugin of Lightning's without what the ranks do: under mixed precision they cast and scale.

    Its autocast region remains, for losses and other operations outside of the model. Base of a plugin for Fabric and
    of one for the Trainer, before Lightning's own base class. ``of_ranks`` is the precision of the ranks.
    """

    def __init__(self, plugin: Any) -> None:
        self.plugin, self.precision, self.of_ranks = plugin, plugin.precision, precision_of_ranks(plugin)

    def convert_module(self, module: nn.Module) -> nn.Module:
        return self.plugin.convert_module(module)

    def convert_input(self, data: Any) -> Any:
        return data if self.precision.endswith("-mixed") else self.plugin.convert_input(data)

    def convert_output(self, data: Any) -> Any:
        return self.plugin.convert_output(data)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return self.plugin.tensor_init_context()

    def module_init_context(self) -> AbstractContextManager[Any]:
        return self.plugin.module_init_context()

    def forward_context(self) -> AbstractContextManager[Any]:
        return self.plugin.forward_context()
