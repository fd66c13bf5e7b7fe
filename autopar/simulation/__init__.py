"""A planned training step played through: who runs what when, and what lies in memory, from the plan alone."""

from autopar.simulation.memory import MemoryCurve, memory_curve
from autopar.simulation.step import Position, SimulatedStep, Transfer, schedules_of, simulate_plan
from autopar.simulation.timeline import trace_events

__all__ = [
    "MemoryCurve", "Position", "SimulatedStep", "Transfer", "memory_curve", "schedules_of", "simulate_plan",
    "trace_events",
]  # fmt: skip
