"""Folder of a checkpoint. At every moment of a save, the last complete checkpoint can be read.

``checkpoint.json``, the header, names a data folder ``data-<n>`` in the same folder. A save fills a new data folder,
gives it a header too, syncs it to disk, and replaces the header of the folder atomically. Older data folders are
removed last. One that is kept is a checkpoint by itself: it has its own header.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from io import BufferedReader
from pathlib import Path

from autopar.errors import SEE_DOCTOR, CheckpointError
from autopar.ir.checkpoint_header import CHECKPOINT_VERSION, HERE, Header, SavedFile
from autopar.ir.files import TEMPORARY, replacing, sync
from autopar.ir.units import plural
from autopar.runtime.launch.environment import launched

HEADER, LOCK, METADATA, TRAINING = "checkpoint.json", ".saving", ".metadata", "training.pt"
DATA = re.compile(r"data-(\d+)")
# Names that a header may list. It may come from anywhere: no other file is looked at.
LISTED = re.compile(r"__\d+_\d+\.distcp|" + "|".join(map(re.escape, (METADATA, TRAINING))))
# Names of files that a save writes into its data folder. A folder with any other file is not removed.
OURS = re.compile(f"{LISTED.pattern}|({re.escape(METADATA)}|{re.escape(HEADER)})({re.escape(TEMPORARY)})?")


class Save:
    """One save into a folder. Readers see the previous checkpoint until `commit`."""

    def __init__(self, folder: Path, needed_bytes: int) -> None:
        """Create a data folder, and remove the data folders of killed saves.

        Raises:
            CheckpointError: another process saves into the folder, the folder has a header that cannot be read, or it
                is a data folder that another folder keeps.
            OSError: the folder cannot be created or written, or the disk has too little space.
        """
        if holds_tensors(folder):
            raise CheckpointError(
                f"Cannot save a checkpoint to {folder}: it is one that was kept, and stays as it was saved. Give "
                "another folder."
            )
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.committed = folder, False
        self.lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            take(self.lock, folder)
            previous = read_header(folder).data if is_checkpoint(folder) else None
            remove(data for data in data_folders(folder) if data.name != previous and not is_checkpoint(data))
            if needed_bytes > shutil.disk_usage(folder).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
            numbers = [int(match[1]) for entry in folder.iterdir() if (match := DATA.fullmatch(entry.name))]
            self.data = folder / f"data-{max(numbers, default=0) + 1}"
            self.data.mkdir()
        except BaseException:
            os.close(self.lock)
            raise

    def commit(self, header: Header, hashed: Mapping[str, SavedFile], keep: int = 1) -> None:
        """Make the data folder the checkpoint: sync its files and replace the header.

        Args:
            hashed: files that the ranks have written and hashed; the others are hashed here.
            keep: number of checkpoints to keep, with this one.
        """
        files = {}
        for path in sorted(self.data.iterdir()):
            files[path.name] = hashed.get(path.name) or SavedFile(path.stat().st_size, sha256(path))
            sync(path)
        header = replace(header, files=files, schema_version=CHECKPOINT_VERSION)
        write_header(self.data, replace(header, data=HERE))
        sync(self.data)
        write_header(self.folder, replace(header, data=self.data.name))
        self.committed = True
        sync(self.folder)
        whole = [data for data in data_folders(self.folder) if is_checkpoint(data)]
        remove(data for data in data_folders(self.folder) if data not in whole[:keep])

    def close(self) -> None:
        """Remove the data folder unless it was committed, and release the lock."""
        if not self.committed:
            shutil.rmtree(self.data, ignore_errors=True)
        os.close(self.lock)


def copy_checkpoint(source: Path, target: Path) -> None:
    """Copy a checkpoint into another folder, as that folder's checkpoint.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or cannot be copied; ``target`` is unchanged.
    """
    header = read_header(source)
    check_sizes(source, header)
    try:
        save = Save(target, sum(file.size for file in header.files.values()))
        try:
            for name in header.files:
                with opened(source / header.data / name) as file, (save.data / name).open("xb") as copy:
                    shutil.copyfileobj(file, copy)
            copied = {name: SavedFile(file.size, sha256(save.data / name)) for name, file in header.files.items()}
            if header.has_hashes and copied != dict(header.files):
                check_hashes(source, header)
                raise CheckpointError(f"{source} changed while it was copied to {target}. Copy it again.")
            save.commit(header, copied)
        finally:
            save.close()
    except OSError as error:
        raise CheckpointError(
            f"Cannot copy the checkpoint in {source} to {target}: {error.strerror}. "
            f"Make room, or choose another folder. {SEE_DOCTOR}"
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


def data_folders(folder: Path) -> list[Path]:
    """Data folders in a folder, the newest first; links do not count."""
    found = {int(match[1]): entry for entry in folder.iterdir() if (match := DATA.fullmatch(entry.name))}
    return [found[number] for number in sorted(found, reverse=True) if stat.S_ISDIR(found[number].lstat().st_mode)]


def remove(folders: Iterable[Path]) -> None:
    """Remove data folders, their headers first. The next save retries those that cannot be removed now."""
    for folder in folders:
        with suppress(OSError):
            if all(OURS.fullmatch(path.name) for path in folder.iterdir()):
                (folder / HEADER).unlink(missing_ok=True)
                shutil.rmtree(folder, ignore_errors=True)


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
        names = [path.name for path in folder.iterdir() if OURS.fullmatch(path.name)] if holds_tensors(folder) else []
        for name in (HEADER, HEADER + TEMPORARY, *names):
            (folder / name).unlink(missing_ok=True)
        remove(data_folders(folder))
        (folder / LOCK).unlink()
    finally:
        os.close(lock)
    if not folder.is_symlink() and not any(folder.iterdir()):
        folder.rmdir()


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder has a checkpoint, complete or damaged."""
    return (folder / HEADER).exists()


def save_folder(checkpoint: Path) -> Path:
    """Folder that saves write to: for a data folder that is kept the folder around it, else the folder itself."""
    real = checkpoint.resolve()
    if not (DATA.fullmatch(real.name) and holds_tensors(real)):
        return checkpoint
    return checkpoint.parent if checkpoint.name == real.name else real.parent


def holds_tensors(folder: Path) -> bool:
    """Whether a folder is a checkpoint with its tensors, as a data folder that is kept or a copy of one."""
    try:
        return read_header_alone(folder).data == HERE
    except CheckpointError:
        return is_checkpoint(folder) and (folder / METADATA).exists()


def kept(checkpoint: Path) -> list[Path]:
    """Checkpoints that are kept with a checkpoint, the newest first, without itself."""
    folder, itself = save_folder(checkpoint), checkpoint.resolve()
    with suppress(CheckpointError):
        itself /= read_header_alone(checkpoint).data
    return [data for data in data_folders(folder) if is_checkpoint(data) and data.resolve() != itself]


def write_header(folder: Path, header: Header) -> None:
    """Write or replace the header of a folder."""
    with replacing(folder / HEADER) as file:
        file.write_text(header.to_json())


def checkpoint_around(path: Path) -> Path | None:
    """Folder of the checkpoint that contains or would contain a file, with links resolved; None if there is none."""
    found = next((folder for folder in path.resolve().parents if is_checkpoint(folder) and has_data(folder)), None)
    if found is None:
        return None
    found = save_folder(found)
    named = (folder for folder in path.parents if folder.resolve() == found)
    return next(named, found)


def has_data(folder: Path) -> bool:
    """Whether a folder has data; without any, its ``checkpoint.json`` belongs to another program."""
    return any(entry.name == METADATA or DATA.fullmatch(entry.name) for entry in folder.iterdir())


def read_header(folder: Path) -> Header:
    """Header of a checkpoint.

    Raises:
        CheckpointError: the folder has no header, or a header that this version cannot read; names the checkpoints
            that are kept there.
    """
    try:
        return read_header_alone(folder)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{others(folder)}") from error


def read_header_alone(folder: Path) -> Header:
    """As `read_header`, but an error does not name other checkpoints."""
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


def others(folder: Path) -> str:
    """A sentence that names the checkpoints which are kept with one; empty if there are none."""
    named: list[str] = []
    with suppress(OSError):
        named += [f"{other} {age(other)}" for other in kept(folder)]
    return f" Kept there: {', '.join(named)}." if named else ""


def age(checkpoint: Path) -> str:
    """``after 3 updates``, or ``(unreadable)``."""
    try:
        return f"after {plural(read_header_alone(checkpoint).updates, 'update')}"
    except CheckpointError:
        return "(unreadable)"


def check_sizes(folder: Path, header: Header) -> None:
    """Compare names, kinds and sizes of a checkpoint's files with its header. No link is followed.

    Raises:
        CheckpointError: a file is missing, a link, or has another size; or the header lists what no save writes.
    """
    strange = [name for name in header.files if not LISTED.fullmatch(name)]
    if strange or not header.files or not (DATA.fullmatch(header.data) or header.data == HERE):
        lists = f"files such as {strange[0]!r}" if strange else f"{len(header.files)} files in {header.data!r}"
        raise CheckpointError(
            f"The checkpoint in {folder} is damaged: its header lists {lists}, which no save writes. Use another "
            f"checkpoint.{others(folder)}"
        )
    data = folder / header.data
    if header.data != HERE and data.is_symlink():
        raise damaged(folder, header, [f"{header.data} is a link"])
    found = {name: difference(data / name, saved) for name, saved in header.files.items()}
    wrong = [f"{name} {text}" for name, text in found.items() if text]
    if wrong:
        raise damaged(folder, header, wrong)


def difference(path: Path, saved: SavedFile) -> str:
    """Difference between a file and the header, as text: ``has 12 of 345 bytes``; empty if there is none."""
    try:
        about = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return "is missing"
    if not stat.S_ISREG(about.st_mode):
        return "is a link" if stat.S_ISLNK(about.st_mode) else "is no file"
    return "" if about.st_size == saved.size else f"has {about.st_size:,} of {saved.size:,} bytes"


def check_hashes(folder: Path, header: Header, part: int = 0, parts: int = 1) -> None:
    """Compare the SHA-256 of a checkpoint's files with its header.

    Args:
        part, parts: this process's part of the files, where several processes share the work.

    Raises:
        CheckpointError: a file is not as it was saved, or cannot be read.
    """
    wrong = []
    for name in sorted(header.files)[part::parts]:
        saved = header.files[name]
        try:
            if saved.sha256 is not None and sha256(folder / header.data / name) != saved.sha256:
                wrong.append(f"{name} has another SHA-256")
        except OSError as error:
            wrong.append(f"{name} cannot be read ({error.strerror})")
    if wrong:
        raise damaged(folder, header, wrong)


def damaged(folder: Path, header: Header, wrong: list[str]) -> CheckpointError:
    """Error for files that are not as they were saved."""
    where = "it" if header.data == HERE else header.data
    return CheckpointError(
        f"The checkpoint in {folder} is damaged: in {where}, {len(wrong)} of {len(header.files)} files are not as they "
        f"were saved: {', '.join(wrong[:3])}. Copy it again, or use another checkpoint{on_all_nodes()}.{others(folder)}"
    )


def opened(path: Path) -> BufferedReader:
    """A file to read; a link is an OSError."""
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb")


def sha256(path: Path) -> str:
    """SHA-256 of a file's content, as ``sha256sum`` prints it."""
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def on_all_nodes() -> str:
    """Addition to a message about a missing file: empty, unless this run has several nodes."""
    launch = launched()
    return ", on a disk that all nodes share" if launch is not None and launch.num_nodes > 1 else ""
