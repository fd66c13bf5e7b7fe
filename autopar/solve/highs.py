"""HiGHS through PuLP without a word on standard output. Importing this needs highspy."""

from __future__ import annotations

import highspy
import pulp


class SilentModel(highspy.Highs):
    """A HiGHS model that is silent before its constructor returns.

    HiGHS 1.16.0 writes its banner when callbacks are enabled, which the constructor does: earlier than PuLP says that
    it wants no output. Tried with 1.7.2, 1.15.1 and 1.16.0.
    """

    def enableCallbacks(self) -> None:
        self.silent()
        super().enableCallbacks()


class SilentHiGHS(pulp.HiGHS):
    """PuLP's HiGHS with ``SilentModel`` for its model.

    Args:
        gap: relative gap between the solution and its bound at which the solver stops.
        time_limit_seconds: wall time after which it stops with the best solution it has.
    """

    def __init__(self, gap: float, time_limit_seconds: float) -> None:
        super().__init__(msg=False)
        self.options_of_model = {"mip_rel_gap": gap, "time_limit": float(time_limit_seconds)}

    def createAndConfigureSolver(self, lp: pulp.LpProblem) -> None:
        model = SilentModel()
        model.silent()  # where the constructor enables no callbacks
        for name, value in self.options_of_model.items():
            model.setOptionValue(name, value)
        lp.solverModel = model  # pyright: ignore[reportAttributeAccessIssue]  # PuLP declares it as None
