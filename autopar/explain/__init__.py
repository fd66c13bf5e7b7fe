"""Why a plan is as fast as it is, why not another one, and what is different between two."""

from autopar.explain.breakdown import Breakdown, Pipeline, Position, breakdown_of
from autopar.explain.difference import Change, Difference, difference
from autopar.explain.memory import PositionMemory
from autopar.explain.reading import Explanation, Help, explained
from autopar.explain.why_not import Answer, Question, Rebuilt, answers, plan_hardware

__all__ = [
    "Answer", "Breakdown", "Change", "Difference", "Explanation", "Help", "Pipeline", "Position",
    "PositionMemory", "Question", "Rebuilt", "answers", "breakdown_of", "difference", "explained", "plan_hardware",
]  # fmt: skip
