"""``autopar bench``: a plan run beside the ways in which people train without autopar, on the machine at hand."""

from autopar.bench.bubble import bubble_bound_seconds, bubble_share
from autopar.bench.calibration import Band, Calibration, Point, calibrated
from autopar.bench.contestants import CONTESTANTS
from autopar.bench.result import BenchResult, Pipeline, Row
from autopar.bench.run import Finished, Interrupted, Request, num_classes, run_bench
from autopar.bench.timeline import StepOnClock, early_arrivals, trace_events

__all__ = [
    "CONTESTANTS", "Band", "BenchResult", "Calibration", "Finished", "Interrupted", "Pipeline", "Point", "Request",
    "Row", "StepOnClock", "bubble_bound_seconds", "bubble_share", "calibrated", "early_arrivals", "num_classes",
    "run_bench", "trace_events",
]  # fmt: skip
