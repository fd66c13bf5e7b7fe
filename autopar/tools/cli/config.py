"""``--config file.toml``: values for flags that the command line leaves out."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from autopar.errors import UsageError, suggest


def read_config(path: Path, flags: Mapping[str, bool]) -> dict[str, Any]:
    """Values by parameter name, as a command line would give them.

    Args:
        flags: the command's parameters, and whether each may be repeated.

    Raises:
        UsageError: the file cannot be read, or names an unknown flag.
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
        values[name] = written(path, key, value, several=flags[name])
    return values


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
