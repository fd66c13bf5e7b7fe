"""Folder of a checkpoint. At every moment of a save, the last complete checkpoint can be read.

``checkpoint.json``, the header, names a data folder ``data-<n>`` in the same folder. A save fills a new data folder,
syncs it to disk, replaces the header atomically, and then removes the older data folder.
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
# Names of files that a save writes into its data folder. A folder with any other file is not removed.
OURS = re.compile(r"__\d+_\d+\.distcp|\.metadata(\.tmp)?|" + re.escape(TRAINING))


class Save:
    """One save into a folder. Readers see the previous checkpoint until `commit`."""

    def __init__(self, folder: Path, needed_bytes: int) -> None:
        """Create a data folder, and remove the data folders of killed saves.

        Raises:
            CheckpointError: another process saves into the folder, or the folder has a header that cannot be read.
            OSError: the folder cannot be created or written, or the disk has too little space.
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
        """Make the data folder the checkpoint: sync its files and replace the header."""
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
        """Remove the data folder unless it was committed, and release the lock."""
        if not self.committed:
            shutil.rmtree(self.data, ignore_errors=True)
            (self.folder / (HEADER + ".tmp")).unlink(missing_ok=True)
        os.close(self.lock)


def copy_checkpoint(source: Path, target: Path) -> None:
    """Copy a checkpoint into another folder, as that folder's checkpoint.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or cannot be copied; ``target`` is unchanged.
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
    """Lock a folder against other saves, while the lock file is open.

    Raises:
        CheckpointError: another process holds the lock.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError(
            f"Another process is saving a checkpoint to {folder} at this moment. Give each run a folder of its own."
        ) from None
    except OSError as error:
        # Some shared file systems are mounted without locks. Saving must work there too: the lock only guards against
        # two runs with one folder.
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise


def remove_leftovers(folder: Path, keep: str | None) -> None:
    """Remove all data folders except ``keep``. The next save retries those that cannot be removed now."""
    for entry in folder.iterdir():
        if entry.name == keep or not DATA.fullmatch(entry.name) or not entry.is_dir():
            continue
        if all(OURS.fullmatch(path.name) for path in entry.iterdir()):
            shutil.rmtree(entry, ignore_errors=True)


def remove_checkpoint(folder: Path) -> None:
    """Remove all files that saves wrote into a folder, and the folder itself if it is empty then.

    Raises:
        CheckpointError: another process saves into the folder.
        OSError: the header cannot be removed; the checkpoint is unchanged.
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
    """Write a file, or a folder's list of names, to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder has a checkpoint, complete or damaged."""
    return (folder / HEADER).exists()


def checkpoint_around(path: Path) -> Path | None:
    """Folder of the checkpoint that contains or would contain a file, with links resolved; None if there is none."""
    found = next((folder for folder in path.resolve().parents if is_checkpoint(folder) and has_data(folder)), None)
    named = (folder for folder in path.parents if folder.resolve() == found)
    return next(named, found)


def has_data(folder: Path) -> bool:
    """Whether a folder has data folders; without one, its ``checkpoint.json`` belongs to another program."""
    return any(DATA.fullmatch(entry.name) for entry in folder.iterdir())


def read_header(folder: Path) -> Header:
    """Header of a checkpoint.

    Raises:
        CheckpointError: the folder has no header, or a header that this version cannot read.
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
    """Compare a checkpoint's files with the sizes in its header.

    Raises:
        CheckpointError: a file is missing or has another size.
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
    """Addition to a message about a missing file: empty, unless this run has several nodes."""
    launch = launched()
    return ", on a disk that all nodes share" if launch is not None and launch.num_nodes > 1 else ""


def differs(name: str, size: int | None, saved: Mapping[str, int]) -> str:
    """Difference between a file and the header, as text: ``__0_0.distcp has 12 of 345 bytes``."""
    return f"{name} is missing" if size is None else f"{name} has {size:,} of {saved[name]:,} bytes"
