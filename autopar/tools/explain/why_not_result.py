"""Answer to a "why not", without the planner that finds it."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.plan import Plan
from autopar.tools.explain.breakdown import Breakdown


@dataclass(frozen=True)
class WhyNotResult:
    """The best plan under a constraint and its breakdown; both None if no plan satisfies the constraint.

    ``text`` compares that plan with the file's, or explains why there is none. ``command`` makes that plan; it is set
    only if that plan is faster.
    """

    asked: str
    text: str
    plan: Plan | None = None
    breakdown: Breakdown | None = None
    command: str = ""
