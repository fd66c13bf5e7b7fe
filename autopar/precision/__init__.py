"""Mixed precision: the graph that computes in another precision than its weights are stored in."""

from autopar.precision.choose import check_device, in_precision, mixed_dtype, own_precision
from autopar.precision.policy import POLICY
from autopar.precision.rewrite import autocast

__all__ = ["POLICY", "autocast", "check_device", "in_precision", "mixed_dtype", "own_precision"]
