"""Weights that share memory without being one tensor, which ranks would train separately."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.ir.graph import Graph


def check_shared_memory(model: nn.Module, graph: Graph) -> None:
    """Refuse trainable parameters that overlap in memory with another parameter, buffer or constant.

    One tensor under several names is allowed, and so are parts of one storage that do not overlap.

    Args:
        graph: the model's trace, for its constants.

    Raises:
        TraceError: names both tensors.
    """
    named = dict(model.named_parameters()) | dict(model.named_buffers()) | constants(model, graph)
    tensors = {id(tensor): (name, tensor) for name, tensor in named.items() if has_memory(tensor)}
    active: list[tuple[str, Tensor]] = []  # those that may reach beyond the current address
    for name, tensor in sorted(tensors.values(), key=lambda item: item[1].data_ptr()):
        active = [item for item in active if end(item[1]) > tensor.data_ptr()]
        for other_name, other in active:
            if (tensor.requires_grad or other.requires_grad) and overlap(other, tensor):
                one, two = (other_name, name) if other.requires_grad else (name, other_name)
                raise TraceError(
                    f"Cannot trace {type(model).__name__}: {one} {list(named[one].shape)} and {two} "
                    f"{list(named[two].shape)} share memory but are different tensors. Devices train copies of the "
                    f"weights, in which an update of {one} would not reach {two}. Use one tensor under both names, or "
                    f"leave {two} out and compute it in the forward from {one}; clone() it if it shall not follow."
                )
        active.append((name, tensor))


def constants(model: nn.Module, graph: Graph) -> dict[str, Tensor]:
    """Constants of a graph by name; plain attributes of the model are read from it, since a trace may copy a model."""
    found = dict(graph.constants)
    for name in found:
        try:
            value = operator.attrgetter(name)(model)
        except AttributeError:
            continue  # made in the forward
        if isinstance(value, Tensor):
            found[name] = value
    return found


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor has elements in memory; not so on the meta device."""
    strided = type(tensor.data) is Tensor and tensor.layout is torch.strided
    return strided and not tensor.is_meta and tensor.numel() > 0 and tensor.data_ptr() != 0


def end(tensor: Tensor) -> int:
    """The address after a tensor's last element."""
    return tensor.data_ptr() + (last_index(tensor) + 1) * tensor.element_size()


def last_index(tensor: Tensor) -> int:
    """Distance from a tensor's first element to its last in memory, in elements."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def overlap(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors share an element, given that the second begins within the first one's range."""
    distance, rest = divmod(two.data_ptr() - one.data_ptr(), one.element_size())
    if rest or one.element_size() != two.element_size():
        return True
    used = torch.zeros(max(last_index(one), distance + last_index(two)) + 1, dtype=torch.bool, device="cpu")
    used.as_strided(one.shape, one.stride()).fill_(True)
    return bool(used.as_strided(two.shape, two.stride(), distance).any())
