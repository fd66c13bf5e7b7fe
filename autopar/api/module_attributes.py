"""Attributes of nn.Module, DDP and optimizers that objects of autopar lack, with what to use instead."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from autopar.errors import MissingAttributeError, suggest

WEIGHTS = (
    "the ranks hold the weights in parts. pm.state_dict() returns them whole, pm.gradients() their gradients. Pass "
    "optimizer= to parallelize, a callable that gets the parameters, and clip_grad_norm= to clip. Count or group the "
    "parameters of the model that parallelize was given"
)
MODULES = (
    "the ranks run the traced operations of the model, not its modules. Look at the model that parallelize was given; "
    "model.load_state_dict(pm.state_dict()) gives it the trained weights"
)
PLACE = (
    "the weights stay on the devices of the ranks, in the dtypes that precision= asks for. Inputs and targets may be "
    "on any device; pm.state_dict() returns tensors on the CPU"
)
BEFORE = "change the model before parallelize, which traces a copy of it"
STEPS = (
    "each rank has its own optimizer. pm.train_step(x, y) and pm.optimizer_step() update, pm.zero_grad() drops "
    "gradients, pm.learning_rates() returns the rates, pm.save_checkpoint(folder) saves the optimizer too"
)
OF_MODEL: Mapping[str, str] = {
    **dict.fromkeys(("parameters", "named_parameters", "buffers", "named_buffers", "get_parameter"), WEIGHTS),
    **dict.fromkeys(("modules", "named_modules", "children", "named_children", "get_submodule", "module"), MODULES),
    **dict.fromkeys(("to", "cuda", "cpu", "half", "float", "double", "bfloat16", "type", "device", "dtype"), PLACE),
    **dict.fromkeys(("requires_grad_", "apply", "share_memory", "add_module", "register_buffer"), BEFORE),
    **dict.fromkeys(("register_parameter", "register_module"), BEFORE),
    **dict.fromkeys(("optimizer", "step", "param_groups"), STEPS),
    "backward": "pm.forward_backward(x, y) computes gradients, pm.train_step(x, y) updates the weights as well",
    "clip_grad_norm_": "pass clip_grad_norm= to parallelize: each update then clips by the norm over all ranks",
    "compile": "pass compile=True to parallelize, the default on GPUs",
    "forward": "call pm(x) for outputs, pm.train_step(x, y) or pm.forward_backward(x, y) to train",
    "no_sync": "pm.forward_backward(x, y) accumulates gradients, which pm.train_step(x, y) of the last part reduces",
    "save": "pm.save_checkpoint(folder) saves the training, torch.save(pm.state_dict(), file) the weights",
}
OF_SCHEDULER: Mapping[str, str] = {
    **dict.fromkeys(
        ("state_dict", "load_state_dict"), "pm.save_checkpoint(folder) and pm.load_checkpoint(folder) hold its state"
    ),
    **dict.fromkeys(
        ("optimizer", "base_lrs", "last_epoch", "get_lr"),
        "each rank has its own scheduler. get_last_lr() returns the rate of each parameter group",
    ),
}
OF_RESULT: Mapping[str, str] = {
    "backward": "pm.train_step and pm.forward_backward have computed the gradients already",
    **dict.fromkeys(("item", "detach", "cpu"), "its .loss is a float"),
}


def missing_attribute(thing: object, name: str, instead: Mapping[str, str]) -> AttributeError:
    """Error of an attribute that an object lacks: what to use instead, if ``instead`` knows, or a similar name."""
    kind = type(thing).__name__
    if inspect.getattr_static(type(thing), name, None) is not None:  # a property raised an AttributeError: raise it
        object.__getattribute__(thing, name)
    if name.startswith("register_") and name.endswith("_hook"):
        instead = {name: "register forward hooks before parallelize, or return from forward what they would read"}
    # Python adds a second suggestion to an error that has both the name and the object.
    if name in instead:
        return MissingAttributeError(f"{kind} has no attribute {name!r}: {instead[name]}.", name=name)
    near = suggest(name, [known for known in dir(type(thing)) if not known.startswith("_")])
    return AttributeError(f"{kind} has no attribute {name!r}.{near}", name=name)
