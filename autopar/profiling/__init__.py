"""``autopar profile``: measures the machine at hand into a cost-model file."""

from autopar.profiling.carried import Carried, carried
from autopar.profiling.cases import KINDS, Case, cases
from autopar.profiling.fit import Constant, fit
from autopar.profiling.kept import Kept, keep, kept_points
from autopar.profiling.measure import measure
from autopar.profiling.points import STEADY_SPREAD, Part, Point, Setting
from autopar.profiling.setting import this_setting
from autopar.profiling.toml import Raw, cost_model_text, raw_points, refit, value_text

__all__ = [
    "KINDS", "STEADY_SPREAD", "Carried", "Case", "Constant", "Kept", "Part", "Point", "Raw", "Setting", "carried",
    "cases", "cost_model_text", "fit", "keep", "kept_points", "measure", "raw_points", "refit", "this_setting",
    "value_text",
]  # fmt: skip
