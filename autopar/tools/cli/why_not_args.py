"""The flag ``--why-not`` and those that go with it; constraints are validated like the flags of ``autopar plan``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from pydantic import TypeAdapter, ValidationError
from typer import Option

from autopar.errors import UsageError, suggest
from autopar.tools.cli.flags import PlanFlags, parse_kwargs, tensor_sizes

if TYPE_CHECKING:
    from autopar.ir.plan import Plan
    from autopar.tools.explain.why_not_result import WhyNotResult

# Hardware is the plan's, pins name stages of one mesh, and no answer times operations.
NOT_ASKED = {"hardware", "pin", "measure_seconds"}
KINDS = {int: "a whole number", str: "a text"}


@dataclass(frozen=True)
class WhyNotFlags:
    """Questions about a plan, and what its model and machine are, where the plan file does not say it."""

    why_not: Annotated[
        list[str] | None,
        Option(
            help="Plan again under constraints, such as tp=4 or pp=2,schedule=1f1b, and compare the steps; "
            "may be repeated.",
            metavar="NAME=VALUE[,...]",
        ),
    ] = None
    hardware: Annotated[
        str | None, Option(help="For --why-not: the plan's cost model, if autopar does not ship it.", metavar="FILE")
    ] = None
    model: Annotated[
        str | None,
        Option(
            "--model", help="For --why-not: build this model instead of the one named in the plan.", metavar="MODEL"
        ),
    ] = None
    model_kwargs: Annotated[
        list[str] | None,
        Option(help="For --why-not: arguments of the model, instead of those in the plan.", metavar="NAME=VALUE ..."),
    ] = None
    opt: Annotated[
        str | None,
        Option(help="For --why-not: optimizer that the plan is for, by timm's name; AdamW by default.", metavar="NAME"),
    ] = None
    model_ema: Annotated[
        bool,
        Option(
            "--model-ema", help="For --why-not: the plan is for training with a moving average of the weights (EMA)."
        ),
    ] = False
    channels_last: Annotated[
        bool,
        Option(
            "--channels-last", help="For --why-not: the plan is for model and images in channels_last memory format."
        ),
    ] = False

    def check(self) -> None:
        """Raise a UsageError if a constraint cannot be read, or another flag is given without a question."""
        for text in self.why_not or ():
            parse_constraints(text)
        only_for_questions = {
            "--hardware": self.hardware,
            "--model": self.model,
            "--model-kwargs": self.model_kwargs,
            "--opt": self.opt,
            "--model-ema": self.model_ema or None,
            "--channels-last": self.channels_last or None,
        }
        for flag, value in only_for_questions.items():
            if value is not None and not self.why_not:
                raise UsageError(f"{flag} is for --why-not, which is not given. Leave it out.")

    def answers(self, plan: Plan) -> tuple[WhyNotResult, ...]:
        """Answers to the questions; the model is built and traced unless all contradict the plan's devices or batch.

        Raises:
            UsageError, HardwareError, PlanError, TraceError: as `autopar.tools.cli.replan.rebuilt_of` and
                `autopar.tools.explain.why_not.answers`.
        """
        if not self.why_not:
            return ()
        refused = [refusal(plan, text) for text in self.why_not]
        if None not in refused:
            return tuple(filter(None, refused))
        from autopar.tools.cli.replan import rebuilt_of  # imports torch
        from autopar.tools.explain.why_not import Query, answers

        kwargs = parse_kwargs(self.model_kwargs) if self.model_kwargs is not None else None
        rebuilt = rebuilt_of(plan, self.model, kwargs, self.hardware, self.opt, self.model_ema, self.channels_last)
        return answers(plan, rebuilt, [Query(text, parse_constraints(text)) for text in self.why_not])


def refusal(plan: Plan, text: str) -> WhyNotResult | None:
    """Answer to a question whose sizes contradict the plan's devices or batch; None to others.

    Raises:
        UsageError: a constraint is impossible for every mesh.
    """
    from autopar.api.options import Options
    from autopar.solve.space.meshes import check_sizes
    from autopar.tools.explain.why_not_result import WhyNotResult

    constraints = Options.of(parse_constraints(text)).constraints(plan.mesh.devices, plan.batch)
    try:
        check_sizes(constraints)
    except UsageError as error:
        return WhyNotResult(text, str(error))
    return None


def parse_constraints(text: str) -> dict[str, Any]:
    """Keyword arguments of `autopar.plan` in a text such as ``pp=2,tp=2``.

    Raises:
        UsageError: no NAME=VALUE, an unknown name (with a near match), a value of the wrong type, or two values for one
            name.
    """
    hints = {name: hint for name, hint in get_type_hints(PlanFlags).items() if name not in NOT_ASKED}
    given: dict[str, Any] = {}
    for item in text.split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        name = name.removeprefix("--").replace("-", "_")
        if not equals or not name or not value:
            raise UsageError(f"Cannot read --why-not {text!r}. Write NAME=VALUE[,NAME=VALUE ...], such as pp=2,tp=2.")
        if name not in hints:
            hint = suggest(name, hints, cutoff=0.5)
            raise UsageError(f"--why-not {text}: unknown constraint {name!r}.{hint} Known: {', '.join(hints)}.")
        try:
            read = tensor_sizes(value) if name == "tp" else TypeAdapter(hints[name]).validate_python(value)
        except ValidationError as error:
            kind = next(words for kind, words in KINDS.items() if hints[name] == kind | None)
            raise UsageError(f"--why-not {text}: {name}={value!r} is not {kind}.") from error
        if given.setdefault(name, read) != read:
            raise UsageError(f"--why-not {text} gives {name} two values, {given[name]} and {read}. Give one.")
    return given
