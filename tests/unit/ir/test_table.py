"""The printed plan, as text."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch

from autopar.ir.mesh import Mesh
from autopar.ir.microbatches import microbatches_text
from autopar.ir.plan import Plan
from autopar.ir.plan_parts import (
    Alternative,
    BlockSharding,
    Collective,
    HardwareInfo,
    InputInfo,
    ModelInfo,
    OtherMeshes,
    Prediction,
    SolverInfo,
    Stage,
    StepPart,
)
from autopar.ir.table import plan_text, stage_ends
from autopar.ir.text import wrapped
from autopar.ir.units import BYTES, COUNT, TIME, column, of_type, percent, plural, text

GIB = 2**30


def stage(first: str, last: str, rank: int, forward_ms: float, peak_gib: float, sends: int = 0) -> Stage:
    return Stage(first, last, (rank,), 76_500_000, forward_ms * 1e-3, 2e-3 * forward_ms, sends, int(peak_gib * GIB))


PLAN = Plan(
    model=ModelInfo("vit_x", "0123", 153_000_000, (InputInfo("x", (64, 3, 224, 224), "float32"),), {"depth": 6}),
    batch=64,
    mesh=Mesh(2),
    schedule="1f1b",
    microbatches=8,
    stages=(
        stage("patch_embed.proj.conv2d", "blocks.1.mlp.fc1.linear", 0, 4.0, 12.5, 3 * 2**20),
        stage("blocks.1.mlp.act.gelu", "head.linear", 1, 2.0, 1.25),
    ),
    prediction=Prediction(0.1234, 518.6, 0.1765, (int(12.5 * GIB), int(1.25 * GIB)), 0.3),
    solver=SolverInfo("HiGHS", "optimal", 0.0012, 0.25),
    hardware=HardwareInfo("test-box", "Test GPU", "wire", 16 * GIB),
    exceptions={"side.linear": 1},
    alternatives=(
        Alternative("4 microbatches", 0.1543),
        Alternative("uniform cuts", 0.1),
        Alternative("one device", 0.5),
        Alternative("1 microbatch", None, "does not fit: stage 0 needs 99.0 GiB"),
    ),
    bound_by="compute of stage 0",
)

PRINTED = """\
model       vit_x(depth=6), 153.0 M parameters
inputs      x float32[64, 3, 224, 224]
batch       64 in 8 microbatches of 8
devices     2 × Test GPU, 16.0 GiB each, over wire (cost model test-box)
mesh        pp 2 × tp 1 × dp 1, schedule 1f1b, fp32, bubble 17.6 %

stage  ranks  from … to                params  forward  backward  F █ B ░     peak memory     sends
───────────────────────────────────────────────────────────────────────────────────────────────────
    0      0  patch_embed.proj …       76.5 M  4.00 ms   8.00 ms  ███░░░░░  12.5 GiB 78 %  3.00 MiB
              blocks.1.mlp.fc1
    1      1  blocks.1.mlp.act … head  76.5 M  2.00 ms   4.00 ms  █░░░       1.2 GiB  8 %         –

step        123.4 ms ±30 %, 518.6 samples/s ±30 % (predicted)
bound by    compute of stage 0
solver      HiGHS: optimal, certified gap 0.12 %, 0.25 s
            no cuts of this mesh take less than 123.3 ms
exceptions  1 operation outside their range: side.linear on 1

rejected            step  against this plan
─────────────────────────────────────────────────────────────────────────────────
4 microbatches  154.3 ms      25.0 % slower
uniform cuts    100.0 ms      19.0 % faster
one device      500.0 ms      4.1 × as long
1 microbatch           –                  –  does not fit: stage 0 needs 99.0 GiB"""


def test_narrow_terminals_leave_out_columns_and_shorten_nothing() -> None:
    long = Alternative("1 microbatch", 0.2, "collectives 256.4 µs more, recomputation 1.30 ms")
    table = plan_text(replace(PLAN, alternatives=(long,)), 60).split("\n\n")
    titles, _, *rows = table[1].splitlines()
    assert titles.split() == ["stage", "ranks", "from", "…", "to", "forward", "backward", "peak", "memory"]
    assert "12.5 GiB 78 %" in table[1] and "patch_embed." in table[1]
    assert "collectives" in table[3] and "…" not in table[3]
    assert max(map(len, rows)) <= 60


def test_the_step_says_what_its_error_rests_on() -> None:
    parts = (
        StepPart("matmul bfloat16", 0.03, "steps"), StepPart("memory", 0.04, "steps"),
        StepPart("network", 0.3, "assumed"), StepPart("overlap", 0.001, "measured"),
    )  # fmt: skip
    printed = plan_text(replace(PLAN, prediction=replace(PLAN.prediction, parts=parts)), 140)
    line = (
        "rests on network ±30 % (assumed), compute ±5 % (measured steps); `autopar profile` under torchrun measures it"
    )
    assert f"\n            {line}\n" in printed
    printed = plan_text(replace(PLAN, prediction=replace(PLAN.prediction, parts=parts[:2])), 120)
    assert "\n            rests on compute ±5 % (measured steps)\n" in printed, "no command narrows that"


@pytest.mark.parametrize(("alone", "is_said"), [(0.1, True), (0.12338, False), (0.1234, False), (None, False)])
def test_a_plan_says_where_one_device_is_faster(alone: float | None, is_said: bool) -> None:
    others = tuple(a for a in PLAN.alternatives if a.label != "one device")
    printed = plan_text(replace(PLAN, alternatives=(*others, Alternative("one device", alone))))
    line = "\n            one device is predicted to be faster: 100.0 ms instead of 123.4 ms\n"
    assert (line in printed) == is_said == ("predicted to be" in printed)


@pytest.mark.parametrize(
    ("others", "line"),
    [
        (OtherMeshes(3, 0, 0.15), "3 other meshes: all proven slower, none takes less than 150.0 ms"),
        (
            OtherMeshes(1, 2, 0.1),
            "3 other meshes: 1 proven slower, 2 given up without proof, none takes less than 100.0 ms",
        ),
        (OtherMeshes(0, 1, None), "1 other mesh: 1 given up without proof"),
    ],
)
def test_what_is_proven_of_other_meshes(others: OtherMeshes, line: str) -> None:
    for mesh in (PLAN.mesh, Mesh(1)):
        printed = plan_text(replace(PLAN, mesh=mesh, solver=replace(PLAN.solver, other_meshes=others)), 120)
        assert f"\n            {line}\n" in printed


def test_stages_that_recompute_say_how_many_segments() -> None:
    first, second = PLAN.stages
    stages = (replace(first, recompute=12, num_segments=40), replace(second, recompute="all", num_segments=40))
    rows = [line for line in plan_text(replace(PLAN, stages=stages), 120).splitlines() if "GiB" in line][1:3]
    assert "  12 of 40  " in rows[0] and "       all  " in rows[1]
    by_hand = (replace(first, recompute=12), second)
    rows = [line for line in plan_text(replace(PLAN, stages=by_hand), 120).splitlines() if "GiB" in line][1:3]
    assert "  first 12  " in rows[0] and "      none  " in rows[1]


def all_reduce(op: str, direction: Literal["forward", "backward"]) -> Collective:
    return Collective(op, "all-reduce", direction, int(38.5 * 2**20), 3.1e-5)


SHARDED = replace(
    PLAN,
    mesh=Mesh(2, 2, 4),
    zero=1,
    stages=tuple(
        replace(s, ranks=tuple(range(8 * i, 8 * i + 8)), collective_seconds=1.1185e-3)
        for i, s in enumerate(PLAN.stages)
    ),
    prediction=replace(PLAN.prediction, reduce_seconds=0.009, optimizer_seconds=0.0041),
    solver=replace(PLAN.solver, method="shardings then cuts"),
    exceptions={},
    blocks=(
        BlockSharding(
            "blocks.*",
            24,
            {"attn.q": "rows by head / 2", "attn.k": "rows by head / 2", "attn.proj": "columns / 2 → all-reduce"},
            (all_reduce("a", "forward"), all_reduce("b", "forward"), all_reduce("c", "backward")),
        ),
        BlockSharding("head", 1, {"head": "rows / 2"}, (Collective("h", "all-gather", "forward", 2**20, 5e-6),)),
    ),
    alternatives=(
        Alternative("pp 4 × tp 2 × dp 2, m 16, ZeRO-1", 0.15, "bubble 43 %"),
        Alternative("pp 1 × tp 16 × dp 1", None, "groups of 16 ranks cross nodes of 8 devices"),
    ),
)

PRINTED_SHARDED = """\
batch       64 in 8 microbatches of 2 on each of 4 replicas
devices     16 × Test GPU, 16.0 GiB each, over wire (cost model test-box)
mesh        pp 2 × tp 2 × dp 4, ZeRO-1, schedule 1f1b, fp32, bubble 17.6 %

stage  ranks  from … to                params  forward  backward  F █ B ░     peak memory     sends
───────────────────────────────────────────────────────────────────────────────────────────────────
    0    0–7  patch_embed.proj …       76.5 M  4.00 ms   8.00 ms  ███░░░░░  12.5 GiB 78 %  3.00 MiB
              blocks.1.mlp.fc1
    1   8–15  blocks.1.mlp.act … head  76.5 M  2.00 ms   4.00 ms  █░░░       1.2 GiB  8 %         –

sharded        module          over 2 ranks
───────────────────────────────────────────────────────
24 × blocks.*  attn.q, attn.k  rows by head / 2
               attn.proj       columns / 2 → all-reduce
head           head            rows / 2

collectives    direction  of one block and microbatch             time
──────────────────────────────────────────────────────────────────────
24 × blocks.*  forward    2 × all-reduce of 38.5 MiB           62.0 µs
               backward   all-reduce of 38.5 MiB               31.0 µs
head           forward    all-gather of 1.00 MiB               5.00 µs
all                       of one microbatch, 12 % of its time  2.24 ms

step        123.4 ms ±30 %, 518.6 samples/s ±30 % (predicted)
            pipeline 110.3 ms + reduction 9.00 ms + optimizer 4.10 ms
bound by    compute of stage 0
solver      HiGHS: optimal, certified gap 0.12 %, 0.25 s
            no shardings and cuts of this mesh take less than 123.3 ms

rejected                              step  against this plan
────────────────────────────────────────────────────────────────────────────────────────────────────
pp 4 × tp 2 × dp 2, m 16, ZeRO-1  150.0 ms      21.6 % slower  bubble 43 %
pp 1 × tp 16 × dp 1                      –                  –  groups of 16 ranks cross nodes of 8
                                                               devices"""


def test_a_sharded_plan_prints_its_blocks_and_collectives():
    printed = plan_text(SHARDED)
    assert printed[printed.index("batch ") :] == PRINTED_SHARDED


def test_without_a_bound_over_shardings_that_of_their_cuts_is_printed() -> None:
    assert "no cuts of these shardings take less than" in plan_text(
        replace(SHARDED, solver=replace(SHARDED.solver, method="cuts"))
    )
    whole = replace(SHARDED, mesh=Mesh(1, 2, 8), solver=replace(SHARDED.solver, method="cuts"))
    assert "take less than" not in plan_text(whole)


def test_what_of_collectives_is_hidden_is_said():
    stages = tuple(replace(s, collective_seconds=0.4e-3) for s in SHARDED.stages)
    (line,) = [line for line in plan_text(replace(SHARDED, stages=stages), 120).splitlines() if line.startswith("all ")]
    assert " ".join(line.split()) == "all of one microbatch; 1.44 ms overlaps matmuls, the rest 4 % of its time 2.24 ms"


@pytest.mark.parametrize("width", [80, 100])
def test_a_sharded_plan_fits_the_terminal(width):
    printed = plan_text(SHARDED, width).splitlines()
    assert max(map(len, printed)) <= width
    assert any("█" in line for line in printed) == (width == 100)


def test_blocks_that_are_split_alike_are_one_whatever_their_collectives():
    rows = {"mlp.fc1": "rows / 2"}
    blocks = (
        BlockSharding("layers.0.blocks.0", 1, rows, (all_reduce("a", "forward"),)),
        BlockSharding("layers.0.blocks.1", 1, {"mlp.fc1": "tokens / 2"}, ()),
        BlockSharding("layers.0.blocks.*", 4, rows, (all_reduce("a", "backward"),)),
        BlockSharding("layers.1.blocks.*", 2, rows, ()),
        BlockSharding("head", 1, {}, (all_reduce("b", "forward"),)),
    )
    printed = str(replace(SHARDED, blocks=blocks))
    table = printed[printed.index("sharded") : printed.index("collectives")].rstrip()
    assert [" ".join(line.split()) for line in table.splitlines()[2:]] == [
        "5 × layers.0.blocks.* mlp.fc1 rows / 2",
        "layers.0.blocks.1 mlp.fc1 tokens / 2",
        "2 × layers.1.blocks.* mlp.fc1 rows / 2",
    ]


def test_plan_prints_all_of_it():
    assert plan_text(PLAN) == PRINTED
    assert str(PLAN) == PRINTED


@pytest.mark.parametrize("width", [80, 100, 120])
def test_no_line_is_longer_than_the_terminal(width):
    assert max(map(len, plan_text(PLAN, width).splitlines())) <= width


def test_color_only_adds_escape_codes():
    colored = plan_text(PLAN, color=True)
    assert "\x1b[" in colored
    assert "\x1b[" not in plan_text(PLAN)


def test_a_cut_inside_a_module_is_shown_by_its_operations():
    stages = (stage("a.conv", "b.1.add", 0, 1, 1), stage("b.1.norm.layer_norm", "add_3", 1, 1, 1))
    assert stage_ends(stages) == [("a", "b.1.add"), ("b.1.norm", "add_3")]
    stages = (stage("a.conv", "b.mul", 0, 1, 1), stage("b.mul_1", "c.linear", 1, 1, 1))
    assert stage_ends(stages) == [("a", "b.mul"), ("b.mul_1", "c")]


@pytest.mark.parametrize(
    ("batch", "microbatches", "printed"),
    [
        (64, 16, "16 microbatches of 4"),
        (7, 4, "3 microbatches of 2 and 1 of 1"),
        (5, 1, "1 microbatch of 5"),
        (9, 4, "3 microbatches of 3"),
    ],
)
def test_microbatches_are_those_that_chunk_makes(batch, microbatches, printed):
    assert microbatches_text(batch, microbatches) == printed


def test_long_paths_break_after_dots():
    assert wrapped("features.block1.relu … head", 16) == "features.block1.\nrelu … head"
    assert wrapped("blocks.6.norm1 … blocks.11", 23) == "blocks.6.norm1 …\nblocks.11"
    assert wrapped("blocks.6 … blocks.11", 20) == "blocks.6 … blocks.11"
    assert wrapped("averyveryverylongname", 8) == "averyveryverylongname"


def test_plan_without_alternatives_ends_with_the_solver():
    assert plan_text(replace(PLAN, alternatives=(), exceptions={})).splitlines()[-2].startswith("solver")


@pytest.mark.parametrize(
    ("value", "scale", "printed"),
    [
        (0.00331, TIME, "3.31 ms"),
        (0.1713, TIME, "171.3 ms"),
        (12.0, TIME, "12.0 s"),
        (4.2e-5, TIME, "42.0 µs"),
        (0.0, TIME, "0.00 µs"),
        (2508576256, BYTES, "2.34 GiB"),
        (512, BYTES, "512 B"),
        (304_326_632, COUNT, "304.3 M"),
        (10, COUNT, "10"),
    ],
)
def test_one_value_in_its_unit(value, scale, printed):
    assert text(value, scale) == printed


def test_a_column_has_one_unit():
    assert column([0.0005, 0.02], TIME) == ["0.5 ms", "20.0 ms"]
    assert column([], TIME) == []


def test_a_type_has_its_article():
    assert [of_type(thing) for thing in (3, "x", torch.ones(1), {}, object())] == [
        "an int", "a str", "a Tensor", "a dict", "an object",
    ]  # fmt: skip


def test_percent_and_plural():
    assert [percent(0.1656), percent(0.02, 0), plural(1, "stage"), plural(2, "batch", "es")] == [
        "16.6 %", "2 %", "1 stage", "2 batches",
    ]  # fmt: skip
