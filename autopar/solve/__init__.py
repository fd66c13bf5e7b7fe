"""Chooses mesh, shardings, pipeline cuts and microbatches: integer programs inside a search with bounds."""

from autopar.solve.assemble import Decision
from autopar.solve.candidates import Candidate
from autopar.solve.constraints import Constraints
from autopar.solve.cuts import solve_cuts
from autopar.solve.joint import Joint, solve_joint
from autopar.solve.joint_problem import Assignment, JointProblem, joint_seconds, stage_loads
from autopar.solve.problem import Costs, CutProblem, Cuts, Priced
from autopar.solve.search import Refine, Refined, search
from autopar.solve.shardings import Shardings, lower_bound_seconds, pareto, solve_shardings, work_bound_seconds

__all__ = [
    "Assignment", "Candidate", "Constraints", "Costs", "CutProblem", "Cuts", "Decision", "Joint", "JointProblem",
    "Priced", "Refine", "Refined", "Shardings", "joint_seconds", "lower_bound_seconds", "pareto", "search",
    "solve_cuts", "solve_joint", "solve_shardings", "stage_loads", "work_bound_seconds",
]  # fmt: skip
