"""timm's optimizers by name, with timm's parameter groups, for ranks that hold a part of the model each."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autopar.api.model_source import need
from autopar.errors import UsageError, suggest
from autopar.runtime.optim.param_groups import ParamGroup, grouped
from autopar.runtime.spec import Parameters
from autopar.train.timm_optional import needed


@dataclass(frozen=True)
class TimmOptimizer:
    """Builds the optimizer of a rank; plain data, so that it can be sent to workers.

    ``clip_grad_norm`` is the limit that the optimizer itself would put on the norm of all gradients (LAMB: 1.0). A rank
    does not see all gradients, so `autopar.parallelize` clips by the smaller of this and its own ``clip_grad_norm``.
    """

    name: str
    lr: float | None
    groups: tuple[ParamGroup, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    clip_grad_norm: float | None = None

    def __call__(self, parameters: Parameters) -> torch.optim.Optimizer:
        """The optimizer of a rank; a group keeps its parameters that are among ``parameters``.

        Raises:
            UsageError: no name matches: the groups belong to another model.
        """
        known = dict(parameters.named_parameters())
        groups = grouped(known, self.groups)
        if not any(group["params"] for group in groups):
            raise UsageError(
                f"None of the {sum(len(g.names) for g in self.groups)} parameters that {self.name} has groups for is "
                f"among the model's {len(known)}: {', '.join(self.groups[0].names[:2])} … against "
                f"{', '.join(list(known)[:2])} …. Make the optimizer with the model that is parallelized."
            )
        factory = need("timm.optim", f"Optimizer {self.name!r}")
        return factory.create_optimizer_v2(groups, self.name, lr=self.lr, **self.options)


def timm_optimizer(
    model: nn.Module,
    opt: str,
    lr: float | None,
    weight_decay: float = 0.0,
    momentum: float | None = None,
    layer_decay: float | None = None,
    filter_bias_and_bn: bool = True,
    **options: Any,
) -> TimmOptimizer:
    """A builder of timm's optimizer ``opt``, for the ``optimizer`` argument of `autopar.parallelize`.

    The groups are those of ``timm.optim.create_optimizer_v2`` with the same arguments. Biases, norms and the model's
    ``no_weight_decay()`` have no weight decay; with ``layer_decay`` learning rates decrease from layer to layer.

    Args:
        model: the unmodified model.
        momentum: for optimizers that have one; 0.9 by default.
        options: further options of the optimizer, such as ``betas=(0.9, 0.98)``.

    Raises:
        UsageError: not a model, an unknown name or option, a missing library, or an optimizer that needs second
            derivatives.
    """
    if not isinstance(model, nn.Module) or not isinstance(opt, str):
        raise UsageError(
            f"timm_optimizer was given a {type(model).__name__} and a {type(opt).__name__}; it takes a model and "
            'the name of an optimizer, such as timm_optimizer(model, "lamb", lr=1e-3).'
        )
    library = need("timm.optim", f"Optimizer {opt!r}")
    accepted = optimizer_arguments(library, opt)
    if momentum is not None:
        options["momentum"] = momentum
    unknown = [name for name in options if name not in accepted]
    if unknown:
        hint = suggest(unknown[0], accepted)
        raise UsageError(f"timm's {opt} has no option {unknown[0]!r}.{hint} It has {', '.join(accepted)}.")
    limit = None
    if "max_grad_norm" in accepted:
        limit = options.get("max_grad_norm", accepted["max_grad_norm"])
        options["max_grad_norm"] = None
    groups = with_timm_errors(
        opt, lambda: timm_param_groups(library, model, weight_decay, layer_decay, filter_bias_and_bn)
    )
    optimizer = TimmOptimizer(opt, lr, groups, options, limit)
    stand_ins = {name: nn.Parameter(torch.zeros(1, device="cpu")) for group in groups for name in group.names}
    example = with_timm_errors(opt, lambda: optimizer(Parameters(stand_ins)))
    if getattr(example, "is_second_order", False):
        raise UsageError(
            f"timm's {opt} differentiates gradients once more, and stages and shards do not keep what that takes. "
            "Choose a first-order one, such as adamw."
        )
    return optimizer


def optimizer_arguments(library: Any, opt: str) -> dict[str, Any]:
    """Options of an optimizer and their defaults.

    Raises:
        UsageError: the name is unknown, or a library or device that the optimizer needs is missing.
    """
    known = library.list_optimizers()
    prefix, _, name = opt.lower().rpartition("_")  # timm knows lookahead_adam too
    if name not in known or prefix not in ("", "lookahead"):
        hint = suggest(opt.lower(), known, 3)
        raise UsageError(
            f"timm has no optimizer {opt!r}.{hint} It has {len(known)}, such as adamw, sgd, lamb, lars, adafactor, "
            "muon: timm.optim.list_optimizers()."
        )
    found = with_timm_errors(opt, lambda: library.get_optimizer_class(name, bind_defaults=False))
    given = inspect.signature(found).parameters.values()
    return {p.name: p.default for p in given if p.name not in ("params", "lr", "weight_decay")}


def with_timm_errors(opt: str, make: Callable[[], Any]) -> Any:
    """Result of a call into timm; its exceptions become a UsageError."""
    try:
        return make()
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"timm's optimizer {opt} cannot be made: {type(error).__name__}: {str(error).rstrip('.')}."
        ) from error


def timm_param_groups(
    library: Any, model: nn.Module, weight_decay: float, layer_decay: float | None, filter_bias_and_bn: bool
) -> tuple[ParamGroup, ...]:
    """timm's parameter groups of a model, with names instead of parameters."""
    exempt = getattr(model, "no_weight_decay", set)()
    options: dict[str, Any] = {
        "weight_decay": weight_decay, "no_weight_decay_list": exempt, "weight_decay_exclude_1d": filter_bias_and_bn,
    }  # fmt: skip
    if layer_decay is None:
        groups = library.param_groups_weight_decay(model, **options)
    else:
        groups = library.param_groups_layer_decay(model, layer_decay=layer_decay, **options)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return tuple(
        ParamGroup(tuple(names[id(p)] for p in group["params"]), {k: v for k, v in group.items() if k != "params"})
        for group in groups
    )


def timm_average(decay: float) -> Callable[[nn.Module], Any]:
    """A builder of timm's moving average of weights, for the ``ema`` argument of `autopar.parallelize`.

    Args:
        decay: fraction of the average that each update keeps.

    Raises:
        UsageError: timm is not installed.
    """
    return functools.partial(needed("timm.utils", "--model-ema").ModelEmaV3, decay=decay)
