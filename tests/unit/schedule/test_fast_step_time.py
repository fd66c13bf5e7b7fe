"""Step time by fronts, compared with the simulated step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import examples

from autopar.ir.placement import Placement
from autopar.schedule.fast_step_time import pipeline_seconds
from autopar.schedule.generate import generate
from autopar.schedule.simulate import simulate

SECONDS = st.sampled_from([0.0, 1.0, 2.0, 3.5, 10.0])


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[float], list[float], dict[tuple[int, int], float], list[float]]:
    stages, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 14))
    forward, backward = (draw(st.lists(SECONDS, min_size=stages, max_size=stages)) for _ in "FB")
    transfers = {}
    for src in range(stages):
        for dst in range(src + 1, stages):
            if draw(st.integers(0, 2)) or dst == src + 1:
                transfers[src, dst] = draw(SECONDS)
                if draw(st.booleans()):
                    transfers[dst, src] = draw(SECONDS)
    return forward, backward, transfers, [1.0] * (microbatches - 1) + [draw(st.sampled_from([1.0, 0.25]))]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@given(pipeline=pipelines())
@settings(max_examples=examples(300))
def test_fronts_take_what_the_simulation_takes(
    schedule: str, pipeline: tuple[list[float], list[float], dict[tuple[int, int], float], list[float]]
) -> None:
    forward, backward, transfers, sizes = pipeline
    simulated = simulate(generate(schedule, Placement(len(forward)), len(sizes)), forward, backward, transfers, sizes)
    found = pipeline_seconds(schedule, forward, backward, transfers, sizes)
    assert found == pytest.approx(simulated.step_seconds, rel=1e-12)


def test_many_microbatches_in_closed_form() -> None:
    assert pipeline_seconds("1f1b", [1.0] * 16, [2.0] * 16, {}, [1.0] * 1024) == pytest.approx(3.0 * (1024 + 15))
