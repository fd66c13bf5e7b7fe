"""What an optimizer needs to see at once, found by trying it on small parameters: no list of names.

An optimizer may be right on any part of a parameter (SGD, AdamW), only on whole parameters (LAMB's norms, Muon's
orthogonalisation), or only on all parameters together (a clip by the norm of everything that it was given).
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.errors import UsageError

MAX_DIM_SIZE = 64  # size of a toy's dims
STEPS = 5
GROWTH = 9.0  # of a gradient at the second step: limits of an update's size are reached by growth
LEARNING_RATE = 0.1  # that of a warm-up's first step may be 0
SCALES = (7.0, 0.3, 5.0, 0.2, 6.0)  # of the other parameters' gradients at each step, where coupling is looked for
# Of the largest update. Elementwise optimizers are off by rounding, 1e-6; norms and counts of halves by 1e-2 and more.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class ParamKind:
    """Parameters that an optimizer treats alike: one group, one shape (large dims capped), split along one dim or
    none.
    """

    group: int
    shape: tuple[int, ...]
    dim: int | None


def param_kind(group: int, shape: Sequence[int], dim: int | None) -> ParamKind:
    """The kind of a parameter whose whole shape this is."""
    return ParamKind(group, tuple(min(size, MAX_DIM_SIZE) for size in shape), dim)


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether ``step`` cannot be called without a function that evaluates the loss again."""
    parameters = inspect.signature(optimizer.step).parameters.values()
    return any(p.name == "closure" and p.default is p.empty for p in parameters)


def nested(optimizer: Optimizer) -> Iterator[Optimizer]:
    """The optimizer and those that it wraps."""
    yield optimizer
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer):
            yield from nested(value)


def mixes_parameters(optimizer: Optimizer, kinds: Sequence[ParamKind]) -> bool:
    """Whether one parameter's update depends on another one's gradient.

    Raises:
        UsageError: the optimizer fails on parameters of these kinds.
    """
    alone, beside = (ProbeRun(optimizer, kinds, others) for others in ((1.0,) * STEPS, SCALES))
    return any(differ(a, b, toy.start) for a, b, toy in zip(alone.ends(), beside.ends(), alone.params, strict=True))


def needs_full_params(optimizer: Optimizer, kinds: Sequence[ParamKind]) -> frozenset[ParamKind]:
    """The kinds whose halves, each updated as a parameter of its own, are not those of the whole.

    Raises:
        UsageError: the optimizer fails on parameters of these kinds.
    """
    split = [kind for kind in kinds if kind.dim is not None]
    whole, halves = (ProbeRun(optimizer, split, in_halves=cut) for cut in (False, True))
    return frozenset(
        toy.kind for a, b, toy in zip(whole.ends(), halves.ends(), whole.params, strict=True) if differ(a, b, toy.start)
    )


def differ(a: torch.Tensor, b: torch.Tensor, start: torch.Tensor) -> bool:
    """Whether two ends of one start are more than rounding apart."""
    return not bool((a - b).abs().max() <= TOLERANCE * (a - start).abs().max())


class ProbeParam:
    """A small whole parameter, in one piece or two, whose parts differ in whatever an optimizer may measure.

    Along every dim the values grow, and the gradients turn from constant to random and jump more in size.
    """

    def __init__(self, kind: ParamKind, in_halves: bool, like: torch.Tensor, generator: torch.Generator) -> None:
        self.kind = kind
        self.place = torch.zeros(kind.shape)  # 0 at the first corner, 1 at the last one
        for dim, size in enumerate(kind.shape):
            self.place += torch.linspace(0, 1, size).view(-1, *[1] * (len(kind.shape) - dim - 1)) / len(kind.shape)
        self.constant = torch.randn(kind.shape, generator=generator)
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        self.generator = generator
        self.start = (torch.randn(kind.shape, generator=generator) * (0.5 + self.place)).to(like.device, dtype)
        assert kind.dim is not None or not in_halves
        self.pieces = [nn.Parameter(piece.clone()) for piece in self.split(self.start, in_halves)]

    def split(self, tensor: torch.Tensor, in_halves: bool) -> Sequence[torch.Tensor]:
        return tensor.chunk(2, self.kind.dim or 0) if in_halves else (tensor,)

    def now(self) -> torch.Tensor:
        pieces = [piece.detach() for piece in self.pieces]
        return torch.cat(pieces, self.kind.dim or 0) if len(pieces) > 1 else pieces[0].clone()

    def set_gradient(self, step: int, scale: float) -> None:
        """Random at first; then orthogonal to the parameter, as behind a norm, at last in each of its rows.

        Optimizers that project (AdamP) do so for such gradients only.
        """
        value = self.now()
        random = torch.randn(value.shape, generator=self.generator)
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


class ProbeRun:
    """A few steps of an optimizer's twin on toys; the same random numbers in each trial of the same kinds."""

    def __init__(
        self,
        optimizer: Optimizer,
        kinds: Sequence[ParamKind],
        others: Sequence[float] = (),
        in_halves: bool = False,
    ) -> None:
        """Step.

        Args:
            others: scale, by step, of the gradients of a second toy of each kind; none for no second toy.
        """
        self.params: list[ProbeParam] = []
        if not kinds:
            return
        like = next(p for group in optimizer.param_groups for p in group["params"])
        seconds: list[ProbeParam] = []
        for number, kind in enumerate(kinds):
            generator = torch.Generator().manual_seed(number)
            self.params.append(ProbeParam(kind, in_halves, like, generator))
            if others:
                seconds.append(ProbeParam(kind, in_halves, like, torch.Generator().manual_seed(len(kinds) + number)))
        devices = [like.device] if like.device.type == "cuda" else []
        # Compiling some optimizers (timm's Kron) would take minutes.
        with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
            torch.manual_seed(0)
            members: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
            for toy in [*self.params, *seconds]:
                members[toy.kind.group] += toy.pieces
            tried = twin(optimizer, members)
            for step in range(STEPS):
                for toy in self.params:
                    toy.set_gradient(step, 1.0)
                for toy in seconds:
                    toy.set_gradient(step, others[step])
                try:
                    tried.step()
                except Exception as error:
                    shapes = sorted({kind.shape for kind in kinds}, key=prod)
                    raise UsageError(
                        f"The optimizer {type(optimizer).__name__} fails in a trial on parameters of shapes "
                        f"{', '.join(str(list(s)) for s in shapes)}: {type(error).__name__}: {error}. Choose another "
                        "one, or groups of parameters that it can update."
                    ) from error

    def ends(self) -> list[torch.Tensor]:
        """The first toy of each kind, after the steps."""
        return [toy.now() for toy in self.params]


def probe_group(group: Mapping[str, Any], members: list[nn.Parameter]) -> dict[str, Any]:
    """A group with the same options, but for a learning rate that moves something."""
    options = copy.deepcopy({k: v for k, v in group.items() if k not in ("params", "param_names")})
    if isinstance(options.get("lr"), torch.Tensor):
        options["lr"] = torch.full_like(options["lr"], LEARNING_RATE)
    elif "lr" in options:
        options["lr"] = LEARNING_RATE
    return options | {"params": members}


def twin(optimizer: Optimizer, members: Sequence[list[nn.Parameter]]) -> Optimizer:
    """An optimizer with the same settings, before its first step, whose groups have other parameters.

    Nothing is shared but attributes that cannot be copied, such as locks.
    """
    groups = [probe_group(group, own) for group, own in zip(optimizer.param_groups, members, strict=True)]
    made_of = {id(group): other for group, other in zip(optimizer.param_groups, groups, strict=True)}
    twins = {id(own): object.__new__(type(own)) for own in nested(optimizer)}
    memo: dict[int, Any] = dict(twins)
    memo |= {id(p): None for group in optimizer.param_groups for p in group["params"]}  # may be large
    for own in nested(optimizer):
        other = vars(twins[id(own)])
        for name, value in vars(own).items():
            try:
                other[name] = copy.deepcopy(value, memo) if name not in ("param_groups", "state") else None
            except TypeError:
                other[name] = value
        same = own.param_groups is optimizer.param_groups  # a wrapper may add to the list of what it wraps
        other["param_groups"] = groups if same else [made_of[id(group)] for group in own.param_groups]
        other["state"] = defaultdict(dict)
        for group, pieces in zip(optimizer.param_groups, members, strict=True):
            for piece in pieces:
                model = next(p for p in group["params"] if p.ndim == piece.ndim)
                if model in own.state:
                    other["state"][piece] = {k: first_state(v, model, piece) for k, v in own.state[model].items()}
    return twins[id(optimizer)]


def first_state(value: Any, of: nn.Parameter, piece: nn.Parameter) -> Any:
    """What an optimizer that makes its state at once (torch's Adagrad) would have made for a piece."""
    if isinstance(value, torch.Tensor) and value.shape == of.shape:
        return value.flatten()[:1].to(piece.dtype).expand(piece.shape).clone()
    return copy.deepcopy(value)
