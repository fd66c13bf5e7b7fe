"""Triton kernels of the operators, imported only on machines with Triton."""
