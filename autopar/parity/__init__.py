"""Proof that a plan computes what one device computes: the same steps twice, every tensor compared.

The reference is the unmodified model in this process. In mixed precision it runs under torch.autocast, and a second one
in float32 says how much rounding matters.
"""

from autopar.parity.compare import EPSILON, LEARNING_RATE, Parity, compare, default_loss
from autopar.parity.difference import ABSOLUTE, RELATIVE, SMALL_NORM, Row, compared, difference

__all__ = [
    "ABSOLUTE", "EPSILON", "LEARNING_RATE", "RELATIVE", "SMALL_NORM", "Parity", "Row", "compare", "compared",
    "default_loss", "difference",
]  # fmt: skip
