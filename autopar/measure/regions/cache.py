"""Measured times on disk: one file per region, replaced atomically, so that several processes may write at a time."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import uuid4

from pydantic import TypeAdapter, ValidationError

from autopar.errors import SEE_DOCTOR, CacheWarning, UsageError, caller_level

FOLDER_VARIABLE = "AUTOPAR_CACHE"
SETTING = "setting.txt"


@dataclass(frozen=True)
class RegionTimes:
    """Median seconds of a region's forward and of its backward.

    Args:
        spread: interquartile range of the repeats as a share of the median; the larger of forward's and of both
            together's.
    """

    forward_seconds: float
    backward_seconds: float
    spread: float

    def __post_init__(self) -> None:
        if not (self.forward_seconds > 0 and self.backward_seconds >= 0 and self.spread >= 0):
            raise ValueError(f"{self} has an impossible time")


TIMES = TypeAdapter(RegionTimes)


def cache_folder() -> Path:
    """The folder in ``AUTOPAR_CACHE``, or autopar's folder in the user's cache directory (XDG base directories)."""
    folder = os.environ.get(FOLDER_VARIABLE)
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) if folder else Path(caches) / "autopar"


class TimesCache:
    """Times by name, in one folder per setting. Nothing is kept in memory: another process may measure meanwhile."""

    def __init__(self, folder: Path, setting: str) -> None:
        """Open a cache; its folder is created with the first measurement.

        Args:
            setting: text of everything other than the region that times depend on; also written to setting.txt.
        """
        self.setting, self.folder = setting, folder / "times" / digest(setting)

    @property
    def is_empty(self) -> bool:
        """Whether there is no measurement in this setting."""
        return not self.folder.is_dir()

    def get(self, name: str) -> RegionTimes | None:
        """The times of a name; None if there are none, or with a `CacheWarning` if they cannot be read.

        A damaged file is removed; one that only another user may read stays.
        """
        path = self.path(name)
        try:
            return TIMES.validate_json(path.read_bytes(), strict=True)
        except FileNotFoundError:
            return None
        except OSError as error:
            problem = f"{path} cannot be read ({error.strerror}): it is measured again."
        except ValidationError as error:
            problem = (
                f"{path} holds no measured times ({str(error).splitlines()[0]}): it is removed, and measured again."
            )
            with suppress(OSError):  # another user's, in a folder that keeps files of others
                path.unlink()
        warnings.warn(problem, CacheWarning, stacklevel=caller_level())
        return None

    def put(self, name: str, times: RegionTimes) -> None:
        """Write the times of a name.

        Raises:
            UsageError: the folder cannot be written to.
        """
        path = self.path(name)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not (self.folder / SETTING).exists():
                replace_file(self.folder / SETTING, self.setting + "\n")
            replace_file(path, json.dumps(asdict(times)))
        except OSError as error:
            raise UsageError(
                f"Cannot keep measured times in {self.folder}: {error.strerror}. Set {FOLDER_VARIABLE} to a folder "
                f"that can be written to, or plan with cost='analytic'. {SEE_DOCTOR}"
            ) from error

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.json"


def replace_file(path: Path, text: str) -> None:
    """Replace a file atomically; a process that is killed leaves at most a temporary file that nobody reads.

    The temporary file has another name in each process, since several may write the same times.
    """
    temporary = path.with_name(f"{path.name}.{uuid4().hex}.tmp")
    temporary.write_text(text)
    temporary.replace(path)


def digest(*texts: str) -> str:
    """A file name that identifies some texts: half of their SHA-256 in hexadecimal."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:32]
