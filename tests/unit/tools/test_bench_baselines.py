"""Baselines of `autopar bench`: which take part, their variants, models taken apart, the memory limit."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.bench import KWARGS, TINY, request, tiny_plan
from timm import create_model
from torch import nn

from autopar.errors import UsageError
from autopar.ir.mesh import Mesh
from autopar.ir.plan_parts import Precision
from autopar.tools.bench.baselines.autopar import limit_memory
from autopar.tools.bench.baselines.dtensor import check_blocks
from autopar.tools.bench.baselines.pipelining import split_evenly
from autopar.tools.bench.baselines.registry import BASELINES, BenchContext, NotExpressible, choose
from autopar.tools.bench.parts import blocks, sequence
from autopar.tools.bench.run import run_bench


def test_the_memory_of_a_plan_is_what_its_gpus_give(monkeypatch: pytest.MonkeyPatch) -> None:
    total, reserved, shares = 80 * 2**30, 2 * 2**30, []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=total))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: shares.append(share))
    monkeypatch.setattr("autopar.tools.bench.baselines.autopar.reserved_bytes", lambda device: reserved)
    for num_bytes in (22 * 2**30, 2**30, 200 * 2**30):
        limit_memory(num_bytes, torch.device("cuda", 0))
    assert shares == [0.25, 0.0, 1.0]


@pytest.mark.parametrize(
    ("name", "kwargs", "side", "count", "block"),
    [
        (TINY.name, KWARGS, 32, 4, "Block"),
        (TINY.name, KWARGS | {"global_pool": "avg", "class_token": False}, 32, 4, "Block"),
        ("vit_small_patch16_dinov3", {"depth": 3, "img_size": 64, "embed_dim": 48, "num_heads": 3}, 64, 3, "EvaBlock"),
        ("resnet18", {}, 64, 8, "BasicBlock"),
    ],
)
def test_a_sequence_of_parts_is_the_model(name: str, kwargs: dict, side: int, count: int, block: str) -> None:
    torch.manual_seed(0)
    model = create_model(name, **kwargs).eval()
    found = blocks(model)
    assert (len(found), type(found[0]).__name__) == (count, block)
    parts = sequence(model)
    assert len(parts) == count + 2
    x = y = torch.randn(2, 3, side, side)
    for part in parts:
        y = part(y)
    assert torch.equal(y, model(x))
    held = [id(p) for part in parts for p in part.parameters()]
    assert len(held) == len(set(held)) and set(held) == {id(p) for p in model.parameters()}


def test_stages_have_equal_numbers_of_blocks() -> None:
    modules = [nn.Linear(1, 1) for _ in range(9)]
    stages = split_evenly(modules, 3)
    assert [len(stage) for stage in stages] == [3, 3, 3] and [m for stage in stages for m in stage] == modules
    with pytest.raises(NotExpressible, match="7 blocks do not fill 8 stages"):
        split_evenly(modules, 8)


def test_what_cannot_be_taken_apart_says_so() -> None:
    with pytest.raises(NotExpressible, match="there is no split of ConvNeXt into blocks"):
        sequence(create_model("convnext_atto"))
    with pytest.raises(NotExpressible, match=r"BasicBlock is no block with attn\.qkv"):
        check_blocks(blocks(create_model("resnet18")), 2)
    with pytest.raises(NotExpressible, match="3 ranks cannot share 4 heads"):
        check_blocks(blocks(create_model(TINY.name, **KWARGS)), 3)
    normed = create_model(TINY.name, **KWARGS, qk_norm=True)
    with pytest.raises(NotExpressible, match=r"more between qkv and the projection \(q_norm, k_norm\)"):
        check_blocks(blocks(normed), 2)


def field_of(
    mesh: Mesh, batch: int = 16, sizes: tuple[int, ...] | None = None, compile: bool = False, on_gpu: bool = False
) -> BenchContext:
    plan = replace(tiny_plan(), mesh=mesh, batch=batch)
    return BenchContext(plan, compile, on_gpu, sizes)


def test_baselines_depend_on_the_mesh() -> None:
    def names(mesh: Mesh, only: tuple[str, ...] = (), skip: tuple[str, ...] = ()) -> list[str]:
        return [c.name for c in choose(only, skip, field_of(mesh))]

    everywhere = ["plain", "single", "autopar"]
    others = ["ddp", "fsdp2", "1f1b", "interleaved"]
    assert names(Mesh(1)) == everywhere
    assert names(Mesh(1, 1, 2)) == [*everywhere, *others]
    assert names(Mesh(2)) == [*everywhere, "uniform", *others]
    assert names(Mesh(1, 2)) == [*everywhere, *others, "dtensor"]
    assert names(Mesh(2), ("fsdp2", "dtensor", "autopar"), ("autopar",)) == ["fsdp2", "dtensor"]


def test_ways_to_compile_are_chosen() -> None:
    compiled, eager = (field_of(Mesh(1, 1, 2), compile=compile, on_gpu=True) for compile in (True, False))
    plain, autopar, ddp = choose(("plain:whole", "plain:graphs", "ddp", "autopar"), (), compiled)
    assert (plain.name, autopar.name, ddp.name) == ("plain", "autopar", "ddp")
    assert [v.settings["compile"] for v in plain.variants(compiled)] == ["whole", "graphs"]
    assert [v.settings["compile"] for v in ddp.variants(compiled)] == ["blocks", "whole"]
    with pytest.raises(NotExpressible, match="this run does not compile it so: graphs, whole"):
        plain.variants(eager)


def test_variants() -> None:
    def labels(name: str, field: BenchContext) -> list[str]:
        return [variant.label for variant in BASELINES[name].variants(field) if variant.reason is None]

    assert labels("1f1b", field_of(Mesh(4), 512, compile=True)) == [
        "blocks compiled, microbatch 16", "blocks compiled, microbatch 32", "blocks compiled, microbatch 64",
    ]  # fmt: skip
    assert labels("1f1b", field_of(Mesh(2), 12, (2, 3, 5, 6, 12))) == ["microbatch 2", "microbatch 3", "microbatch 6"]
    assert labels("interleaved", field_of(Mesh(4), 48, (4, 8, 12))) == ["microbatch 4", "microbatch 12"]
    assert labels("dtensor", field_of(Mesh(2, 2))) == ["tp 2 × FSDP2 2"]
    assert labels("plain", field_of(Mesh(1))) == [""]
    whole = ["blocks compiled", "compiled as a whole"]
    assert labels("plain", field_of(Mesh(1), compile=True)) == whole
    one = replace(field_of(Mesh(1), compile=True, on_gpu=True), plan=replace(tiny_plan(), mesh=Mesh(1), microbatches=1))
    assert labels("plain", one) == [*whole, "compiled as a whole, CUDA graphs"]
    assert labels("plain", replace(one, plan=replace(one.plan, microbatches=2))) == whole
    with pytest.raises(NotExpressible, match="4 replicas cannot share a batch of 6 evenly"):
        labels("ddp", field_of(Mesh(4), 6))
    with pytest.raises(NotExpressible, match="one stage"):
        labels("uniform", field_of(Mesh(1, 1, 2)))


@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16", "bf16-params"])
def test_a_record_speaks_of_low_precision_where_it_was_used(precision: Precision) -> None:
    low = "bf16" in precision
    for name in ("plain", "ddp", "fsdp2", "1f1b"):
        about = BASELINES[name].about_in(precision)
        assert about.startswith(BASELINES[name].about) and bool(re.search("autocast|low-precision", about)) == low
    assert BASELINES["plain"].about_in("fp32") == "the plan's microbatches with accumulated gradients"


def test_sizes_that_were_asked_for_are_never_left_out() -> None:
    def reasons(name: str, field: BenchContext) -> dict[str, str | None]:
        return {variant.label: variant.reason for variant in BASELINES[name].variants(field)}

    assert reasons("1f1b", field_of(Mesh(4), 12, (2, 4))) == {
        "microbatch 2": None,
        "microbatch 4": "a batch of 12 in microbatches of 4 does not give equal microbatches, at least as many as the "
        "4 ranks; pass --microbatch-sizes 3",
    }
    assert reasons("interleaved", field_of(Mesh(2), 12, (4,)))["microbatch 4"] == (
        "a batch of 12 in microbatches of 4 does not give equal microbatches, a multiple of the 2 ranks; "
        "pass --microbatch-sizes 6"
    )
    with pytest.raises(NotExpressible, match="at least as many as the 4 ranks; use a batch of at least 4"):
        reasons("1f1b", field_of(Mesh(4), 2))
    with pytest.raises(NotExpressible, match="a multiple of the 2 ranks; use a batch that is a multiple of 2"):
        reasons("interleaved", field_of(Mesh(2), 3))
    with pytest.raises(UsageError, match="--skip plain,single,autopar leaves nothing to measure"):
        choose((), ("plain", "single", "autopar"), field_of(Mesh(1)))


def test_sizes_that_do_not_fit_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.tools.bench.run.run_baseline", None)  # nothing is started
    rows = run_bench(request(only=("interleaved",), microbatch_sizes=(3, 8))).result.rows
    assert [(row.label, row.best) for row in rows] == [("microbatch 3", True), ("microbatch 8", False)]
    assert all("does not give equal microbatches" in (row.reason or "") for row in rows)
