"""Chooses mesh, shardings, pipeline cuts and microbatches: integer programs inside a search with bounds."""

from autopar.solve.constraints import Constraints
from autopar.solve.cuts import solve_cuts
from autopar.solve.problem import Costs, CutProblem, Cuts, Priced
from autopar.solve.search import Refine, search
from autopar.solve.shardings import Shardings, pareto

__all__ = [
    "Constraints", "Costs", "CutProblem", "Cuts", "Priced", "Refine", "Shardings", "pareto", "search", "solve_cuts",
]  # fmt: skip
