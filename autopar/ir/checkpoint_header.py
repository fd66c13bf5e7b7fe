"""The header of a checkpoint: JSON next to the tensors that says which run saved them and what there is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from autopar.errors import CheckpointError
from autopar.ir.graph import Weight

CHECKPOINT_VERSION = 2
STRICT = ConfigDict(extra="forbid")
HERE = "."  # data folder of a header that lies next to its tensors
SEAL = ',\n "sha256": "'


@with_config(STRICT)
@dataclass(frozen=True)
class SavedWeight:
    """A parameter or buffer: its whole shape, and its names in the model's state dict."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    names: tuple[str, ...]

    @staticmethod
    def of(weight: Weight, state_names: frozenset[str]) -> SavedWeight:
        """The header's record of a traced weight.

        Args:
            state_names: keys of the model's state dict; other names of the weight are left out.
        """
        names = tuple(name for name in weight.names if name in state_names)
        return SavedWeight(weight.name, weight.kind, weight.shape, weight.stored_dtype, names)


@with_config(STRICT)
@dataclass(frozen=True)
class SavedFile:
    """A file as it was saved: its size in byte, and its SHA-256 as `sha256sum` prints it (version 1 had none)."""

    size: int
    sha256: str | None


@with_config(STRICT)
@dataclass(frozen=True)
class Header:
    """Contents of a checkpoint.

    Args:
        model: its name in the plan.
        plan: the saving run's plan, as in a plan file.
        batch: samples of the global batch that the plan is for.
        updates: optimizer steps so far; random operations count them.
        drawn: samples since the last update, 0 if their gradients are dropped; random operations count them.
        extra: the caller's data, anything that JSON can hold.
        optimizer, scheduler: class names, None where there was none.
        scaler, ema: whether the checkpoint has the state of a loss scaler and averages of weights.
        data: name of the folder next to the header that holds the tensors; `HERE` if they lie next to the header.
        files: files in that folder, by name.
    """

    model: str
    weights: tuple[SavedWeight, ...]
    plan: dict[str, Any]
    batch: int
    seed: int
    updates: int
    drawn: int
    extra: Any = None
    optimizer: str | None = None
    scheduler: str | None = None
    scaler: bool = False
    ema: bool = False
    data: str = ""
    files: Mapping[str, SavedFile] = field(default_factory=dict)
    schema_version: int = CHECKPOINT_VERSION

    @property
    def has_hashes(self) -> bool:
        """Whether damage inside of the files can be seen."""
        return all(file.sha256 is not None for file in self.files.values())

    def to_json(self) -> str:
        return sealed(json.dumps(asdict(self), indent=1))

    @staticmethod
    def from_json(text: str, where: str) -> Header:
        """The header in a JSON text; ``where`` names the text in errors.

        Raises:
            CheckpointError: the text is no JSON, of another version or changed since it was written, or a field is
                missing or wrong.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise CheckpointError(
                f"{where} is not a complete JSON file: {error.msg} at line {error.lineno}, column {error.colno}. "
                "autopar replaces it atomically, so something else wrote it; use another checkpoint."
            ) from error
        version = data.get("schema_version") if isinstance(data, dict) else None
        if not isinstance(version, int):
            raise CheckpointError(f"{where} is not of autopar: it has no schema_version. Give a checkpoint's folder.")
        if not 1 <= version <= CHECKPOINT_VERSION:
            newer = "Upgrade autopar." if version > CHECKPOINT_VERSION else "Load it with the version that saved it."
            raise CheckpointError(
                f"{where}: field schema_version is {version}, this autopar reads 1 to {CHECKPOINT_VERSION}. {newer}"
            )
        if version == 1 and isinstance(data.get("files"), dict):
            data["files"] = {name: {"size": size, "sha256": None} for name, size in data["files"].items()}
        if version > 1 and text != sealed(text.rpartition(SEAL)[0] + "\n}"):
            raise CheckpointError(
                f"{where} is damaged: its SHA-256 is not that of its text, so something changed it after the save. "
                "Copy it again, or use another checkpoint."
            )
        data.pop("sha256", None)
        try:
            return TypeAdapter(Header).validate_python(data)
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
            raise CheckpointError(
                f"{where} is not a valid checkpoint. Field " + "; field ".join(problems[:5]) + ". Use another one."
            ) from error


def sealed(text: str) -> str:
    """A JSON object with its SHA-256 as its last field."""
    return f'{text[:-2]}{SEAL}{hashlib.sha256(text.encode()).hexdigest()}"\n}}\n'
