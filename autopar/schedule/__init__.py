"""Pipeline schedules as data: actions and their text, generators, the checker, the simulator."""

from autopar.schedule.actions import Action, Kind, Schedule, format_grid, format_schedule, parse_schedule
from autopar.schedule.check import check, check_rendezvous
from autopar.schedule.generate import RECIPES, Recipe, generate, kept_at_once, max_in_flight, may_overlap
from autopar.schedule.replay import replayed_seconds, scheduled_seconds
from autopar.schedule.simulate import one_f_one_b_seconds, simulate
from autopar.schedule.timeline import Span, Timeline
from autopar.schedule.wavefront import pipeline_seconds

__all__ = [
    "RECIPES", "Action", "Kind", "Recipe", "Schedule", "Span", "Timeline", "check", "check_rendezvous", "format_grid",
    "format_schedule", "generate", "kept_at_once", "max_in_flight", "may_overlap", "one_f_one_b_seconds",
    "parse_schedule", "pipeline_seconds", "replayed_seconds", "scheduled_seconds", "simulate",
]  # fmt: skip
