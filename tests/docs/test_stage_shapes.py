"""docs/stage_shapes.md has the tables of docs/stage_shapes/rows.json, whose steps agree with the planner's."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.shaped_pipelines import ShapeSearch
from support.stage_shapes import Question, check_text, free_table, saved_rows, shaped, table

from autopar.ir.plan_parts import Replicas
from autopar.solve.space.candidates import evaluate
from autopar.solve.space.lower_bounds import LowerBounds
from autopar.solve.space.points import Pipeline, Point

TEXT = (Path(__file__).parents[2] / "docs" / "stage_shapes.md").read_text()


def test_the_page_has_the_saved_rows() -> None:
    rows = saved_rows()
    assert "\n".join(table(rows)) in TEXT and "\n".join(free_table(rows)) in TEXT and check_text(rows) in TEXT


def test_uniform_pipelines_have_the_planners_step() -> None:
    setting = Question.of("fastvit_t12", "rtx4090-pcie").setting(8, 8)
    search = ShapeSearch(setting, has_messages=True)
    points = [
        Point(2, 1, Replicas(4, 1), 2, Pipeline("interleaved", 2)),
        Point(4, 1, Replicas(2), 4, Pipeline("zb-h1")),
    ]
    for point in points:
        candidate = evaluate(setting, LowerBounds(setting), point, float("inf"))
        assert candidate is not None
        pipeline = shaped(candidate, search)
        assert pipeline is not None
        zero = point.replicas.zero
        assert search.step_seconds(pipeline, zero=zero) == pytest.approx(candidate.seconds, rel=1e-9)
