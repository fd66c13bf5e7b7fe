"""Measured times on disk: a file each, written in one piece, so that several processes and kills do no harm."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from autopar.errors import CacheWarning, UsageError

FOLDER_VARIABLE = "AUTOPAR_CACHE"
SETTING = "setting.txt"


@dataclass(frozen=True)
class RegionTimes:
    """Median seconds of a piece's forward and of its backward, and how far repeats of both together lay apart: between
    the quartiles, as a share of the median."""

    forward_seconds: float
    backward_seconds: float
    spread: float

    def __post_init__(self) -> None:
        if not (self.forward_seconds > 0 and self.backward_seconds >= 0 and self.spread >= 0):
            raise ValueError(f"{self} has a time that none takes")


TIMES = TypeAdapter(RegionTimes)


def cache_folder() -> Path:
    """``AUTOPAR_CACHE``, or autopar's folder among the user's caches (XDG base directories)."""
    folder = os.environ.get(FOLDER_VARIABLE)
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) if folder else Path(caches) / "autopar"


class TimesCache:
    """Times by name, in a folder for each setting. Nothing is kept in memory: another process may measure meanwhile."""

    def __init__(self, folder: Path, setting: str) -> None:
        """Open, or begin with the first measurement.

        Args:
            setting: everything that times depend on but what is timed, for people too: it is written beside them.
        """
        self.setting, self.folder = setting, folder / "times" / digest(setting)

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been measured in this setting."""
        return not self.folder.is_dir()

    def get(self, name: str) -> RegionTimes | None:
        """What is known; a file that cannot be read is removed, with a `CacheWarning`."""
        path = self.path(name)
        try:
            return TIMES.validate_json(path.read_bytes(), strict=True)
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            reason = str(error).splitlines()[0]
            warnings.warn(
                f"{path} holds no measured times ({reason}): it is removed, and measured again.",
                CacheWarning,
                stacklevel=2,
            )
            path.unlink(missing_ok=True)
            return None

    def put(self, name: str, times: RegionTimes) -> None:
        """Keep a measurement.

        Raises:
            UsageError: the folder cannot be written to.
        """
        path = self.path(name)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not (self.folder / SETTING).exists():
                write(self.folder / SETTING, self.setting + "\n")
            write(path, json.dumps(asdict(times)))
        except OSError as error:
            raise UsageError(
                f"Cannot keep measured times in {self.folder}: {error.strerror}. Set {FOLDER_VARIABLE} to a folder "
                "that can be written to, or plan with cost='analytic'."
            ) from error

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.json"


def write(path: Path, text: str) -> None:
    """Replace a file in one piece; a process that is killed leaves at most a file that nobody reads."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        file.write(text)
    Path(file.name).replace(path)


def digest(*texts: str) -> str:
    """A name for what some texts say."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:32]
