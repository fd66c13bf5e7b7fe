"""Stack frames of the user's model, for error messages."""

from __future__ import annotations

import contextlib
import importlib
import os
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import torch

TORCH_DIR = str(Path(torch.__file__).parent) + os.sep
AUTOPAR_DIR = str(Path(__file__).absolute().parents[1]) + os.sep
LIBRARY = (contextlib.__file__, importlib.__file__, traceback.__file__)  # which torch and autopar call others through


def user_frame(error: BaseException | None) -> traceback.FrameSummary | None:
    """The innermost user frame of an error or of its causes: not torch's and not autopar's."""
    while error is not None:
        frame = innermost(traceback.extract_tb(error.__traceback__))
        if frame is not None:
            return frame
        error = error.__cause__ or error.__context__
    return None


def user_traceback(error: BaseException) -> TracebackType | None:
    """The traceback of an error without the frames of torch and autopar."""
    shown: TracebackType | None = None
    for entry in reversed(list(walk(error.__traceback__))):
        if not is_internal(entry.tb_frame.f_code.co_filename):
            shown = TracebackType(shown, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return shown


def walk(entry: TracebackType | None) -> Iterator[TracebackType]:
    """The entries of a traceback, the outermost first."""
    while entry is not None:
        yield entry
        entry = entry.tb_next


def innermost(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """The last of these frames that is neither torch's nor autopar's."""
    return next((frame for frame in reversed(frames) if not is_internal(frame.filename)), None)


def frame_text(frame: traceback.FrameSummary | None) -> str:
    """File, line and code of a frame, to be appended to a message; empty without a frame."""
    return f" at {frame.filename}:{frame.lineno}, in {frame.name}: `{frame.line}`" if frame else ""


def is_internal(filename: str) -> bool:
    """Whether a file belongs to torch, autopar or the interpreter instead of the user's model."""
    return filename.startswith((TORCH_DIR, AUTOPAR_DIR, "<")) or filename in LIBRARY
