"""Proof that a plan computes what one device computes: the same steps twice, every tensor compared.

The reference is the unmodified model in this process. In mixed precision it runs under torch.autocast, and a second one
in float32 says how much rounding matters.
"""
