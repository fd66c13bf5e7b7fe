"""Replacement of files: at every moment a path has its old content or its new content, whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_IMODE

TEMPORARY = ".tmp"  # ending of a file that is being written; a killed process leaves it, the next one replaces it


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Path of a temporary file, which replaces ``path`` at the end of ``with``, once its content is on disk.

    A link stays, and its file is replaced; a device (/dev/null) is written to. The new file has the permissions of the
    old one, or those of any new file. After an error ``path`` is as it was.
    """
    target = path.resolve()
    if target.exists() and not target.is_file():
        yield target
        return
    temporary = target.with_name(target.name + TEMPORARY)
    try:
        temporary.touch()  # with the permissions of a new file, also for libraries that write private ones
        mode = S_IMODE((target if target.exists() else temporary).stat().st_mode)
        yield temporary
        if S_IMODE(temporary.stat().st_mode) != mode:
            temporary.chmod(mode)
        sync(temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Write a file, or a folder's list of names, to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
