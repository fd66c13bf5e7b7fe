"""Libraries that only training needs."""

from __future__ import annotations

import importlib
from typing import Any

from autopar.errors import UsageError


def needed(module: str, what: str, package: str | None = None) -> Any:
    """An optional library's module.

    Args:
        what: of the user's that needs it, for the message.
        package: what it is called on PyPI, where that is not the module's first name.

    Raises:
        UsageError: it is not installed; says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = package or module.split(".")[0]
        raise UsageError(f"{what} needs {library}: pip install 'autopar[train]'. ({error})") from error
