"""Tensor-parallel shardings of all groups by integer program."""
