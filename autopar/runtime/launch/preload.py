"""Imports of a worker process, for the fork server; includes imports that torch does at the first use of a class."""

import torch

import autopar.runtime.launch.worker  # noqa: F401

# The first optimizer imports torch's compiler, which takes about a second.
torch.optim.SGD([torch.zeros((), device="cpu")])
