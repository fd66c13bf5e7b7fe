"""A rank's optimizer: made from its own parameters or from whole ones, with the groups of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.errors import AutoparError, UsageError
from autopar.ir.units import of_type
from autopar.runtime.comm.protocols import Transport
from autopar.runtime.optim.probe import (
    ParamKind,
    mixes_parameters,
    needs_closure,
    needs_full_params,
    nested,
    param_kind,
)
from autopar.runtime.params.full_params import FullParams
from autopar.runtime.spec import Parameters, RankSpec

# Adagrad has "fused" among its options too, but on CPU only (torch 2.11 to 2.15).
HAVE_FUSED_KERNELS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


@dataclass(frozen=True)
class RankOptimizer:
    """An optimizer, the parameters by name that it updates here, and the whole copies among them where it needs any."""

    optimizer: Optimizer
    parameters: Mapping[str, nn.Parameter]
    wholes: FullParams | None = None


def rank_optimizer(
    spec: RankSpec, make: Callable[[Parameters], Optimizer], held: Mapping[str, nn.Parameter], transport: Transport
) -> RankOptimizer:
    """The optimizer of a rank, right for the parts of the model that the rank has.

    Args:
        make: the user's callable. It is called again where the optimizer turns out to need whole parameters.
        held: the parameters, or parts of them, that this rank's replica updates.

    Raises:
        UsageError: it cannot be made, needs a closure, or mixes parameters that lie on different ranks.
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
    if not (spec.mesh.pp > 1 or spec.owners or split):
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
    """An optimizer with all groups of the whole model, each holding the parameters that are here: maybe none.

    The callable sees every parameter of the model; those that are not here have no memory, and are taken out again.
    """
    placeholders: dict[str, nn.Parameter] = {
        w.name: nn.Parameter(torch.empty(w.shape, dtype=getattr(torch, w.stored_dtype), device="meta"))
        for w in spec.trainable
        if w.name not in held
    }
    names = [w.name for w in spec.trainable] or list(held)
    optimizer = made(make, {n: held[n] if n in held else placeholders[n] for n in names})
    away = {id(p) for p in placeholders.values()}
    for own in nested(optimizer):
        for group in own.param_groups:
            keep = [i for i, p in enumerate(group["params"]) if id(p) not in away]
            for key in ("params", "param_names"):
                if key in group:
                    group[key][:] = [group[key][i] for i in keep]
        for parameter in [p for p in own.state if id(p) in away]:
            del own.state[parameter]
    return optimizer


def made(make: Callable[[Parameters], Optimizer], named: Mapping[str, nn.Parameter]) -> Optimizer:
    """What the user's callable makes of parameters.

    Raises:
        UsageError: it fails, or makes something else.
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
    return optimizer


def use_fused_kernels(optimizer: Optimizer) -> None:
    """Have torch's optimizers on CUDA update all parameters in one kernel, where the user chose no implementation."""
    for own in nested(optimizer):
        for group in own.param_groups if isinstance(own, HAVE_FUSED_KERNELS) else ():
            chosen = group.get("fused") is not None or group.get("foreach") is not None or group.get("differentiable")
            fit = [p.is_cuda and p.is_floating_point() for p in group["params"]]
            if "fused" in group and not chosen and fit and all(fit):
                group["fused"] = True


def name_of(thing: Any) -> str:
    """What to call a callable in a message: the function behind a partial one."""
    inner = getattr(thing, "func", thing)
    return getattr(inner, "__name__", type(inner).__name__)


def kinds_of(spec: RankSpec, optimizer: Optimizer, held: Mapping[str, nn.Parameter]) -> dict[str, list[ParamKind]]:
    """For each parameter that the optimizer has, its kind for every dim along which it is split, or for none."""
    names = {id(p): name for name, p in held.items()}
    found: dict[str, list[ParamKind]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            name = names[id(parameter)]
            splits, shape = spec.layout(name).splits, list(parameter.shape)
            for split in splits:
                shape[split.dim] *= spec.mesh.tp
            found[name] = [param_kind(number, shape, dim) for dim in ([s.dim for s in splits] or [None])]
    return found


def coupling_text(optimizer: Optimizer, spec: RankSpec) -> str:
    """Why an optimizer that mixes parameters is refused, and what to do."""
    name, norm = type(optimizer).__name__, optimizer.defaults.get("max_grad_norm")
    remedy = (
        f"It clips by the norm of its own parameters: pass max_grad_norm=None to {name} and clip_grad_norm={norm} to "
        "parallelize, which clips by the norm of all"
        if norm is not None
        else "Use another optimizer, or a mesh where every rank has all parameters: pp=1, tp=1, zero1=False"
    )
    return (
        f"{name} updates each parameter by the gradients of others too (tried on small ones), and a rank of the mesh "
        f"{spec.mesh}{' with ZeRO-1' if spec.owners else ''} has only some of them. {remedy}."
    )
