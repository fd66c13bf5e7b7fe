"""Probes the user's callables on small parameters, without lists of names: what does an optimizer have to see?

An optimizer may be correct on any part of a parameter (SGD, AdamW), only on whole parameters (LAMB's norms, Muon's
orthogonalisation), or only on all parameters together (a clip by the norm of all its parameters).
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.errors import UsageError
from autopar.ir.graph import Weight
from autopar.runtime.random_state import RandomState

MAX_DIM_SIZE = 64  # maximal size of a probe parameter's dims
STEPS = 5
GROWTH = 9.0  # growth of a gradient at the second step: only growing gradients reach limits on an update's size
LEARNING_RATE = 0.1  # the user's may be 0 at the first step of a warm-up
SCALES = (7.0, 0.3, 5.0, 0.2, 6.0)  # scale of the other parameters' gradients at each step, to detect coupling
# Relative to the largest update. Rounding in elementwise optimizers is 1e-6; norms and counts of halves differ by 1e-2
# and more.
TOLERANCE = 1e-4


@contextmanager
def probe_context(device: torch.device) -> Iterator[None]:
    """Context with its own random numbers, on the CPU and ``device``, without compilation and default device."""
    # Compiling some optimizers (timm's Kron) would take minutes.
    with RandomState(0, device).active(), torch.device("cpu"), torch.compiler.set_stance("force_eager"):
        yield


def small_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Shape whose dims are capped at `MAX_DIM_SIZE`."""
    return tuple(min(size, MAX_DIM_SIZE) for size in shape)


def small_weight(weight: Weight) -> torch.Tensor:
    """Zeros in a weight's place, of its `small_shape`; a parameter if the weight is one."""
    tensor = torch.zeros(small_shape(weight.shape), dtype=getattr(torch, weight.stored_dtype), device="cpu")
    return nn.Parameter(tensor, weight.requires_grad) if weight.kind == "parameter" else tensor


def step_probe(optimizer: Optimizer, parameters: str) -> None:
    """Step an optimizer over small parameters, which ``parameters`` describes.

    Raises:
        UsageError: the step fails.
    """
    try:
        optimizer.step()
    except Exception as error:
        raise UsageError(
            f"The optimizer {type(optimizer).__name__} fails in a trial on {parameters}: {type(error).__name__}: "
            f"{error}. Choose another one, or groups of parameters that it can update."
        ) from error


FLAT = -1  # stands for a split of a flattened parameter


@dataclass(frozen=True)
class ParamKind:
    """Kind of parameters that an optimizer treats alike.

    Their group, their whole shape (dims capped at `MAX_DIM_SIZE`) and the dim of their split: `FLAT` where pieces are
    any elements, None if not split.
    """

    group: int
    shape: tuple[int, ...]
    dim: int | None


def param_kind(group: int, shape: Sequence[int], dim: int | None) -> ParamKind:
    """Kind of a parameter, given its whole shape."""
    return ParamKind(group, small_shape(shape), dim)


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether ``step`` requires a closure that evaluates the loss again."""
    parameters = inspect.signature(optimizer.step).parameters.values()
    return any(p.name == "closure" and p.default is p.empty for p in parameters)


def nested(optimizer: Optimizer) -> Iterator[Optimizer]:
    """The optimizer and all optimizers that it wraps."""
    yield optimizer
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer):
            yield from nested(value)


def mixes_parameters(optimizer: Optimizer, kinds: Sequence[ParamKind]) -> bool:
    """Whether one parameter's update depends on another one's gradient.

    Raises:
        UsageError: the optimizer fails on parameters of these kinds.
    """
    alone, together = (probed(optimizer, kinds, others) for others in ((1.0,) * STEPS, SCALES))
    return any(differ(a, b) for a, b in zip(alone, together, strict=True))


def needs_full_params(optimizer: Optimizer, kinds: Sequence[ParamKind]) -> frozenset[ParamKind]:
    """Kinds for which two halves, updated as separate parameters, differ from the updated whole.

    Raises:
        UsageError: the optimizer fails on parameters of these kinds.
    """
    split = [kind for kind in kinds if kind.dim is not None]
    whole, halves = (probed(optimizer, split, in_halves=cut) for cut in (False, True))
    return frozenset(a.kind for a, b in zip(whole, halves, strict=True) if differ(a, b))


def differ(a: ProbeParam, b: ProbeParam) -> bool:
    """Whether two parameters of one kind and start differ by more than rounding."""
    value = a.now()
    return not bool((value - b.now()).abs().max() <= TOLERANCE * (value - a.start).abs().max())


class ProbeParam:
    """Small parameter, whole or in two halves, whose parts differ in everything that an optimizer may measure.

    Along every dim the values grow. The gradients change along it from constant to random and grow more at one step.
    """

    def __init__(self, kind: ParamKind, in_halves: bool, like: torch.Tensor, generator: torch.Generator) -> None:
        self.kind = kind
        # Shape of the kind; 0 at the first corner, 1 at the last corner.
        self.place = torch.zeros(kind.shape, device="cpu")
        for dim, size in enumerate(kind.shape):
            along = torch.linspace(0, 1, size, device="cpu").view(-1, *[1] * (len(kind.shape) - dim - 1))
            self.place += along / len(kind.shape)
        self.constant = torch.randn(kind.shape, generator=generator, device="cpu")
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        self.generator = generator
        start = torch.randn(kind.shape, generator=generator, device="cpu") * (0.5 + self.place)
        self.start = start.to(like.device, dtype)
        assert kind.dim is not None or not in_halves
        self.pieces = [nn.Parameter(piece.clone()) for piece in self.split(self.start, in_halves)]

    def split(self, tensor: torch.Tensor, in_halves: bool) -> Sequence[torch.Tensor]:
        if not in_halves:
            return (tensor,)
        return tensor.flatten().chunk(2) if self.kind.dim == FLAT else tensor.chunk(2, self.kind.dim or 0)

    def now(self) -> torch.Tensor:
        pieces = [piece.detach() for piece in self.pieces]
        if self.kind.dim == FLAT:
            return torch.cat([piece.flatten() for piece in pieces]).view(self.kind.shape)
        return torch.cat(pieces, self.kind.dim or 0) if len(pieces) > 1 else pieces[0].clone()

    def set_gradient(self, step: int, scale: float) -> None:
        """Set the gradient of a step: random at first, then orthogonal to the parameter, at last to each of its rows.

        Gradients of weights before a normalization are orthogonal. AdamP projects only such gradients.
        """
        value = self.now()
        random = torch.randn(value.shape, generator=self.generator, device="cpu")
        gradient = torch.lerp(self.constant, random, self.place) * (0.5 + self.place)
        gradient = (gradient * (1 + GROWTH * self.place if step == 1 else 1)).to(value) * scale
        if step == STEPS - 2:
            gradient -= value * (gradient * value).sum() / value.square().sum()
        elif step == STEPS - 1 and value.ndim > 1:
            rows, own = value.flatten(1), gradient.flatten(1)
            ratio = (own * rows).sum(1, keepdim=True) / rows.square().sum(1, keepdim=True)
            gradient -= (rows * ratio).view(value.shape)
        for piece, own in zip(self.pieces, self.split(gradient, len(self.pieces) > 1), strict=True):
            piece.grad = own.clone()


def probed(
    optimizer: Optimizer, kinds: Sequence[ParamKind], others: Sequence[float] = (), in_halves: bool = False
) -> list[ProbeParam]:
    """Parameters, one of each kind, after `STEPS` steps of the optimizer's twin.

    Calls with equal kinds use equal random numbers.

    Args:
        others: scale, by step, of the gradients of a second parameter of each kind; empty for no second one.
    """
    if not kinds:
        return []
    like = next(p for group in optimizer.param_groups for p in group["params"])
    firsts: list[ProbeParam] = []
    seconds: list[ProbeParam] = []
    for number, kind in enumerate(kinds):
        firsts.append(ProbeParam(kind, in_halves, like, torch.Generator().manual_seed(number)))
        if others:
            seconds.append(ProbeParam(kind, in_halves, like, torch.Generator().manual_seed(len(kinds) + number)))
    shapes = sorted({kind.shape for kind in kinds}, key=prod)
    with probe_context(like.device):
        members: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
        for param in [*firsts, *seconds]:
            members[param.kind.group] += param.pieces
        tried = twin(optimizer, members)
        for step in range(STEPS):
            for param in firsts:
                param.set_gradient(step, 1.0)
            for param in seconds:
                param.set_gradient(step, others[step])
            step_probe(tried, f"parameters of shapes {', '.join(str(list(s)) for s in shapes)}")
    return firsts


def probe_group(group: Mapping[str, Any], members: list[nn.Parameter]) -> dict[str, Any]:
    """Group with the options of another one, except for a learning rate above 0."""
    options = copy.deepcopy({k: v for k, v in group.items() if k not in ("params", "param_names")})
    if isinstance(options.get("lr"), torch.Tensor):
        options["lr"] = torch.full_like(options["lr"], LEARNING_RATE)
    elif "lr" in options:
        options["lr"] = LEARNING_RATE
    return options | {"params": members}


def twin(optimizer: Optimizer, members: Sequence[list[nn.Parameter]]) -> Optimizer:
    """Copy of an optimizer in the state before its first step, with other parameters in its groups.

    Copy and original share only attributes that cannot be copied, such as locks.
    """
    groups = [probe_group(group, own) for group, own in zip(optimizer.param_groups, members, strict=True)]
    made_of = {id(group): other for group, other in zip(optimizer.param_groups, groups, strict=True)}
    twins = {id(own): object.__new__(type(own)) for own in nested(optimizer)}
    memo: dict[int, Any] = dict(twins)
    memo |= {id(p): None for group in optimizer.param_groups for p in group["params"]}  # not copied: may be large
    for own in nested(optimizer):
        other = vars(twins[id(own)])
        for name, value in vars(own).items():
            try:
                other[name] = copy.deepcopy(value, memo) if name not in ("param_groups", "state") else None
            except TypeError:
                other[name] = value
        same = own.param_groups is optimizer.param_groups  # a wrapper may extend the wrapped list
        other["param_groups"] = groups if same else [made_of[id(group)] for group in own.param_groups]
        other["state"] = defaultdict(dict)
        for group, pieces in zip(optimizer.param_groups, members, strict=True):
            for piece in pieces:
                model = next((p for p in group["params"] if p.ndim == piece.ndim), group["params"][0])
                if model in own.state:
                    other["state"][piece] = {k: first_state(v, model, piece) for k, v in own.state[model].items()}
    return twins[id(optimizer)]


def first_state(value: Any, of: nn.Parameter, piece: nn.Parameter) -> Any:
    """State for a part of a parameter in an optimizer that allocates its state when it is built (torch's Adagrad)."""
    if isinstance(value, torch.Tensor) and value.shape == of.shape:
        return value.flatten()[:1].to(piece.dtype).expand(piece.shape).clone()
    return copy.deepcopy(value)
