"""Access to matplotlib, which is an extra, and PNG files."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from autopar.errors import UsageError

DPI = 150


def needed_figure() -> Any:
    """Matplotlib's class for pictures without a window.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise UsageError(f"--png needs matplotlib: pip install 'autopar[bench]'. ({error})") from error


def save_figure(figure: Any, path: Path) -> None:
    """Write a picture as PNG.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        figure.savefig(path, format="png", dpi=DPI)
    except OSError as error:
        raise UsageError(f"Cannot write the picture to {path}: {error.strerror}.") from error
