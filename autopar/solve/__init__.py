"""Chooses pipeline cuts and microbatches: an integer program inside a short search."""

from autopar.solve.constraints import Constraints
from autopar.solve.cuts import solve_cuts
from autopar.solve.problem import CutProblem, Cuts
from autopar.solve.search import search

__all__ = ["Constraints", "CutProblem", "Cuts", "search", "solve_cuts"]
