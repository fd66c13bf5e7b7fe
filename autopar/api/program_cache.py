"""Programs of a model under a plan: traced, sharded and split once for each mode and microbatch shape, then reused."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any
from warnings import warn

import torch
from torch import nn

from autopar.api.batch import check_call
from autopar.api.model_structure import assigned_attributes, changes, model_structure
from autopar.api.plan_check import check_strategies, weight_layouts
from autopar.api.recompute import with_recompute_segments
from autopar.api.variants import MANY_VARIANTS, argument_names, warn_of_variants
from autopar.codegen.fusions.split_backward import split_backward
from autopar.codegen.split import follow_plan, split, weight_stages
from autopar.errors import EvaluationWarning, TraceError, UsageError, caller_level
from autopar.ir.graph import Graph, Mode
from autopar.ir.layout import REPLICATED
from autopar.ir.plan import Plan
from autopar.ir.plan_parts import SPLIT
from autopar.ir.program import Program
from autopar.ir.pytree import unflatten
from autopar.runtime.launch.torch_settings import TorchSettings
from autopar.sharding.rule import axis_labels, factor_of
from autopar.sharding.shard_graph import shard_graph
from autopar.trace.call import Call, bind
from autopar.trace.export import ADVICE
from autopar.trace.lower import lower_planned
from autopar.trace.python_state import no_python_random

UNMODIFIED = "Train, and evaluate the unmodified model with pm.state_dict()."
Programs = tuple[tuple[Program, ...], ...]  # by shard, then by stage


@dataclass(frozen=True)
class Specialization:
    """Programs for one mode and microbatch shape.

    Args:
        number: index by which ranks know it.
        graph: graph of unsharded tensors.
        by_shard: the program of each stage, for each shard; a single entry where all shards run the same programs.
    """

    number: int
    graph: Graph
    by_shard: Programs

    @property
    def programs(self) -> tuple[Program, ...]:
        """The program of each stage on the first shard. Those of other shards differ in shapes alone."""
        return self.of_shard(0)

    def of_shard(self, shard: int) -> tuple[Program, ...]:
        """The program of each stage on a shard."""
        return self.by_shard[shard % len(self.by_shard)]


class ProgramCache:
    """All specializations of one model that have been needed so far; threads may share it."""

    tracing = threading.RLock()  # of all models: a trace changes modules and settings that threads share
    is_tracing = False  # any model

    def __init__(
        self, model: nn.Module, plan: Plan, example: Call, graph: Graph | None = None, compiled: bool = False
    ) -> None:
        """Trace both modes at the planned microbatch shape and split them by the plan.

        A model whose eval mode cannot be traced is trained all the same, with an EvaluationWarning.

        Args:
            example: a call at the global batch.
            graph: the training graph, if it was traced already; used if it has the plan's microbatch size.
            compiled: whether ranks compile their programs.

        Raises:
            PlanError: the plan is for another model.
            TraceError: the model cannot be traced.
        """
        self.model, self.plan, self.compiled = model, plan, compiled
        self.modes = {module: module.training for module in model.modules()}
        self.settings, self.default_device = TorchSettings.current(), torch.get_default_device()
        self.assigned: set[tuple[type, str]] = set()  # class and name of attributes that forwards set
        self.structure = model_structure(model)
        self.num_stages = len(plan.stages)
        microbatch = example.first(plan.microbatch_size)
        if graph is None or graph.batch != microbatch.batch:
            graph = self.trace_first(microbatch, "train")
        self.train_stage_of = plan.stage_of(graph)
        self.storage = weight_layouts(plan, graph)
        check_strategies(plan, graph, self.storage)
        self.specializations: dict[tuple[Any, ...], Specialization] = {}
        self.numbers = itertools.count()
        self.signatures: dict[tuple[Any, ...], None] = {}  # of all traces, until there are `MANY_VARIANTS`
        train = self.split(graph, self.train_stage_of, planned=True)
        trained_on = weight_stages([(graph, train[0])])
        self.example, self.holders = graph, trained_on
        self.planned = (self.add("train", microbatch, graph, train).number,)
        self.untraced: TraceError | None = None  # why there are no programs of the eval mode
        try:
            evaluated = self.trace_first(microbatch, "eval")
        except TraceError as error:
            self.untraced = error
            warn(
                f"{error} This concerns eval mode alone, in which calls are refused: {UNMODIFIED}",
                EvaluationWarning,
                stacklevel=caller_level(),
            )
            return
        evaluation = self.split(evaluated, follow_plan(evaluated, self.train_stage_of, trained_on))
        self.holders = weight_stages([(graph, train[0]), (evaluated, evaluation[0])])
        self.planned += (self.add("eval", microbatch, evaluated, evaluation).number,)

    @property
    def positions(self) -> Mapping[str, tuple[int, ...]]:
        """Positions in the pipeline that hold each weight; a rank with several stages holds it once."""
        at = self.plan.placement.position
        return {name: tuple(sorted({at(stage) for stage in stages})) for name, stages in self.holders.items()}

    def split(self, graph: Graph, stage_of: Mapping[str, int], planned: bool = False) -> Programs:
        """The program of each stage: the graph sharded over the tensor axis, split by stage, with its segments.

        They are those of each shard, or of all shards together, as in `Specialization`.

        Args:
            planned: whether the graph is the training graph at the plan's shapes.
        """
        shards = range(self.plan.mesh.tp if self.is_ragged else 1)
        return tuple(self.split_shard(graph, stage_of, planned, shard) for shard in shards)

    @property
    def is_ragged(self) -> bool:
        """Whether shards differ in shapes, so that each needs its own programs."""
        labels = (label for text in self.plan.strategies.values() for label in axis_labels(text).values())
        return any(factor_of(label).unit for label in labels) or any(layout.ragged for layout in self.storage.values())

    def split_shard(self, graph: Graph, stage_of: Mapping[str, int], planned: bool, shard: int) -> tuple[Program, ...]:
        """As `split`, for one shard."""
        local = self.sharded(graph, stage_of, shard)
        programs = split(local, stage_of, self.num_stages)
        programs = tuple(replace(program, shapes_differ=self.is_ragged) for program in programs)
        if self.plan.schedule in SPLIT:
            programs = tuple(split_backward(program, self.compiled) for program in programs)
        if graph.mode == "eval" or all(stage.recompute == "none" for stage in self.plan.stages):
            return programs
        undivided = self.sharded(graph, dict.fromkeys(stage_of, 0), shard)
        return with_recompute_segments(programs, local, undivided, self.plan, planned)

    def sharded(self, graph: Graph, stage_of: Mapping[str, int], shard: int) -> Graph:
        """The graph that the ranks of a shard run."""
        if self.plan.mesh.tp == 1:
            return graph
        storage = {w.name: self.storage.get(w.name, REPLICATED) for w in graph.weights}
        return shard_graph(graph, self.plan.strategies, storage, self.plan.mesh.axis_sizes, stage_of, shard)

    def trace_first(self, microbatch: Call, mode: Mode) -> Graph:
        """As `trace`; also refuses draws from Python's generators, which later traces may share with other threads."""
        with no_python_random(self.plan.model.name):
            return self.trace(microbatch, mode)

    def trace(self, microbatch: Call, mode: Mode) -> Graph:
        """The model's graph, as the model and torch's settings were when this cache was made.

        Modules that were frozen then are frozen during the trace.

        Raises:
            UsageError: the model has changed since then.
            TraceError: the model cannot be traced.
        """
        active = self.settings.active(default_device=self.default_device)
        with self.tracing, active, assigned_attributes(self.model) as assigned:
            self.check_unchanged(microbatch)
            now = {module: module.training for module in self.modes}
            ProgramCache.is_tracing = True
            try:
                set_modes(self.modes)
                return lower_planned(self.plan, self.model, microbatch, mode)
            finally:
                ProgramCache.is_tracing = False
                set_modes(now)
                self.assigned |= assigned
                self.structure = model_structure(self.model, self.assigned)

    def check_evaluates(self) -> None:
        """Raise the TraceError of the eval mode, if that could not be traced."""
        if self.untraced is not None:
            raise TraceError(f"{self.untraced} {UNMODIFIED}") from self.untraced

    def check_unchanged(self, call: Call) -> None:
        """Raise a UsageError if the model's structure has changed since its last trace."""
        found = changes(self.structure, model_structure(self.model, self.assigned))
        if found:
            name = self.plan.model.name
            raise UsageError(
                f"{name} has changed since it was passed: {found}. autopar traces the model again for inputs of a new "
                f"shape, here {shapes_text(call.leaves)}. Leave its modules as they are while the parallel model is "
                f"open; change a copy.deepcopy of {name} instead."
            )

    def add(self, mode: Mode, microbatch: Call, graph: Graph, programs: Programs) -> Specialization:
        specialization = Specialization(next(self.numbers), graph, programs)
        signature = input_signature(microbatch.leaves)
        self.specializations[mode, signature] = specialization
        if len(self.signatures) < MANY_VARIANTS:
            self.signatures[signature] = None
            if len(self.signatures) == MANY_VARIANTS:
                warn_of_variants(self.plan.model.name, argument_names(self.model, microbatch), list(self.signatures))
        return specialization

    def forget(self, used: Set[int]) -> list[int]:
        """Drop all specializations but the planned ones and those whose number is in ``used``; returns the numbers."""
        kept = used | {*self.planned}
        dropped = {key: own.number for key, own in self.specializations.items() if own.number not in kept}
        for key in dropped:
            del self.specializations[key]
        return list(dropped.values())

    def specialize(self, mode: Mode, microbatch: Call) -> Specialization:
        """The programs for a microbatch; traces the model if the shape is new.

        Raises:
            UsageError: the model does not take this shape, takes another path that needs other weights, or has changed.
        """
        with self.tracing:  # so that threads trace a shape once
            found = self.specializations.get((mode, input_signature(microbatch.leaves)))
            return found if found is not None else self.specialize_new(mode, microbatch)

    def specialize_new(self, mode: Mode, microbatch: Call) -> Specialization:
        """The programs for a microbatch of a new shape; errors as in `specialize`."""
        check_call(microbatch, self.example, self.plan.model.name)
        graph = self.trace_new_shape(microbatch, mode, "one microbatch")
        programs = self.split(graph, follow_plan(graph, self.train_stage_of, self.holders))
        for program in programs[0]:
            missing = [
                w.name for w in program.weights if w.kind != "constant" and program.stage not in self.holders[w.name]
            ]
            if missing:
                raise UsageError(
                    f"At input shape {shapes_text(microbatch.leaves)} {self.plan.model.name} takes another path: stage "
                    f"{program.stage} would need {', '.join(missing[:3])}. Plan again with such example_inputs."
                )
        return self.add(mode, microbatch, graph, programs)

    def whole_graph(self, mode: Mode, call: Call) -> Graph:
        """The graph of a whole batch, which never runs: it shows what the model returns for the batch.

        Raises:
            UsageError: the model does not take this batch in one call, or has changed.
        """
        found = self.specializations.get((mode, input_signature(call.leaves)))
        if found is not None:
            return found.graph
        return self.trace_new_shape(call, mode, "the whole batch, of which the outputs of microbatches must be parts")

    def trace_new_shape(self, call: Call, mode: Mode, what: str) -> Graph:
        """The model's graph at inputs of another shape; ``what`` says what they are.

        Raises:
            UsageError: the model does not take this shape, or has changed.
            TraceError: as `check_evaluates`.
        """
        if mode == "eval":
            self.check_evaluates()
        try:
            return self.trace(call, mode)
        except TraceError as error:
            raise UsageError(
                f"{self.plan.model.name} does not take inputs of shape {shapes_text(call.leaves)} ({what}); it was "
                f"planned for {shapes_text(self.example.inputs)}. {str(error).removesuffix(ADVICE).rstrip()}"
            ) from error

    def microbatches(
        self, mode: Mode, call: Call, parts: Sequence[list[Any]]
    ) -> Iterator[tuple[Specialization, list[Any]]]:
        """Programs and leaves of each microbatch of a call."""
        for leaves in parts:
            args, kwargs = unflatten(leaves, call.spec)
            yield self.specialize(mode, Call(args, kwargs)), leaves

    def bind_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """A user's call, bound to the signature and compared with the traced call.

        Raises:
            UsageError: an input does not fit; names it.
        """
        bound = bind(self.model, args, dict(kwargs))
        check_call(bound, self.example, self.plan.model.name)
        return bound


def set_modes(modes: Mapping[nn.Module, bool]) -> None:
    """Set the mode of each module without its submodules."""
    for module, training in modes.items():
        module.training = training


def enter_mode(model: nn.Module, modes: Mapping[nn.Module, bool], mode: Mode) -> None:
    """Put a model into a mode as `ProgramCache.trace` does: modules frozen in ``modes`` stay frozen.

    Args:
        modes: whether each module was in training mode when the user passed the model.
    """
    set_modes(modes)
    if model.training != (mode == "train"):
        model.train(mode == "train")


def input_signature(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Cache key of a trace: shape and dtype of tensors, type and value of constants.

    The type tells 1, 1.0 and True apart, which are equal. The text of a float tells 0.0 from -0.0, and finds NaN again.
    """
    return tuple(
        (tuple(v.shape), v.dtype)
        if isinstance(v, torch.Tensor)
        else (type(v), repr(v) if isinstance(v, float | complex) else v)
        for v in leaves
    )


def shapes_text(leaves: Sequence[Any]) -> str:
    """Shapes of all tensors and values among the leaves, for a message."""
    return ", ".join(str(list(leaf.shape)) for leaf in leaves if hasattr(leaf, "shape"))
