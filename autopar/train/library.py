"""timm where it is installed: the package alone does without."""

from __future__ import annotations

import importlib
from typing import Any

from autopar.errors import UsageError


def timm_module(name: str, what: str) -> Any:
    """A module of timm.

    Raises:
        UsageError: timm is missing; names what needs it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"The {what} needs timm: pip install 'autopar[vision]'. {error}.") from error
