"""Strategies for Lightning: `AutoparStrategy` for Fabric and `AutoparTrainerStrategy` for the Trainer.

Question: how does a Lightning program train on several devices? In: a strategy instead of ``"ddp"``. Out: the
program's own loop or LightningModule, whose model runs on the ranks, with the numbers of one device.

Read in this order: ``fabric`` (the shorter contract) with ``fabric_wrapper`` and ``fabric_state``, ``trainer`` with
``trainer_plugins`` and ``part`` (which module the ranks run), ``shared`` (what both contracts ask for: processes,
devices, the model on its ranks), ``precision``, ``checkpoint`` (a folder that all ranks write), ``library`` (which
Lightning is imported).

Example::

    fabric = Fabric(accelerator="cpu", strategy=AutoparStrategy(devices=2, batch_size=32, pp=2))
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.integrations.lightning.fabric import AutoparStrategy
    from autopar.integrations.lightning.trainer import AutoparTrainerStrategy

__all__ = ["AutoparStrategy", "AutoparTrainerStrategy"]

# Imported at first use: Fabric alone may be installed, and the Trainer's part of Lightning takes seconds to import.
_HOME = {"AutoparStrategy": "fabric", "AutoparTrainerStrategy": "trainer"}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
