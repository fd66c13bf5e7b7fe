"""Mixed precision: the graph that computes in another precision than its weights are stored in."""

from autopar.precision.choose import check_device, in_precision, low_params, mixed_dtype, own_precision
from autopar.precision.params import check_dtypes, lowered_leaf, params_to_lower, with_low_params, with_masters
from autopar.precision.policy import POLICY
from autopar.precision.rewrite import autocast

__all__ = [
    "POLICY", "autocast", "check_device", "check_dtypes", "in_precision", "low_params", "lowered_leaf", "mixed_dtype",
    "own_precision", "params_to_lower", "with_low_params", "with_masters",
]  # fmt: skip
