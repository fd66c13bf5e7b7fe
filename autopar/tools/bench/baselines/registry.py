"""Baselines of a bench, autopar among them: names, descriptions, and variants. The fastest variant counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.errors import UsageError, suggest
from autopar.ir.plan import Plan
from autopar.ir.plan_parts import Precision

MICROBATCH_SIZES = (16, 32, 64)  # tried with torch.distributed.pipelining if they fit the batch
INTERLEAVED_CHUNKS = 2
# The dtype of autocast and of FSDP2's weights. In bf16-params the plain loop and DDP use autocast, as usual.
LOW_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "bf16-params": torch.bfloat16}


class NotExpressible(Exception):
    """A baseline cannot run this model, batch or precision; the message says why."""


@dataclass(frozen=True)
class BaselineVariant:
    """One way of running a baseline.

    Args:
        label: distinguishes it in tables; may be empty.
        settings: for the builder in `autopar.tools.bench.worker`.
        reason: why it cannot be run; None if it can.
    """

    label: str
    settings: Mapping[str, Any]
    reason: str | None = None


@dataclass(frozen=True)
class BenchContext:
    """The plan and the flags on which variants depend.

    Args:
        microbatch_sizes: of --microbatch-sizes; None for the default ones.
    """

    plan: Plan
    compile: bool
    on_gpu: bool
    microbatch_sizes: Sequence[int] | None

    @property
    def devices(self) -> int:
        return self.plan.mesh.devices


@dataclass(frozen=True)
class Baseline:
    """A way of training that a bench times: autopar itself, or one of those that it is compared with.

    Args:
        title: its name in tables.
        about: description that holds in any precision.
        variants: its variants; raises NotExpressible if there are none.
        single: whether it runs on one device.
        planned: whether it runs a plan, and so has a bubble bound and measured actions.
        sized: whether its variants are sizes of microbatches.
        by_default: whether it takes part without --only.
        mixed: description that is added in mixed precision.
    """

    name: str
    title: str
    about: str
    variants: Callable[[BenchContext], Sequence[BaselineVariant]]
    single: bool = False
    planned: bool = False
    sized: bool = False
    by_default: Callable[[BenchContext], bool] = lambda context: True
    mixed: str = ""

    def about_in(self, precision: Precision) -> str:
        """The description in a precision, for the record."""
        return f"{self.about}, {self.mixed}" if self.mixed and precision in LOW_DTYPES else self.about


def single_variant(context: BenchContext) -> Sequence[BaselineVariant]:
    return [BaselineVariant("", {})]


def plain_variants(context: BenchContext) -> Sequence[BaselineVariant]:
    settings = {"replicas": context.plan.mesh.dp, "microbatches": context.plan.microbatches}
    if not context.compile:
        return [BaselineVariant("", settings | {"compile": "none"})]
    several = context.plan.mesh.dp * context.plan.microbatches > 1
    reason = "a graph's gradients are overwritten by the next microbatch's" if several else None
    graphs = [BaselineVariant("compiled as a whole, CUDA graphs", settings | {"compile": "graphs"}, reason)]
    return [
        BaselineVariant("blocks compiled", settings | {"compile": "blocks"}),
        BaselineVariant("compiled as a whole", settings | {"compile": "whole"}),
        *(graphs if context.on_gpu else []),
    ]


def uniform_variants(context: BenchContext) -> Sequence[BaselineVariant]:
    if context.plan.mesh.pp == 1:
        raise NotExpressible("the plan has one stage, so there is nothing to cut")
    return [BaselineVariant("", {})]


def ddp_variants(context: BenchContext) -> Sequence[BaselineVariant]:
    check_shares(context)
    if not context.compile:
        return [BaselineVariant("", {"compile": "none"})]
    return [
        BaselineVariant("blocks compiled, static graph", {"compile": "blocks"}),
        BaselineVariant("compiled as a whole", {"compile": "whole"}),
    ]


def fsdp2_variants(context: BenchContext) -> Sequence[BaselineVariant]:
    check_shares(context)
    blocks = "blocks compiled, " if context.compile else ""
    return [
        BaselineVariant(f"{blocks}weights kept for the backward", {"reshard": False}),
        BaselineVariant(f"{blocks}weights gathered again", {"reshard": True}),
    ]


def check_shares(context: BenchContext) -> None:
    if context.plan.batch % context.devices:
        raise NotExpressible(f"{context.devices} replicas cannot share a batch of {context.plan.batch} evenly")


def pipelining_variants(chunks: int) -> Callable[[BenchContext], Sequence[BaselineVariant]]:
    """Variants of torch.distributed.pipelining, one for each microbatch size.

    Default sizes that do not fit the batch are left out. A size of --microbatch-sizes that does not fit is a variant
    with a reason.
    """

    def sized_variants(context: BenchContext) -> Sequence[BaselineVariant]:
        batch, pp = context.plan.batch, context.devices
        if pp == 1:
            raise NotExpressible("one device is no pipeline")
        default_sizes = sorted({*MICROBATCH_SIZES, max(1, batch // (2 * pp))})
        sizes = context.microbatch_sizes or [s for s in default_sizes if fits(s, batch, pp, chunks)]
        if not sizes:
            raise NotExpressible(misfit(default_sizes, batch, pp, chunks))
        compiled = "blocks compiled, " if context.compile else ""
        return [
            BaselineVariant(
                f"{compiled}microbatch {s}",
                {"microbatch_size": s, "chunks": chunks},
                None if fits(s, batch, pp, chunks) else misfit([s], batch, pp, chunks),
            )
            for s in sizes
        ]

    return sized_variants


def fits(size: int, batch: int, pp: int, chunks: int) -> bool:
    """Whether the batch divides into at least ``pp`` equal microbatches; interleaved into a multiple of ``pp``."""
    return batch % size == 0 and batch // size >= pp and (chunks == 1 or batch // size % pp == 0)


def misfit(sizes: Sequence[int], batch: int, pp: int, chunks: int) -> str:
    """Why none of these sizes fits, and which size or batch would."""
    kind = "a multiple of" if chunks > 1 else "at least as many as"
    fitting = [s for s in range(1, batch // pp + 1) if fits(s, batch, pp, chunks)]
    if fitting:
        remedy = f"pass --microbatch-sizes {fitting[-1]}"
    else:
        remedy = f"use a batch {'of at least' if batch < pp else 'that is a multiple of'} {pp}"
    return (
        f"a batch of {batch} in microbatches of {', '.join(map(str, sizes))} does not give equal microbatches, "
        f"{kind} the {pp} ranks; {remedy}"
    )


def dtensor_variants(context: BenchContext) -> Sequence[BaselineVariant]:
    tp = tp_ranks(context)
    if tp == 1:
        raise NotExpressible("one device shares no operation")
    rest = context.devices // tp
    if context.plan.batch % rest:
        raise NotExpressible(f"{rest} replicas cannot share a batch of {context.plan.batch} evenly")
    compiled = "blocks compiled, " if context.compile else ""
    return [BaselineVariant(f"{compiled}tp {tp}" + (f" × FSDP2 {rest}" if rest > 1 else ""), {})]


def tp_ranks(context: BenchContext) -> int:
    """Ranks of a tensor-parallel group: the plan's, or all devices if the plan has no tensor parallelism."""
    return context.plan.mesh.tp if context.plan.mesh.tp > 1 else context.devices


def multi_device(context: BenchContext) -> bool:
    return context.devices > 1


BASELINES: Mapping[str, Baseline] = {
    b.name: b
    for b in (
        Baseline(
            "plain", "plain PyTorch loop, one device",
            "the plan's microbatches with accumulated gradients", plain_variants, single=True, mixed="autocast",
        ),
        Baseline("single", "autopar, one device", "the same microbatches", single_variant, single=True, planned=True),
        Baseline("autopar", "autopar", "the plan", single_variant, planned=True),
        Baseline(
            "uniform", "autopar, uniform cuts", "the plan's mesh and microbatches, equally many operations per stage",
            uniform_variants, planned=True, by_default=lambda context: context.plan.mesh.pp > 1,
        ),
        Baseline(
            "ddp", "DDP", "gradient_as_bucket_view, one microbatch a replica", ddp_variants, by_default=multi_device,
            mixed="autocast",
        ),
        Baseline(
            "fsdp2", "FSDP2", "fully_shard per block", fsdp2_variants, by_default=multi_device,
            mixed="low-precision weights (autocast instead where there is batch norm), gradients summed in float32",
        ),
        Baseline(
            "1f1b", "pipelining 1F1B", "torch.distributed.pipelining, equal numbers of blocks, its best microbatch",
            pipelining_variants(1), sized=True, by_default=multi_device, mixed="autocast, low-precision transfers",
        ),
        Baseline(
            "interleaved", "pipelining interleaved", f"the same, {INTERLEAVED_CHUNKS} stages a rank",
            pipelining_variants(INTERLEAVED_CHUNKS), sized=True, by_default=multi_device,
        ),
        Baseline(
            "dtensor", "DTensor", "parallelize_module: column and row splits of attention and MLP",
            dtensor_variants, by_default=lambda context: context.plan.mesh.tp > 1,
        ),
    )
}  # fmt: skip


# How torch.compile may be used in a baseline; their variants differ in nothing else.
WAYS: Mapping[str, Sequence[str]] = {"plain": ("blocks", "whole", "graphs"), "ddp": ("blocks", "whole")}


def choose(only: Sequence[str], skip: Sequence[str], context: BenchContext) -> list[Baseline]:
    """The baselines that take part, in order; some only as far as torch.compile is used in a given way.

    Raises:
        UsageError: there are none, or --microbatch-sizes was given and none of them has microbatch sizes.
    """
    ways = ways_by_name(only)
    baselines = [
        in_ways(b, ways.get(b.name, frozenset()))
        for b in BASELINES.values()
        if (b.name in ways if only else b.by_default(context)) and b.name not in skip
    ]
    if not baselines:
        raise nothing_left(only, skip)
    if context.microbatch_sizes and not any(b.sized for b in baselines):
        names = " or ".join(b.name for b in BASELINES.values() if b.sized)
        raise UsageError(f"--microbatch-sizes is for {names}, and neither takes part: leave it out.")
    return baselines


def ways_by_name(only: Sequence[str]) -> Mapping[str, frozenset[str]]:
    """Ways of torch.compile by name of baseline, from names such as ``plain:whole``; empty if a name has none."""
    pairs = [(name, way) for name, _, way in (entry.partition(":") for entry in only)]
    return {name: frozenset(way for other, way in pairs if other == name and way) for name, _ in pairs}


def in_ways(baseline: Baseline, ways: frozenset[str]) -> Baseline:
    """The baseline with the variants that use torch.compile in one of the given ways; all of them if none is given."""
    if not ways:
        return baseline

    def variants(context: BenchContext) -> Sequence[BaselineVariant]:
        found = [v for v in baseline.variants(context) if v.settings["compile"] in ways]
        if not found:
            raise NotExpressible(f"this run does not compile it so: {', '.join(sorted(ways))}")
        return found

    return replace(baseline, variants=variants)


def check_names(only: Sequence[str], skip: Sequence[str]) -> None:
    """Check the names of --only and --skip.

    Raises:
        UsageError: a name is unknown, or no baseline would be left.
    """
    for flag, names in (("--only", only), ("--skip", skip)):
        for entry in names:
            name, colon, way = entry.partition(":")
            if name not in BASELINES:
                hint = suggest(name, BASELINES)
                raise UsageError(f"{flag} {name}: there is no such baseline.{hint} Known: {', '.join(BASELINES)}.")
            if colon and (flag == "--skip" or way not in WAYS.get(name, ())):
                known = ", ".join(f"{name}:{way}" for name, ways in WAYS.items() for way in ways)
                raise UsageError(f"{flag} {entry}: there is no such variant. --only takes {known}.")
    if not set(ways_by_name(only) if only else BASELINES) - set(skip):
        raise nothing_left(only, skip)


def nothing_left(only: Sequence[str], skip: Sequence[str]) -> UsageError:
    flags = [f"{flag} {','.join(names)}" for flag, names in (("--only", only), ("--skip", skip)) if names]
    return UsageError(f"{' '.join(flags)} leaves nothing to measure.")
