"""Messages between the caller and its worker processes: pickled structure, tensors as safetensors bytes."""

from __future__ import annotations

import pickle
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import torch
from safetensors.torch import load, save

from autopar.pytree import flatten, unflatten


class Slot:
    """Stands for a tensor in a pickled message."""

    def __init__(self, number: int) -> None:
        self.number = number


def send(connection: Connection, message: Any) -> None:
    """Send a nested structure; tensors in tuples, lists and dicts travel as raw bytes."""
    leaves, spec = flatten(message)
    tensors: dict[str, torch.Tensor] = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            tensors[str(i)] = leaf.detach().cpu().contiguous().clone()
            leaves[i] = Slot(i)
    connection.send_bytes(cloudpickle.dumps((leaves, spec)))
    connection.send_bytes(save(tensors))


def receive(connection: Connection) -> Any:
    """The next message. Raises EOFError or OSError when the other side is gone."""
    leaves, spec = pickle.loads(connection.recv_bytes())
    tensors = load(connection.recv_bytes())
    return unflatten([tensors[str(leaf.number)] if isinstance(leaf, Slot) else leaf for leaf in leaves], spec)
