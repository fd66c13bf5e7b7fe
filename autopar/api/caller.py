"""Stack level of the user's call, for warnings."""

from __future__ import annotations

import contextlib
import inspect
import os
from pathlib import Path

ROOM = str(Path(__file__).parent) + os.sep
DECORATORS = contextlib.__file__  # `parallelize` is called through a context manager


def caller_level() -> int:
    """The ``stacklevel`` with which `warnings.warn`, called by this function's caller, names the user's line."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_code.co_filename.startswith((ROOM, DECORATORS)):
        frame, level = frame.f_back, level + 1
    return level
