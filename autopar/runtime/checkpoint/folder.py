"""The folder of a checkpoint: written so that at every moment the last complete one can be read.

``checkpoint.json`` names a folder ``data-<n>`` beside it. A save fills a new data folder, has the disk take all of it,
then replaces the header in one piece; only then the older data folder goes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from autopar.errors import CheckpointError
from autopar.ir.checkpoint_header import Header
from autopar.runtime.launch.environment import launched

HEADER, LOCK, TRAINING = "checkpoint.json", ".saving", "training.pt"
DATA = re.compile(r"data-(\d+)")
# Names of what a save writes into its data folder. A folder with anything else in it is not removed.
OURS = re.compile(r"__\d+_\d+\.distcp|\.metadata(\.tmp)?|" + re.escape(TRAINING))


class Save:
    """One save into a folder. Readers see nothing of it before `commit`."""

    def __init__(self, folder: Path, needed_bytes: int) -> None:
        """Make a data folder, and remove what saves that were killed left behind.

        Raises:
            CheckpointError: another process is saving there, or the folder has a header that is not to be overwritten.
            OSError: the folder cannot be made or written, or the disk is too small.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.committed = folder, False
        self.lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            take(self.lock, folder)
            self.previous = read_header(folder).data if is_checkpoint(folder) else None
            remove_leftovers(folder, self.previous)
            if needed_bytes > shutil.disk_usage(folder).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
            numbers = [int(match[1]) for entry in folder.iterdir() if (match := DATA.fullmatch(entry.name))]
            self.data = folder / f"data-{max(numbers, default=0) + 1}"
            self.data.mkdir()
        except BaseException:
            os.close(self.lock)
            raise

    def commit(self, header: Header) -> None:
        """Make the data folder the checkpoint."""
        files = {}
        for path in sorted(self.data.iterdir()):
            files[path.name] = path.stat().st_size
            sync(path)
        sync(self.data)
        temporary = self.folder / (HEADER + ".tmp")
        temporary.write_text(replace(header, data=self.data.name, files=files).to_json())
        sync(temporary)
        temporary.replace(self.folder / HEADER)
        self.committed = True
        sync(self.folder)
        remove_leftovers(self.folder, self.data.name)

    def close(self) -> None:
        """Remove what was written, unless it was committed, and let others save."""
        if not self.committed:
            shutil.rmtree(self.data, ignore_errors=True)
            (self.folder / (HEADER + ".tmp")).unlink(missing_ok=True)
        os.close(self.lock)


def copy_checkpoint(source: Path, target: Path) -> None:
    """Make a checkpoint the one of another folder too.

    Raises:
        CheckpointError: there is no whole one, or it cannot be copied; ``target`` is as it was.
    """
    header = read_header(source)
    check_files(source, header)
    try:
        save = Save(target, sum(header.files.values()))
        try:
            for name in header.files:
                shutil.copyfile(source / header.data / name, save.data / name)
            save.commit(header)
        finally:
            save.close()
    except OSError as error:
        raise CheckpointError(
            f"Cannot copy the checkpoint in {source} to {target}: {error.strerror}. "
            "Make room, or choose another folder."
        ) from error


def take(lock: int, folder: Path) -> None:
    """Lock a folder against other saves, for as long as the file is open.

    Raises:
        CheckpointError: another process has it.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError(
            f"Another process is saving a checkpoint to {folder} at this moment. Give each run a folder of its own."
        ) from None
    except OSError as error:
        # Some shared file systems are mounted without locks. They must not keep anybody from saving: the lock only
        # guards against two runs with one folder.
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise


def remove_leftovers(folder: Path, keep: str | None) -> None:
    """Remove data folders but the one to keep. What cannot be removed now is left to the next save."""
    for entry in folder.iterdir():
        if entry.name == keep or not DATA.fullmatch(entry.name) or not entry.is_dir():
            continue
        if all(OURS.fullmatch(path.name) for path in entry.iterdir()):
            shutil.rmtree(entry, ignore_errors=True)


def remove_checkpoint(folder: Path) -> None:
    """Remove what saves wrote into a folder, and the folder if nothing else is in it.

    Raises:
        CheckpointError: another process is saving there.
        OSError: the header cannot be removed; nothing was.
    """
    if not folder.is_dir():
        return
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        take(lock, folder)
        for name in (HEADER, HEADER + ".tmp"):
            (folder / name).unlink(missing_ok=True)
        remove_leftovers(folder, None)
        (folder / LOCK).unlink()
    finally:
        os.close(lock)
    if not folder.is_symlink() and not any(folder.iterdir()):
        folder.rmdir()


def sync(path: Path) -> None:
    """Have the disk take a file, or a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder has a checkpoint, whole or not."""
    return (folder / HEADER).exists()


def checkpoint_around(path: Path) -> Path | None:
    """The checkpoint in whose folder a file lies or would lie, in whatever way the path says so; None if in none."""
    found = next((folder for folder in path.resolve().parents if is_checkpoint(folder) and has_data(folder)), None)
    named = (folder for folder in path.parents if folder.resolve() == found)
    return next(named, found)


def has_data(folder: Path) -> bool:
    """Whether a folder has data folders, without which another program's ``checkpoint.json`` is none of ours."""
    return any(DATA.fullmatch(entry.name) for entry in folder.iterdir())


def read_header(folder: Path) -> Header:
    """The header of a checkpoint.

    Raises:
        CheckpointError: the folder has none, or one that this version cannot read.
    """
    path = folder / HEADER
    try:
        text = path.read_text()
    except FileNotFoundError:
        what = f"has no {HEADER}" if folder.is_dir() else "does not exist"
        raise CheckpointError(
            f"{folder} is not a checkpoint: it {what}. Give the folder that save_checkpoint wrote{on_all_nodes()}."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"Cannot read {path}: {error}. Give the folder that save_checkpoint wrote.") from error
    return Header.from_json(text, str(path))


def check_files(folder: Path, header: Header) -> None:
    """Compare a checkpoint's files with what its header says of them.

    Raises:
        CheckpointError: one is missing or of another size.
    """
    data = folder / header.data
    sizes = {name: (data / name).stat().st_size if (data / name).is_file() else None for name in header.files}
    wrong = [differs(name, size, header.files) for name, size in sizes.items() if size != header.files[name]]
    if wrong or not header.files or not DATA.fullmatch(header.data):
        raise CheckpointError(
            f"The checkpoint in {folder} is damaged: in {header.data}, {len(wrong)} of {len(header.files)} files are "
            f"not as they were saved: {', '.join(wrong[:3])}. Copy it again, or use another checkpoint{on_all_nodes()}."
        )


def on_all_nodes() -> str:
    """What to say besides of a file that is not there: nothing, unless this run has several nodes."""
    launch = launched()
    return ", on a disk that all nodes share" if launch is not None and launch.num_nodes > 1 else ""


def differs(name: str, size: int | None, saved: Mapping[str, int]) -> str:
    """``__0_0.distcp has 12 of 345 bytes``."""
    return f"{name} is missing" if size is None else f"{name} has {size:,} of {saved[name]:,} bytes"
