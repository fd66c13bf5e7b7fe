"""``--config file.toml``: values for flags that the command line leaves out."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from autopar.errors import UsageError, suggest
from autopar.tools.cli.flags import parse_kwargs

# Flags that say what is written or sent where, which a file from elsewhere must not.
WRITING = ("output", "overwrite", "download", "log_wandb", "log_mlflow", "wandb_resume_id", "upload_checkpoints")

SHARDS = ("data", "val_split")  # flags with files of WebDataset, or addresses such as pipe:COMMAND
ADDRESS = re.compile(r"\w:")


def read_config(path: Path, flags: Mapping[str, bool]) -> dict[str, Any]:
    """Values by parameter name, as a command line would give them.

    Args:
        flags: the command's parameters, and whether each may be repeated.

    Raises:
        UsageError: the file cannot be read, names an unknown flag, or would run code or write files of its choice.
    """
    try:
        given = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"Cannot read --config {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path} is not a TOML file: {error}. Write lines such as epochs = 10.") from error
    values: dict[str, Any] = {}
    for key, value in given.items():
        name = key.replace("-", "_")
        if name not in flags:
            hint = suggest(key, [flag.replace("_", "-") for flag in flags], 2)
            raise UsageError(
                f"--config {path}: there is no flag --{key}.{hint} Keys are the names of flags, see --help."
            )
        if name in WRITING:
            raise UsageError(
                f"--config {path}: a file must not decide where to write. Give --{key} on the command line."
            )
        values[name] = written(path, key, value, several=flags[name])
        if name in SHARDS and ADDRESS.search(str(value).removeprefix("wds:").removeprefix("hf:")):
            raise UsageError(
                f"--config {path}: WebDataset opens the address {value} by a command of the shell, which a file must "
                f"not choose. Give --{key} on the command line."
            )
    check_model(path, values)
    return values


def check_model(path: Path, values: Mapping[str, Any]) -> None:
    """Raise a UsageError if a file's model is not of timm or torchvision, or its arguments load files."""
    if not {"model", "model_kwargs"} & values.keys():
        return
    from autopar.api.model_source import check_named_by_file  # imports torch

    try:
        kwargs = parse_kwargs(values.get("model_kwargs"))
        check_named_by_file(values.get("model", "model"), kwargs, "give it on the command line")
    except UsageError as error:
        raise UsageError(f"--config {path}: {error}") from error


def written(path: Path, key: str, value: Any, several: bool) -> Any:
    """A value as text, so that it is validated as on the command line; switches stay booleans.

    Raises:
        UsageError: a table or a list for a flag with one value, or one value for a flag that may be repeated.
    """
    if several and isinstance(value, Mapping):  # [model-kwargs] depth = 6
        return [f"{name}={one!r}" for name, one in value.items()]
    if several and isinstance(value, list):
        return [str(one) for one in value]
    if several or isinstance(value, Mapping | list):
        wanted = "a list, such as [1, 2]" if several else "one value"
        raise UsageError(f"--config {path}: {key} must be {wanted}; it is {value!r}.")
    return value if isinstance(value, bool) else str(value)


def use_config(context: typer.Context, path: Path | None) -> Path | None:
    """Use a file's values as defaults of the other flags."""
    if path is not None:
        parameters = {p.name: p.multiple or p.nargs != 1 for p in context.command.params if p.name}  # type: ignore[attr-defined]
        parameters.pop("config")
        context.default_map = read_config(path, parameters)
    return path


ConfigFlag = Annotated[
    Path | None,
    typer.Option(
        is_eager=True,
        callback=use_config,
        help="TOML file with values of flags by name; flags on the command line take precedence.",
        metavar="FILE.toml",
    ),
]
