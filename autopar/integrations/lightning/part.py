"""Module of a LightningModule that the ranks run, and its place there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from autopar.errors import UsageError, suggest
from autopar.ir.units import first_few, plural

MAX_NAMED = 3  # names that an error lists; the rest is counted


@dataclass(frozen=True)
class Part:
    """A module and its names in its owner, more than one where it is a child twice."""

    owner: nn.Module
    names: tuple[str, ...]
    module: nn.Module

    def put(self, module: nn.Module) -> None:
        """Set the owner's attributes to a module."""
        for name in self.names:
            parent, _, attribute = name.rpartition(".")
            setattr(self.owner.get_submodule(parent), attribute, module)

    @contextmanager
    def left_out(self, module: nn.Module) -> Iterator[None]:
        """Context in which the owner lacks the part; afterwards the attributes are ``module``."""
        self.put(nn.Identity())
        try:
            yield
        finally:
            self.put(module)

    def __str__(self) -> str:
        return f"{type(self.owner).__name__}.{self.names[0]}"


def part_of(owner: nn.Module, name: str | None) -> Part:
    """The part of a LightningModule that the ranks run.

    Args:
        name: its name; None for the only child that has trainable parameters, or parameters if none are trainable.

    Raises:
        UsageError: there is no such module, or trainable parameters lie outside of it, or other names lead into it.
    """
    name = only_child(owner) if name is None else name
    modules = dict(owner.named_modules(remove_duplicate=False))
    if not name or name not in modules:
        raise UsageError(
            f"{type(owner).__name__} has no module {name!r}.{suggest(name, modules)} Pass the name of one that has all "
            "trainable parameters."
        )
    module = modules[name]
    names = tuple(other for other, value in modules.items() if value is module)
    inside = {id(parameter) for parameter in module.parameters()}
    others = {
        other: parameter
        for other, parameter in owner.named_parameters(remove_duplicate=False)
        if not other.startswith(tuple(f"{own}." for own in names))
    }
    outside = [other for other, p in others.items() if p.requires_grad and id(p) not in inside]
    if outside:
        raise UsageError(
            f"{type(owner).__name__} has {plural(len(outside), 'trainable parameter')} outside of {name!r}, which the "
            f"ranks run: {first_few(outside, MAX_NAMED)}. Make one module of all that is trained, whose forward "
            "returns what the loss needs, or freeze the others."
        )
    shared = [other for other, p in others.items() if id(p) in inside]
    if shared:
        raise UsageError(
            f"{first_few(shared, MAX_NAMED)} of {type(owner).__name__} lie inside of {name!r} too, which the ranks "
            f"run. Calls of {shared[0].rpartition('.')[0] or shared[0]} would compute with weights of this process, "
            f"which nobody trains. Keep {name!r} alone, and return from its forward what is needed."
        )
    return Part(owner, names, module)


def only_child(owner: nn.Module) -> str:
    """Name of the only child with trainable parameters, or with parameters if none are trainable.

    Raises:
        UsageError: there is none, or several have some and none has all.
    """
    trained = {id(p) for p in owner.parameters() if p.requires_grad} or {id(p) for p in owner.parameters()}
    if not trained:
        raise UsageError(f"{type(owner).__name__} has no parameters. Build its model in __init__ or configure_model.")
    counts = {name: len(trained & {id(p) for p in child.parameters()}) for name, child in owner.named_children()}
    whole = [name for name, count in counts.items() if count == len(trained)]
    if whole:
        return whole[0]
    parts = [f"{name} ({count})" for name, count in counts.items() if count]
    own = sum(id(p) in trained for p in owner.parameters(recurse=False))
    parts += [f"{type(owner).__name__} itself ({own})"] if own else []
    raise UsageError(
        f"{type(owner).__name__} has no child with all {len(trained)} trained parameters, as ranks run one: "
        f"{', '.join(parts)}. Make one module of all that is trained, such as self.model, whose "
        "forward returns what the loss needs."
    )
