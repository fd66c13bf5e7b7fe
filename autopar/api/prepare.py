"""``autopar.prepare``: a model and an optimizer for a training loop that stays as it is.

The loop calls the module, computes a loss, calls ``loss.backward()`` and ``optimizer.step()``. The module returns
outputs with a graph (`autopar.api.autograd`); the optimizer updates the weights on the ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, NoReturn, overload
from weakref import WeakMethod

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from autopar.api.model import ParallelModel
from autopar.api.optimizer_copy import LIMIT, optimizer_copy
from autopar.api.parallelize import parallelize
from autopar.api.planning.plan import check_model
from autopar.api.ranks_parameter import BEFORE, refuse_changes, stand_in
from autopar.errors import MissingAttributeError, UsageError
from autopar.runtime.optim.param_groups import options_of, same_value

NOT_TRAINED = (
    "the weights of this process are not the trained ones. model.load_state_dict(module.state_dict()) gives them to "
    "the model that autopar.prepare got; call it on that model"
)
LATE_GROUPS = "Parameter groups cannot be added on running ranks. Add them before autopar.prepare."
# Options that ranks decide on by themselves: they clip by the norm of all gradients, and use fused kernels on GPUs.
OF_RANKS = frozenset({LIMIT, "fused"})


def prepare(
    model: nn.Module, optimizer: Optimizer, devices: int, **arguments: Any
) -> tuple[PreparedModule, PreparedOptimizer]:
    """A model and its optimizer on several devices, for a loop that stays as it is.

    ``module(x)`` returns outputs with a graph: compute any loss from them, call ``loss.backward()``, then
    ``optimizer.step()`` and ``optimizer.zero_grad()``. Gradients accumulate over backwards until then. Schedulers may
    be built over either optimizer: options of its parameter groups are sent to the ranks before each step.

    All microbatches' forwards come before their backwards (schedule ``gpipe``), so activations of the whole batch are
    kept, and steps are not replayed as CUDA graphs: `parallelize` with ``pm.train_step`` is faster. Under torchrun
    every process feeds its part of the batch, as under DistributedDataParallel.

    Args:
        model: as for `parallelize`.
        optimizer: built over the model's parameters, before its first step.
        arguments: other arguments of `parallelize`, such as ``batch_size``, ``precision`` or ``plan``.

    Raises:
        UsageError: as `parallelize`; or an optimizer like the given one cannot be built on the ranks.
    """
    refused = sorted({"optimizer", "loss_fn", "loss_over", "lr_scheduler"} & arguments.keys())
    if refused:
        raise UsageError(
            f"autopar.prepare takes no {', '.join(refused)}: the loop computes its loss and steps its scheduler. "
            "Use autopar.parallelize for a loop of pm.train_step."
        )
    check_model(model)
    recipe = optimizer_copy(optimizer, model)
    pm = parallelize(model, devices, optimizer=recipe, loss_over="caller", **arguments)
    refuse_changes(model.parameters(), pm)
    names = [name for group in recipe.groups for name in group.names]
    return PreparedModule(pm, model), PreparedOptimizer(pm, optimizer, names)


class PreparedModule(nn.Module):
    """A module whose forward and backward run on the ranks of ``pm``. Attributes that it lacks are the model's.

    ``parameters()`` have names, shapes and ``requires_grad`` of the model's, but no values and no gradients: reading
    ``grad`` is an error once there are any. The module may be a child of another one, whose state dict then has the
    weights of the ranks.
    """

    def __init__(self, pm: ParallelModel, model: nn.Module) -> None:
        super().__init__()
        self.pm = pm
        # Not as a submodule: its weights are not the trained ones. Nor as ``module``, which scripts unwrap DDP by.
        object.__setattr__(self, "unmodified", model)
        # Not by register_parameter, which takes no names with dots (private, torch 2.11 to 2.15).
        self._parameters.update({name: stand_in(p, pm) for name, p in model.named_parameters()})
        self.training = model.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.pm.train(self.training)  # a parent's code may have set the flag alone
        return self.pm(*args, **kwargs)

    def train(self, mode: bool = True) -> PreparedModule:
        self.pm.train(mode)
        self.training = mode
        return self

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """As `ParallelModel.state_dict`; added to ``destination`` under ``prefix`` if the module is part of another."""
        del keep_vars
        state = self.pm.state_dict()
        if destination is None and not prefix:
            return state
        destination = {} if destination is None else destination
        destination.update({prefix + name: value for name, value in state.items()})
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As `ParallelModel.load_state_dict`; without ``strict`` other names are left out, and missing weights stay."""
        if assign:
            raise UsageError("The ranks keep their own memory for the weights: leave out assign=True.")
        missing, unexpected = [], []
        if not strict:
            present = self.pm.state_dict()
            missing = [name for name in present if name not in state_dict]
            unexpected = [name for name in state_dict if name not in present]
            state_dict = {name: state_dict.get(name, value) for name, value in present.items()}
        self.pm.load_state_dict(state_dict)
        return torch.nn.modules.module._IncompatibleKeys(missing, unexpected)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
        """As `load_state_dict`, for a parent that loads a state dict with names under ``prefix``."""
        own = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        self.pm.load_state_dict(own)

    def zero_grad(self, set_to_none: bool = True) -> None:
        del set_to_none
        if self.pm.has_gradients:
            self.pm.zero_grad()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients before the optimizer's step; returns their norm before clipping, [].

        Raises:
            UsageError: ``norm_type`` is not 2.
        """
        if norm_type != 2:
            raise UsageError(f"norm_type={norm_type}: gradients of several ranks are clipped by their 2-norm only.")
        norm = self.pm.clip_gradients(max_norm=max_norm) if self.pm.has_gradients else 0.0
        return torch.tensor(norm, device="cpu")

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clip the elements of the gradients before the optimizer's step."""
        if self.pm.has_gradients:
            self.pm.clip_gradients(max_value=clip_value)

    def no_sync(self) -> AbstractContextManager[None]:
        """Context without effect: gradients are summed over the replicas once, in the optimizer's step."""
        return nullcontext()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PreparedModule:
        """The module itself: under ``to``, ``cuda`` or ``cpu``, also of a parent, the ranks keep the weights.

        Raises:
            UsageError: ``fn`` changes the dtype.
        """
        del recurse
        for dtype in {p.dtype for p in self.parameters()}:
            if (changed := fn(torch.empty(0, dtype=dtype, device="cpu")).dtype) != dtype:
                raise UsageError(
                    f"The ranks hold the weights, which cannot become {changed} now. Convert the model before "
                    'autopar.prepare, or pass precision="bf16" or "fp16" for mixed precision.'
                )
        return self

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise UsageError(
            "A prepared module cannot be copied: its weights are on running ranks. For a moving average of the weights "
            "pass ema=functools.partial(timm.utils.ModelEmaV3, decay=0.999) to autopar.prepare."
        )

    def extra_repr(self) -> str:
        return f"{self.pm.plan.model.name}, {self.pm.plan.mesh}"

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__["unmodified"]
            value = getattr(model, name)
            if isinstance(value, nn.Module | torch.Tensor):
                raise MissingAttributeError(f"{type(model).__name__}.{name}: {NOT_TRAINED}", name=name) from None
            is_method = inspect.ismethod(value) and value.__self__ is model
            return method_without_weights(model, value) if is_method else value

    def __setattr__(self, name: str, value: Any) -> None:
        model = self.__dict__.get("unmodified")
        is_own = name in self.__dict__ or hasattr(nn.Module, name)
        if isinstance(value, nn.Module | nn.Parameter) or (not is_own and model is not None and hasattr(model, name)):
            raise UsageError(f"{name} is set too late: {BEFORE}.")
        super().__setattr__(name, value)

    def refused(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises a UsageError: the call would change or show modules that the ranks do not run."""
        del args, kwargs
        name = type(self.unmodified).__name__
        raise UsageError(f"The ranks run traced operations, not the modules of {name}: {BEFORE}.")

    @property
    def _torchdynamo_orig_callable(self) -> NoReturn:
        """Raises a UsageError. torch.compile asks for it first (private, torch 2.11 to 2.15)."""
        raise UsageError(
            "The ranks compile their own code: pass compile=True to autopar.prepare, the default on GPUs, and leave "
            "torch.compile out."
        )

    # Not named_children, which is empty: torch's ModuleTracker asks for it, in summaries of a parent.
    modules = children = get_submodule = apply = requires_grad_ = compile = refused
    buffers = named_buffers = get_buffer = get_parameter = refused
    add_module = register_module = register_parameter = register_buffer = to_empty = share_memory = refused


def method_without_weights(model: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
    """A model's method that raises a UsageError if it calls a module or saves weights: those here are not trained."""

    @wraps(method)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        modules = set(model.modules())

        def refuse(module: nn.Module, inputs: Any) -> None:
            del inputs
            if module in modules:
                raise UsageError(
                    f"{type(model).__name__}.{method.__name__} runs modules of the model, and only its "
                    "forward runs on the ranks. Prepare a module whose forward calls this method."
                )

        def refuse_state(module: nn.Module, prefix: str, keep_vars: bool) -> None:
            del module, prefix, keep_vars
            raise UsageError(f"{type(model).__name__}.{method.__name__}: {NOT_TRAINED}")

        handles = [register_module_forward_pre_hook(refuse), model.register_state_dict_pre_hook(refuse_state)]
        try:
            return method(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()

    return guarded


class PreparedOptimizer(Optimizer):
    """An optimizer whose step updates the weights on the ranks. It shares its parameter groups with the user's.

    ``skipped`` says whether the last step left the weights as they were, after an overflow under float16.
    """

    def __init__(self, pm: ParallelModel, optimizer: Optimizer, names: Sequence[str]) -> None:
        """Take over an optimizer; ``names`` are those of its parameters, group by group."""
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.pm: ParallelModel = pm
        self.optimizer: torch.optim.Optimizer = optimizer
        self.names: tuple[str, ...] = tuple(names)
        self.sent: list[dict[str, Any]] = [options_for_ranks(group) for group in self.param_groups]
        self.skipped: bool = False
        pm.before_save, pm.after_load = WeakCall(self.send_options), WeakCall(self.read_options)
        optimizer.register_step_pre_hook(WeakCall(self.refuse_step_of_original))

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the weights with the present options of the groups.

        Args:
            closure: computes the loss and its gradients.
        """
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        self.send_options()
        self.skipped = False
        if self.pm.has_gradients:  # as in torch, nothing changes without: weights do not decay either
            self.skipped = self.pm.optimizer_step().skipped
        elif any(p.grad is not None for group in self.param_groups for p in group["params"]):
            raise UsageError(
                "The gradients are those of the model that autopar.prepare got, which the ranks do not train. Call the "
                "module that it returned."
            )
        # torch's schedulers, built over the user's optimizer, warn unless it has stepped (private, torch 2.11 to 2.15).
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        return loss

    def send_options(self) -> None:
        """Send the ranks what has changed in the options of the groups.

        Raises:
            UsageError: groups were added to the user's optimizer.
        """
        if len(self.optimizer.param_groups) != len(self.sent):
            raise UsageError(LATE_GROUPS)
        options = [options_for_ranks(group) for group in self.param_groups]
        changes = [
            {name: value for name, value in own.items() if name not in sent or not same_value(sent[name], value)}
            for own, sent in zip(options, self.sent, strict=True)
        ]
        if any(changes):
            self.pm.set_group_options(changes)
            self.sent = options

    def refuse_step_of_original(self, *args: Any) -> None:
        """Raise a UsageError if the user's optimizer steps while the ranks train: it has no gradients."""
        del args
        if self.pm.is_open:
            raise UsageError("This optimizer was given to autopar.prepare, which returned the one to step.")

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Raises a UsageError. GradScaler.step asks for it first (private, torch 2.11 to 2.15)."""
        raise UsageError(
            'The ranks scale losses themselves: pass precision="fp16" to autopar.prepare, and leave GradScaler out.'
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        del set_to_none
        if self.pm.has_gradients:
            self.pm.zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises a UsageError once the optimizer is prepared."""
        if getattr(self, "pm", None) is not None:  # also in a wrapper that hands attributes on
            raise UsageError(LATE_GROUPS)
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """State dict of an optimizer of the unmodified model, with whole tensors on the CPU.

        ``module.pm.save_checkpoint(folder)`` writes parts from all ranks, which is faster and takes less memory.
        """
        self.send_options()
        self.read_options()
        state = self.pm.optimizer_state()
        numbers = iter(range(len(self.names)))
        groups = [{**options_of(own), "params": [next(numbers) for _ in own["params"]]} for own in self.param_groups]
        return {"state": {i: dict(state[n]) for i, n in enumerate(self.names) if n in state}, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of an optimizer of the unmodified model.

        Raises:
            UsageError: the groups have other sizes.
        """
        sizes = [len(group["params"]) for group in state_dict["param_groups"]]
        expected = [len(group["params"]) for group in self.param_groups]
        if sizes != expected:
            raise UsageError(f"The state dict has groups of {sizes} parameters, the optimizer has {expected}.")
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        by_number = dict(zip(numbers, self.names, strict=True))
        self.take_options(state_dict["param_groups"])
        self.pm.load_optimizer_state(
            {by_number[number]: values for number, values in state_dict["state"].items()}, self.sent
        )

    def take_options(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take over options of parameter groups that the ranks have or get, such as those of a checkpoint."""
        for group, own in zip(self.param_groups, groups, strict=True):
            group.update(options_for_ranks(own))
        self.sent = [options_for_ranks(group) for group in self.param_groups]

    def read_options(self) -> None:
        """Take over the options that the ranks have: an optimizer may count its steps there, a load replaces them."""
        self.take_options(self.pm.group_options())

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            "A prepared optimizer cannot be pickled or copied: its state is on running ranks. Use state_dict()."
        )


class WeakCall:
    """A method as a callable that does not keep its object alive; nothing happens once that is gone."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.reference = WeakMethod(method)

    def __call__(self, *args: Any) -> Any:
        method = self.reference()
        return method(*args) if method is not None else None


def options_for_ranks(group: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a parameter group without those that ranks decide on by themselves."""
    return {name: value for name, value in options_of(group).items() if name not in OF_RANKS}
