"""Torch operators that graphs may name (``torch.ops.autopar``), and the registry of all that they may."""
