"""Optimizer of a rank, over the rank's parameters or whole copies of them, with the whole model's groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.errors import AutoparError, UsageError
from autopar.ir.graph import Weight
from autopar.ir.units import of_type, plural
from autopar.runtime.comm.protocols import Transport
from autopar.runtime.optim.param_groups import names_in_groups, options_of
from autopar.runtime.optim.probe import (
    FLAT,
    ParamKind,
    mixes_parameters,
    needs_closure,
    needs_full_params,
    nested,
    param_kind,
    probe_context,
    small_weight,
)
from autopar.runtime.params.full_params import FullParams
from autopar.runtime.spec import Parameters, RankSpec

# Adagrad has a "fused" option too, but on CPU only (torch 2.11 to 2.15).
HAVE_FUSED_KERNELS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


@dataclass(frozen=True)
class RankOptimizer:
    """Optimizer, the parameters by name that it updates on this rank, and the whole copies that it needs, if any."""

    optimizer: Optimizer
    parameters: Mapping[str, nn.Parameter]
    wholes: FullParams | None = None


def rank_optimizer(
    spec: RankSpec, make: Callable[[Parameters], Optimizer], held: Mapping[str, nn.Parameter], transport: Transport
) -> RankOptimizer:
    """Optimizer of a rank that updates the rank's part of the model as the whole optimizer would.

    Args:
        make: the user's callable. It is called again to see how it groups whole parameters, and if the optimizer needs
            them.
        held: parameters by name, or local parts of them, that this rank's replica updates.

    Raises:
        UsageError: the optimizer cannot be built, needs a closure, or mixes parameters of different ranks.
    """
    optimizer = with_all_groups(spec, make, held)
    name = type(optimizer).__name__
    if needs_closure(optimizer):
        raise UsageError(
            f"{name}.step needs a closure that evaluates the loss again and again inside one update, which ranks that "
            "hold parts of the model cannot do. Use an optimizer whose step() needs no argument, such as "
            "torch.optim.AdamW."
        )
    split = {n for n in held if spec.layout(n).splits}
    if not (spec.mesh.pp > 1 or spec.zero or split):
        return RankOptimizer(optimizer, held)  # every rank has all parameters whole
    kinds = kinds_of(spec, optimizer, held)
    every = list(dict.fromkeys(kind for own in kinds.values() for kind in own))
    if every and mixes_parameters(optimizer, every):
        raise UsageError(coupling_text(optimizer, spec))
    wrong = needs_full_params(optimizer, every) if split else frozenset()
    needed = [n for n, own in kinds.items() if wrong & set(own)]
    if not needed:
        return RankOptimizer(optimizer, held)
    wholes = FullParams(needed, held, spec, transport)
    own = {n: wholes.full.get(n, p) for n, p in held.items() if n in wholes.full or n not in needed}
    return RankOptimizer(with_all_groups(spec, make, own), own, wholes)


def with_all_groups(
    spec: RankSpec, make: Callable[[Parameters], Optimizer], held: Mapping[str, nn.Parameter]
) -> Optimizer:
    """Optimizer with the groups that the callable makes of all whole parameters, each with those of this rank, or none.

    Optimizers may make state of a parameter's shape when they are built, and callables group parameters by shape. So
    the optimizer is built over the rank's parts; if the groups of whole parameters differ, over the rank's parameters
    while they have the whole shapes.

    Raises:
        UsageError: as `made`; or groups depend on shapes, and the optimizer has state before its first step.
    """
    whole = {w.name: tuple(w.shape) for w in spec.trainable}
    parts = {n: p for n, p in held.items() if n in whole and tuple(p.shape) != whole[n]}
    optimizer, grouping = over_all(spec, make, held)
    if not parts or grouping == over_all(spec, make, {n: p for n, p in held.items() if n not in parts})[1]:
        return optimizer
    with shaped_as(parts, whole):
        optimizer, _ = over_all(spec, make, held)
    if any(own.state.get(p) for own in nested(optimizer) for p in parts.values()):
        name = type(optimizer).__name__
        raise UsageError(
            f"optimizer={name_of(make)} groups parameters by their shapes, and {name} makes its state when it is "
            f"built: of whole parameters, while this rank has parts of {len(parts)} of its {len(held)} "
            f"(tp={spec.mesh.tp}). Group by names, with the argument's named_parameters()."
        )
    return optimizer


def over_all(
    spec: RankSpec, make: Callable[[Parameters], Optimizer], held: Mapping[str, nn.Parameter]
) -> tuple[Optimizer, list[list[tuple[list[str], str]]]]:
    """Optimizer of the held parameters, and its grouping of all parameters.

    The callable gets every parameter of the model. Those that are not held are whole meta tensors, and are removed
    afterwards. The grouping is, of the optimizer and each that it wraps, names and options (as text) of each group.
    """
    placeholders: dict[str, nn.Parameter] = {
        w.name: nn.Parameter(torch.empty(w.shape, dtype=getattr(torch, w.stored_dtype), device="meta"))
        for w in spec.trainable
        if w.name not in held
    }
    every = {n: held[n] if n in held else placeholders[n] for n in [w.name for w in spec.trainable] or held}
    optimizer = made(make, every)
    names, removed = {id(p): n for n, p in every.items()}, {id(p) for p in placeholders.values()}
    grouping = [
        [([names[id(p)] for p in group["params"]], repr(options_of(group))) for group in own.param_groups]
        for own in nested(optimizer)
    ]
    for part in nested(optimizer):
        for group in part.param_groups:
            keep = [i for i, p in enumerate(group["params"]) if id(p) not in removed]
            for key in ("params", "param_names"):
                if key in group:
                    group[key][:] = [group[key][i] for i in keep]
        for parameter in [p for p in part.state if id(p) in removed]:
            del part.state[parameter]
    return optimizer, grouping


@contextmanager
def shaped_as(parameters: Mapping[str, nn.Parameter], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[None]:
    """Context in which parameters have other shapes: zeros that take the memory of one element."""
    data = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = parameter.data.new_zeros(1).expand(shapes[name])
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = data[name]


def made(make: Callable[[Parameters], Optimizer], named: Mapping[str, nn.Parameter]) -> Optimizer:
    """Optimizer that the user's callable returns for parameters by name.

    Raises:
        UsageError: the callable fails, returns no optimizer, or an optimizer of other tensors than it was given.
    """
    try:
        optimizer = make(Parameters(named))
    except (AutoparError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UsageError(
            f"optimizer={name_of(make)} failed on the model's {len(named)} parameters: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"optimizer={name_of(make)} returns {of_type(optimizer)}; it must return a torch.optim.Optimizer, "
            "such as functools.partial(torch.optim.AdamW, lr=1e-3) does."
        )
    check_parameters(optimizer, named, name_of(make))
    return optimizer


def check_parameters(optimizer: Optimizer, named: Mapping[str, nn.Parameter], make: str) -> None:
    """Check that an optimizer has no other tensors than the parameters that its callable, ``make``, was given.

    Raises:
        UsageError: it has, such as the parameters of the model that parallelize was given.
    """
    given = {id(p) for p in named.values()}
    tensors = [p for own in nested(optimizer) for group in own.param_groups for p in group["params"]]
    foreign = [p for p in tensors if id(p) not in given]
    if foreign:
        name = type(optimizer).__name__
        raise UsageError(
            f"optimizer={make} returns {name} of {plural(len(tensors), 'tensor')}, of which {len(foreign)} are not "
            f"among the {len(named)} parameters that it was given; the first one has shape {list(foreign[0].shape)}. "
            f"Use the callable's argument instead of model.parameters(): lambda params: {name}(params, …). What else "
            "is to be trained has to be part of the model."
        )


def use_fused_kernels(optimizer: Optimizer) -> None:
    """Set torch's fused kernels in optimizers on CUDA, unless the user chose an implementation."""
    for own in nested(optimizer):
        for group in own.param_groups if isinstance(own, HAVE_FUSED_KERNELS) else ():
            chosen = group.get("fused") is not None or group.get("foreach") is not None or group.get("differentiable")
            fit = [p.is_cuda and p.is_floating_point() for p in group["params"]]
            if "fused" in group and not chosen and fit and all(fit):
                group["fused"] = True


def name_of(thing: Any) -> str:
    """Name of a callable for messages; for a partial, the name of its function."""
    inner = getattr(thing, "func", thing)
    return getattr(inner, "__name__", type(inner).__name__)


def kinds_of(spec: RankSpec, optimizer: Optimizer, held: Mapping[str, nn.Parameter]) -> dict[str, list[ParamKind]]:
    """Kinds of each parameter by name: one for every dim along which it is split, or one without a dim."""
    names = {id(p): name for name, p in held.items()}
    whole = {weight.name: weight.shape for weight in spec.trainable}
    kinds: dict[str, list[ParamKind]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            name = names[id(parameter)]
            if name in spec.cut:  # `uncut_params` has found that the optimizer updates any of its elements alone
                splits, shape = (), whole[name]
            else:
                splits, shape = spec.layout(name).splits, spec.whole_shape(name, parameter.shape)
            kinds[name] = [param_kind(number, shape, dim) for dim in ([s.dim for s in splits] or [None])]
    return kinds


def uncut_params(make: Callable[[Parameters], Optimizer], weights: Sequence[Weight]) -> frozenset[str]:
    """Names of the parameters that an optimizer has to see whole: it cannot update any elements by themselves.

    Args:
        make: the user's callable.
        weights: all trainable weights, with their whole shapes.

    Raises:
        UsageError: as `rank_optimizer`.
    """
    with probe_context(torch.device("cpu")):
        small = {weight.name: cast(nn.Parameter, small_weight(weight)) for weight in weights}
        optimizer = made(make, small)
    if needs_closure(optimizer):
        return frozenset(small)
    kinds = {
        name: param_kind(number, small[name].shape, FLAT)
        for number, names in enumerate(names_in_groups(optimizer, small))
        for name in names
    }
    whole: set[ParamKind] = set()
    for kind in dict.fromkeys(kinds.values()):
        try:
            whole |= needs_full_params(optimizer, [kind])
        except UsageError:  # Muon takes no flat pieces
            whole.add(kind)
    return frozenset(name for name, kind in kinds.items() if kind in whole)


def coupling_text(optimizer: Optimizer, spec: RankSpec) -> str:
    """Message for an optimizer that mixes parameters: the reason and the remedy."""
    name, norm = type(optimizer).__name__, optimizer.defaults.get("max_grad_norm")
    remedy = (
        f"It clips by the norm of its own parameters: pass max_grad_norm=None to {name} and clip_grad_norm={norm} to "
        "parallelize, which clips by the norm of all"
        if norm is not None
        else "Use another optimizer, or a mesh where every rank has all parameters: pp=1, tp=1, zero=0"
    )
    return (
        f"{name} updates each parameter by the gradients of others too (tried on small ones), and a rank of the mesh "
        f"{spec.mesh}{f' with {spec.replicas.zero_text}' if spec.zero else ''} has only some of them. {remedy}."
    )
