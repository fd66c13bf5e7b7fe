"""Optional libraries that only training needs."""

from __future__ import annotations

import importlib
from typing import Any

from autopar.errors import UsageError


def needed(module: str, what: str, package: str | None = None, extra: str = "train") -> Any:
    """A module of an optional library.

    Args:
        what: the user's object that needs it, for the message.
        package: name on PyPI, if it is not the first part of the module name.
        extra: extra of autopar that installs it.

    Raises:
        UsageError: the library is not installed; says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = package or module.split(".")[0]
        raise UsageError(f"{what} needs {library}: pip install 'autopar[{extra}]'. ({error})") from error
