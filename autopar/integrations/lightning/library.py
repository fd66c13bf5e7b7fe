"""Modules of Lightning, which is one package (``lightning``) or two (``lightning_fabric``, ``pytorch_lightning``)."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from autopar.train.timm_optional import needed


def lightning_module(together: str, separate: str, path: str, what: str) -> Any:
    """A module of Lightning, of the package that the program has imported, else of the one that is installed.

    The classes of the two packages have nothing to do with each other: a Trainer of one refuses strategies of the
    other.

    Args:
        together: name of the part in the one package, such as ``lightning.fabric``.
        separate: name of the package of that part, such as ``lightning_fabric``.
        path: module inside of the part, such as ``strategies``.
        what: the user's object that needs it, for the message.

    Raises:
        UsageError: neither is installed.
    """
    imported = [root for root in (together, separate) if root in sys.modules]
    installed = [root for root in (together, separate) if importlib.util.find_spec(root.split(".")[0]) is not None]
    root = (imported or installed or [together])[0]
    return needed(f"{root}.{path}", what, "lightning", "lightning")


def fabric_module(path: str) -> Any:
    """A module of Lightning Fabric. Raises as `lightning_module`."""
    return lightning_module("lightning.fabric", "lightning_fabric", path, "AutoparStrategy")


def trainer_module(path: str) -> Any:
    """A module of the Lightning Trainer's part. Raises as `lightning_module`."""
    return lightning_module("lightning.pytorch", "pytorch_lightning", path, "AutoparTrainerStrategy")
