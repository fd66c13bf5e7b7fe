"""Imports of a worker process for the fork server, those that torch does at the first use of a class included."""

import torch

import autopar.runtime.launch.worker  # noqa: F401

torch.optim.SGD([torch.zeros(())])  # a first optimizer imports torch's compiler, which takes about a second
