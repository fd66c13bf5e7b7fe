"""Invariants of a plan that the types of its fields cannot express: one function per group of fields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from math import prod

from autopar.errors import PlanError
from autopar.ir.layout import Layout
from autopar.ir.plan_parts import FIXED_CHUNKS, INTERLEAVED, SPLIT, PlanView, schedules_with
from autopar.ir.units import plural

NO_SPLIT_ZERO = "From ZeRO-2 on gradients are reduced after every backward: use zero=1, or another schedule."
FEWER_SEGMENTS = 'Use fewer, or "all".'  # remedy where a stage recomputes too many
Fail = Callable[[str, str], None]  # raises a PlanError that names a field and its problem


def check_invariants(plan: PlanView, where: str) -> None:
    """Check every field of a plan against the others; ``where`` names the plan in errors.

    Raises:
        PlanError: an invariant is broken; names the field.
    """

    def fail(name: str, problem: str) -> None:
        raise PlanError(f"{where}: field {name}: {problem}")

    for check in CHECKS:
        check(plan, fail)


def check_counts(plan: PlanView, fail: Fail) -> None:
    """Sizes are positive, and there are as many stages as chunks."""
    mesh = plan.mesh
    numbers = {"batch": plan.batch, "microbatches": plan.microbatches, "chunks": plan.chunks}
    for name, number in (numbers | {"mesh.pp": mesh.pp, "mesh.tp": mesh.tp, "mesh.dp": mesh.dp}).items():
        if number < 1:
            fail(name, f"is {number}, must be at least 1.")
    if mesh.tp_axes and (len(mesh.tp_axes) < 2 or min(mesh.tp_axes) < 2 or prod(mesh.tp_axes) != mesh.tp):
        fail("mesh.tp_axes", f"is {list(mesh.tp_axes)}; several axes of at least 2 ranks make mesh.tp, here {mesh.tp}.")
    if len(plan.stages) != (num_stages := mesh.pp * plan.chunks):
        fail("stages", f"has {len(plan.stages)} entries, mesh.pp × chunks asks for {num_stages}.")
    for i, block in enumerate(plan.block_costs):
        if not 0 <= block.stage < num_stages:
            fail(f"block_costs.{i}.stage", f"is {block.stage}, the plan has stages 0 to {num_stages - 1}.")
        if min(block.forward_seconds, block.backward_seconds, block.params) < 0:
            fail(f"block_costs.{i}", "has a negative number.")


def check_schedule(plan: PlanView, fail: Fail) -> None:
    """The schedule trains, allows that many chunks per rank, and has an order if it is a searched one."""
    if plan.schedule == "forward-only":
        fail("schedule", f"is forward-only, which has no training step; use 1f1b, {', '.join(INTERLEAVED)} or gpipe.")
    if plan.chunks != (fixed := FIXED_CHUNKS.get(plan.schedule, plan.chunks)):
        able = ", ".join(schedules_with(plan.chunks))
        fail("chunks", f"is {plan.chunks}; under {plan.schedule} each rank has {fixed}. {plan.chunks} are for {able}.")
    order, stages, pp = plan.order, plan.mesh.pp * plan.chunks, plan.mesh.pp
    if (order is not None) != (plan.schedule == "searched"):
        given = "is missing; a searched schedule is made from it" if order is None else f"is not for {plan.schedule}"
        fail("order", f"{given}.")
    if order is not None:
        for name, expected in (("forward", stages), ("input_grad", stages), ("wgrad", stages), ("max_in_flight", pp)):
            if len(numbers := getattr(order, name)) != expected or min(numbers) < 0:
                fail(f"order.{name}", f"is {list(numbers)}, must be {expected} numbers of at least 0.")
        if min(order.max_in_flight) < plan.chunks * pp or order.hop < 0:
            fail("order", f"keeps {min(order.max_in_flight)} activations, {stages} chunks need as many on each rank.")
    if plan.schedule in SPLIT and plan.zero >= 2:
        fail("schedule", f"is {plan.schedule}, whose backwards are split, and zero is {plan.zero}. {NO_SPLIT_ZERO}")


def check_shardings(plan: PlanView, fail: Fail) -> None:
    """Layouts parse, and weights and optimizer state are only split over axes of several ranks."""
    for name, table in (("shardings", plan.shardings), ("strategies", plan.strategies)):
        if table and plan.mesh.tp == 1:
            fail(name, "must be empty while mesh.tp is 1.")
    for name, text in plan.shardings.items():
        try:
            Layout.parse(text)
        except ValueError as error:
            fail(f"shardings.{name}", f"{error}.")
    if plan.zero and plan.mesh.dp == 1:
        fail("zero", "needs replicas to share the optimizer's state; mesh.dp is 1.")
    if plan.zero == 2 and plan.microbatches > 1:
        fail("zero", f"is 2, which is for one microbatch a step; microbatches is {plan.microbatches}. Use zero 1 or 3.")
    if plan.dp_shard and (not plan.zero or plan.dp_shard < 2 or plan.mesh.dp % plan.dp_shard):
        fail(
            "dp_shard", f"is {plan.dp_shard}; with zero 1 or more it is a divisor of mesh.dp, which is {plan.mesh.dp}."
        )
    if plan.param_blocks and plan.zero != 3:
        fail("param_blocks", f"is for zero 3; zero is {plan.zero}.")


def check_prediction(plan: PlanView, fail: Fail) -> None:
    """There is a peak per rank, and a step takes time."""
    peaks, devices, seconds = plan.prediction.peak_bytes, plan.mesh.devices, plan.prediction.step_seconds
    if len(peaks) != devices:
        fail("prediction.peak_bytes", f"has {len(peaks)} entries for {plural(devices, 'rank')}.")
    if seconds <= 0:
        fail("prediction.step_seconds", f"is {seconds}, must be above 0.")


def check_batch(plan: PlanView, fail: Fail) -> None:
    """Replicas share the batch evenly, and every microbatch has a sample."""
    dp, microbatches = plan.mesh.dp, plan.microbatches
    if plan.batch % dp:
        fail("mesh.dp", f"{dp} replicas cannot share a batch of {plan.batch} evenly.")
    if microbatches > plan.batch // dp:
        whose = "a replica's batch" if dp > 1 else "a batch"
        fail("microbatches", f"{microbatches} microbatches of {whose} of {plan.batch // dp}.")


def check_stages(plan: PlanView, fail: Fail) -> None:
    """Numbers of stages are not negative, and a stage's ranks are those of its place in the mesh."""
    for i, stage in enumerate(plan.stages):
        numbers = {f.name: getattr(stage, f.name) for f in fields(stage)}
        if stage.memory is not None:
            numbers |= {f"memory.{f.name}": getattr(stage.memory, f.name) for f in fields(stage.memory)}
        for name, number in numbers.items():
            if isinstance(number, int | float) and number < 0:
                fail(f"stages.{i}.{name}", f"is {number}, must not be negative.")
        if stage.ranks != (ranks := plan.mesh.ranks(plan.placement.position(i))):
            fail(f"stages.{i}.ranks", f"is {list(stage.ranks)}, must be {ranks[0]} to {ranks[-1]}.")


def check_recompute(plan: PlanView, fail: Fail) -> None:
    """A stage recomputes none, all, or some of its segments."""
    for i, stage in enumerate(plan.stages):
        level, count = stage.recompute, stage.num_segments
        if level in ("none", "all"):
            continue
        if not isinstance(level, int) or isinstance(level, bool) or level < 1:
            fail(f"stages.{i}.recompute", f'is {level!r}, must be "none", "all" or a number of segments from 1.')
        elif 0 < count <= level:
            fail(f"stages.{i}.recompute", f"is {level}, the stage has {plural(count, 'segment')}. {FEWER_SEGMENTS}")


def check_flows(plan: PlanView, fail: Fail) -> None:
    """Messages and exceptions name stages of the plan; every gradient has an activation, every pair one message."""
    num_stages = len(plan.stages)
    pairs = {(message.src, message.dst) for message in plan.messages}
    for i, message in enumerate(plan.messages):
        if message.src == message.dst or not {message.src, message.dst} <= {*range(num_stages)}:
            fail(f"messages.{i}", f"goes from stage {message.src} to {message.dst} of {num_stages}.")
        if message.num_bytes < 0 or message.seconds < 0:
            fail(f"messages.{i}", f"has {message.num_bytes} bytes and {message.seconds} s; none may be negative.")
        if message.src > message.dst and (message.dst, message.src) not in pairs:
            way, back = (f"from stage {a} to {b}" for a, b in ((message.src, message.dst), (message.dst, message.src)))
            fail(f"messages.{i}", f"gradients go {way}, but no message goes {back}. Plan again.")
    if len(pairs) < len(plan.messages):
        count = f"{len(plan.messages)} messages for {len(pairs)} pairs of stages"
        fail("messages", f"{count}; each pair may have one in each direction. Plan again.")
    for name, stage_number in plan.exceptions.items():
        if not 0 <= stage_number < num_stages:
            fail(f"exceptions.{name}", f"names stage {stage_number} of {num_stages}.")


CHECKS = (
    check_counts, check_schedule, check_shardings, check_prediction, check_batch, check_recompute, check_stages,
    check_flows,
)  # fmt: skip
