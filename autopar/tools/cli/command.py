"""Commands from functions: grouped flags, ``--model-kwargs`` with several values, errors as messages."""

from __future__ import annotations

import inspect
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from autopar.errors import AutoparError
from autopar.ir.terminal import QUIET_VARIABLE, has_colors

INTERRUPTED = 130  # the exit code that shells report for Ctrl-C
LONGEST_HELP = 1000  # letters
SEVERAL = {"--model-kwargs": "=", "--wandb-tags": ""}  # flags with several values, and what each value contains
ANYWHERE = ("--debug", "--quiet")  # flags of all commands


class ReportedInterrupt(KeyboardInterrupt):
    """Ctrl-C in a command that has printed what is saved."""


class Commands(TyperGroup):
    """All commands. ``--debug`` and ``--quiet`` may stand anywhere in the command line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = [flag for flag in ANYWHERE if flag in args]
        return super().parse_args(ctx, [*given, *(a for a in args if a not in ANYWHERE)])


class Command(TyperCommand):
    """A command that ends with one readable message and the error's exit code."""

    def get_short_help_str(self, limit: int = LONGEST_HELP) -> str:
        """First sentence of the command's help, never shortened: the list of commands wraps it."""
        return super().get_short_help_str(LONGEST_HELP)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, spread(args))
        except AutoparError as error:  # an error of a --config file, which is read before the other flags
            raise report(error, str(error), error.exit_code, ctx.find_root().params["debug"]) from error
        except typer.BadParameter as error:
            name = (error.param.name if error.param else None) or ""
            source = ctx.get_parameter_source(name)
            if source is None or source.name != "DEFAULT_MAP":
                raise
            message = f"{error.message} (key {name.replace('_', '-')} of --config {ctx.params['config']})"
            raise typer.BadParameter(message, ctx, error.param) from error

    def invoke(self, ctx: Any) -> Any:
        debug, quiet = ctx.find_root().params["debug"], ctx.find_root().params["quiet"]
        try:
            with own_warnings_in_one_line(), quietly(quiet):
                return super().invoke(ctx)
        except AutoparError as error:
            raise report(error, str(error), error.exit_code, debug) from error
        except KeyboardInterrupt as error:
            if not isinstance(error, ReportedInterrupt):
                typer.echo("Interrupted.", err=True)
            raise typer.Exit(INTERRUPTED) from error
        except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
            raise
        except Exception as error:
            said = str(error).removesuffix(".")
            message = f"unexpected {type(error).__name__}: {said}. Run again with --debug and report the traceback."
            raise report(error, message, 1, debug) from error


def report(error: BaseException, message: str, exit_code: int, debug: bool) -> typer.Exit:
    """Print an error, with its traceback under ``--debug``, and return the exit with its code."""
    if debug:
        traceback.print_exception(with_contexts(error))
    say("error", typer.colors.RED, message)
    return typer.Exit(exit_code)


def with_contexts(error: BaseException) -> BaseException:
    """The error, whose traceback shows the errors that led to it also where ``raise … from None`` hides them."""
    cause: BaseException | None = error
    while cause is not None:
        cause.__suppress_context__ = False
        cause = cause.__cause__ or cause.__context__
    return error


def say(word: str, color: str, message: str) -> None:
    """Print a message on standard error after a word, which has a color if the terminal has colors."""
    colored = has_colors(stderr=True)
    typer.echo(typer.style(f"{word}: ", fg=color, bold=True) + message, err=True, color=colored)


@contextmanager
def quietly(quiet: bool) -> Iterator[None]:
    """Within ``with``, progress and remarks are switched off if ``quiet``, also in processes that are started."""
    before = os.environ.get(QUIET_VARIABLE, "")
    os.environ[QUIET_VARIABLE] = "1" if quiet else before
    try:
        yield
    finally:
        os.environ[QUIET_VARIABLE] = before


@contextmanager
def own_warnings_in_one_line() -> Iterator[None]:
    """Within ``with``, warnings of `autopar.errors` are shown without the file and code that raised them."""
    as_python_does = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any, **rest: Any) -> None:
        if category.__module__ != AutoparError.__module__:
            as_python_does(message, category, *where, **rest)
            return
        say("warning", typer.colors.YELLOW, str(message))

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = as_python_does


def spread(args: list[str]) -> list[str]:
    """Arguments with flags of `SEVERAL` repeated before each of their values, as timm's scripts take them."""
    result: list[str] = []
    flag = ""
    for arg in args:
        if arg.startswith("-"):
            flag = arg if arg in SEVERAL else ""
        elif flag and result[-1] != flag:
            flag = flag if SEVERAL[flag] in arg else ""
            result += [flag] if flag else []
        result.append(arg)
    return result


def takes_flags(function: Callable[..., None]) -> Callable[..., None]:
    """The function as a command: each parameter of a dataclass type becomes one flag per field."""
    hints = get_type_hints(function, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if inspect.isclass(hint) and is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in groups:
            parameters.append(parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        inner = get_type_hints(groups[parameter.name], include_extras=True)
        parameters += [
            inspect.Parameter(
                f.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if f.default is MISSING else f.default,
                annotation=inner[f.name],
            )
            for f in fields(groups[parameter.name])
        ]

    def command(**values: Any) -> None:
        filled = {name: group(**{f.name: values.pop(f.name) for f in fields(group)}) for name, group in groups.items()}
        function(**values, **filled)

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command
