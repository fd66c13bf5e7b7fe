"""Stack level of the user's call, for warnings."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import torch.utils

ROOM = str(Path(__file__).parent) + os.sep
DECORATORS = str(Path(torch.utils.__file__).parent) + os.sep  # `parallelize` is called through one of torch's


def caller_level() -> int:
    """The ``stacklevel`` with which `warnings.warn`, called by this function's caller, names the user's line."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_code.co_filename.startswith((ROOM, DECORATORS)):
        frame, level = frame.f_back, level + 1
    return level
