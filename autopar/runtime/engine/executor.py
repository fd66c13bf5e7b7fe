"""One rank's step: a schedule bound to modules, peers and tags, then run.

Names, shapes and peers are looked up when a schedule is bound; `BoundStep.run` calls closures over integers. Sends are
asynchronous. Gloo receives are posted one action ahead. NCCL receives are posted only when needed, because a waiting
NCCL kernel occupies multiprocessors. A backward keeps gradient edges instead of outputs. A sent tensor is freed once
the schedule proves that its peer has received it (`send_lifetimes`). A value that the loss does not depend on has no
gradient; a flag next to each gradient preserves that across a cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from autopar.ir.graph import Ref
from autopar.ir.placement import Placement
from autopar.ir.program import Edge, Program
from autopar.ir.pytree import tree_map, unflatten
from autopar.runtime.comm.protocols import FlagChannel, MessageBytes, RecvHandle, SendHandle, Transport
from autopar.runtime.engine.batch_loss import BatchLoss
from autopar.runtime.engine.deferred_wgrads import Captured
from autopar.runtime.engine.edges import (
    channel_index,
    distinct_values,
    edge_check,
    gradient_edge,
    input_indices,
    inverse_permutation,
)
from autopar.runtime.engine.loss import LossFunction, check_loss
from autopar.runtime.engine.records import (
    NO_DATA,
    ActionTiming,
    BoundAction,
    ChunkModule,
    SavedForward,
    StepData,
    StepTensors,
)
from autopar.runtime.engine.send_lifetimes import SendKey, send_lifetimes
from autopar.runtime.engine.timer import Stopwatch
from autopar.schedule.actions import Action, Schedule

# Called before each backward with the names of the weights that it reaches, and of those that no later one reaches.
BackwardNotice = Callable[[Set[str], Sequence[str]], None]
MAX_TENSORS_PER_PAIR = 1 << 11  # tensors of a microbatch from one chunk to another
FLAGS_INDEX = MAX_TENSORS_PER_PAIR - 1  # index of the flags in tags, after all tensors of the pair


class BoundStep:
    """A schedule bound to one rank.

    The constructor looks up everything once; `run` only waits, computes and sends.
    """

    def __init__(
        self,
        schedule: Schedule,
        placement: Placement,
        position: int,
        ranks: Sequence[int],
        chunks: Sequence[Sequence[ChunkModule]],
        transport: Transport,
        flags: FlagChannel,
        device: torch.device,
        loss_fn: LossFunction | None,
        training: bool,
        batch_loss: BatchLoss | None = None,
        keeps_graph: bool = False,
    ) -> None:
        """Bind.

        Args:
            schedule: actions of all pipeline positions; this rank runs those of ``position``.
            placement: of the chunks.
            ranks: rank at each pipeline position.
            chunks: for each microbatch, this rank's chunks. Chunks of two microbatches differ in shapes only.
            transport: moves tensors to and from the other positions.
            flags: tells the host of another position which gradients exist.
            device: inputs and targets that are elsewhere are copied there when their microbatch runs.
            loss_fn: on the last stage of a training step whose microbatches have losses of their own.
            training: keep what backward needs; otherwise run without gradients.
            batch_loss: on the last stage of a training step whose batch has one loss.
            keeps_graph: other schedules run between the forwards and the backwards.
        """
        self.placement, self.position, self.ranks, self.flags = placement, position, ranks, flags
        self.device = device
        self.loss_fn, self.batch_loss = loss_fn, batch_loss
        self.training = training
        self.data = NO_DATA
        self.saved: dict[Action, SavedForward] = {}  # by forward action
        self.captured: dict[Action, Captured] = {}  # tensors for gradients of weights, by the action that computes them
        self.results = self.no_results(len(chunks))
        self.output_gradients: Sequence[Sequence[torch.Tensor | None]] = ()  # by microbatch and output, of the caller
        self.current_action: Action | None = None
        self.computing = False
        self.stopwatch = Stopwatch(device)
        self.marks: list[tuple[Action, Any, Any]] = []
        self.keep_outputs = False
        self.loss_scale = 1.0
        self.after_backward: Callable[[], None] = lambda: None  # flushes gradients; set by the rank
        self.saving: Callable[[], AbstractContextManager[Any]] = nullcontext  # of forwards; set by the rank
        # Reads of sharded parameters by the last run, and by the last backwards that ran alone; kept by the rank.
        self.bucket_reads: Sequence[int] = ()
        self.backward_reads: Sequence[int] = ()
        self.sent: dict[SendKey, list[SendHandle]] = {}
        self.local_tensors: dict[tuple[int, int, int], torch.Tensor] = {}  # between own chunks: by (src, dst, tag)
        self.chunks = chunks
        self.input_indices = [input_indices([chunk.program for chunk in row]) for row in chunks]
        has_peers = training and len(ranks) > 1
        messages = self.messages(schedule[position])
        self.channel = transport.open_channel(*messages, keeps_graph) if has_peers else transport
        self.bound_actions = self.bind_actions(schedule)

    @property
    def trained_weights(self) -> list[str]:
        """Names of the weights that backwards of this step reach, in the order in which their gradients complete."""
        return [name for bound in self.bound_actions for name in bound.completes]

    @staticmethod
    def no_results(count: int) -> StepTensors:
        return StepTensors([None] * count, [[] for _ in range(count)])

    def run(
        self,
        data: StepData,
        keep_outputs: bool,
        before_backward: BackwardNotice | None = None,
    ) -> StepTensors:
        """Losses and outputs of all actions. The step keeps none of them."""
        self.begin(data, keep_outputs)
        self.run_actions(self.bound_actions, before_backward)
        return self.end()

    def run_forwards(self, data: StepData, keep_outputs: bool) -> StepTensors:
        """Outputs of all forwards, whose backwards `run_backwards` runs later."""
        self.begin(data, keep_outputs)
        self.run_actions([bound for bound in self.bound_actions if bound.action.kind == "F"])
        return self.end()

    def run_backwards(
        self,
        output_gradients: Sequence[Sequence[torch.Tensor | None]],
        before_backward: BackwardNotice | None = None,
    ) -> None:
        """Run all backwards after `run_forwards`.

        Args:
            output_gradients: on the last stage, gradient of each output of each microbatch, where there is one.
        """
        self.output_gradients = output_gradients
        self.marks = []
        self.run_actions([bound for bound in self.bound_actions if bound.action.kind != "F"], before_backward)
        self.end()

    def begin(self, data: StepData, keep_outputs: bool) -> None:
        """Take a step's data, and drop the remains of a step that raised."""
        self.data, self.keep_outputs = data, keep_outputs
        self.results = self.no_results(len(self.chunks))
        self.marks = []
        self.drop_saved()
        if self.batch_loss is not None:
            self.batch_loss.clear()

    def drop_saved(self) -> None:
        """Drop what forwards have left for backwards."""
        for state in (self.sent, self.saved, self.captured, self.local_tensors):
            state.clear()

    def end(self) -> StepTensors:
        """Losses and outputs of the actions that have run."""
        if self.batch_loss is not None:
            self.batch_loss.clear()
        self.data, self.output_gradients, self.current_action = NO_DATA, (), None
        results, self.results = self.results, self.no_results(len(self.chunks))
        return results

    def run_actions(self, actions: Sequence[BoundAction], before_backward: BackwardNotice | None = None) -> None:
        """Run actions in order; at the end all sends have been received."""
        early, last = self.channel.posts_early, len(actions) - 1
        posted = actions[0].post_receives() if actions else []
        with torch.set_grad_enabled(self.training):
            for k, bound in enumerate(actions):
                self.current_action = bound.action
                following = actions[k + 1].post_receives() if early and k < last else None
                received = [receive() for receive in posted]
                self.release_sends(bound.releases)
                if before_backward is not None and bound.action.kind != "F":
                    before_backward(bound.reaches, bound.completes)
                self.computing, start = True, self.stopwatch.mark()
                bound.compute(received)
                self.computing = False
                self.marks.append((bound.action, start, self.stopwatch.mark()))
                if k < last:
                    posted = following if following is not None else actions[k + 1].post_receives()
            self.release_sends(list(self.sent))

    def messages(self, actions: Sequence[Action]) -> tuple[MessageBytes, MessageBytes]:
        """Bytes of the tensors that a step receives from other ranks, and of those that it sends to other ranks."""
        incoming: dict[tuple[int, int], int] = {}
        outgoing: dict[tuple[int, int], int] = {}
        for action in actions:
            if action.kind == "W":
                continue
            program, forward = self.program_of(action), action.kind == "F"
            received, sent = (program.receives, program.sends) if forward else (program.sends, program.receives)
            for edges, sizes, is_incoming in ((received, incoming, True), (sent, outgoing, False)):
                traveling = edges if forward else [e for e in edges if e.value.requires_grad]
                for k, e in self.numbered_edges(traveling):
                    src, dst = (e.src, e.dst) if forward else (e.dst, e.src)
                    peer = src if is_incoming else dst
                    if not self.is_local(peer):
                        sizes[self.rank_of(peer), self.tag(k, action.microbatch, src, dst)] = e.value.num_bytes
        return incoming, outgoing

    def rank_of(self, chunk: int) -> int:
        """Rank that runs a chunk."""
        return self.ranks[self.placement.position(chunk)]

    def is_local(self, chunk: int) -> bool:
        """Whether this rank runs a chunk."""
        return self.placement.position(chunk) == self.position

    def channel_index(self, src: int, dst: int) -> int:
        """Index that separates the messages of two chunks from other messages between their ranks."""
        return channel_index(src, dst, self.placement)

    def tag(self, number: int, microbatch: int, src: int, dst: int) -> int:
        """Tag that is unique among the tensors of one directed pair of ranks in one step."""
        return (microbatch * self.placement.chunks**2 + self.channel_index(src, dst)) * MAX_TENSORS_PER_PAIR + number

    def send(self, tensor: torch.Tensor, src: int, dst: int, tag: int) -> None:
        """Send to a chunk during an action; `release_sends` frees the tensor.

        A chunk of this rank gets the tensor itself, without a copy.
        """
        if self.is_local(dst):
            self.local_tensors[src, dst, tag] = tensor
        else:
            rank, index = self.rank_of(dst), self.channel_index(src, dst)
            self.track_send(dst, self.channel.send(tensor.contiguous(), rank, tag, index))

    def send_flags(self, flags: list[bool], src: int, dst: int, tag: int) -> None:
        if self.is_local(dst):
            self.local_tensors[src, dst, tag] = torch.tensor(flags, device="cpu")
        else:
            self.track_send(dst, self.flags.send_flags(flags, self.rank_of(dst), tag))

    def track_send(self, dst: int, handle: SendHandle) -> None:
        assert self.current_action is not None
        self.sent.setdefault((dst, self.current_action), []).append(handle)

    def receive_call(self, src: int, dst: int, tag: int, receive: Callable[[], RecvHandle]) -> Callable[[], RecvHandle]:
        """Posts a receive. A tensor from a chunk of this rank needs no post: its handle looks the tensor up."""
        return (lambda: lambda: self.local_tensors.pop((src, dst, tag))) if self.is_local(src) else receive

    def release_sends(self, keys: Sequence[SendKey]) -> None:
        """Wait for sends, and free their tensors."""
        for key in keys:
            for handle in self.sent.pop(key, ()):
                handle()

    def timings(self) -> tuple[ActionTiming, ...]:
        """Timing of each action of the last run, in order."""
        seconds, first = self.stopwatch.seconds, self.marks[0][1] if self.marks else None
        return tuple(ActionTiming(a, seconds(first, start), seconds(first, end)) for a, start, end in self.marks)

    def started_ns(self) -> int:
        """Start of the last run's first action on the host's clock; error as `Stopwatch.host_ns`."""
        return self.stopwatch.host_ns(self.marks[0][1]) if self.marks else 0

    def to_device(self, leaf: Any) -> Any:
        """A tensor on this rank's device, which autograd may save; other values unchanged."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        leaf = leaf.to(self.device, non_blocking=True)
        return leaf.clone() if leaf.is_inference() else leaf  # the caller made it in inference mode

    def chunk_for(self, action: Action) -> ChunkModule:
        """Chunk that an action of this rank runs."""
        return self.chunks[action.microbatch][action.chunk // len(self.ranks)]

    def program_of(self, action: Action) -> Program:
        """Program that an action of this rank runs."""
        return self.chunk_for(action).program

    def producers(self, action: Action) -> tuple[Action, ...]:
        """Actions of other chunks whose tensors an action of this rank reads."""
        if action.kind == "W":
            return ()
        program = self.program_of(action)
        chunks = {e.src for e in program.receives} if action.kind == "F" else {e.dst for e in program.sends}
        return tuple(Action(action.kind, chunk, action.microbatch) for chunk in sorted(chunks))

    def consumers(self, action: Action) -> tuple[Action, ...]:
        """Actions of other chunks that read the tensors of an action of this rank."""
        if action.kind == "W":
            return ()
        program = self.program_of(action)
        chunks = {e.dst for e in program.sends} if action.kind == "F" else {e.src for e in program.receives}
        return tuple(Action(action.kind, chunk, action.microbatch) for chunk in sorted(chunks))

    def bind_actions(self, schedule: Schedule) -> list[BoundAction]:
        """This rank's actions, in order."""
        actions = schedule[self.position]
        lifetimes = send_lifetimes(self.position, schedule, self.producers, self.consumers)
        last_backward = {name: action for action in actions for name in self.chunk_for(action).gradients_of(action)}
        completes: dict[Action, tuple[str, ...]] = {}
        for name, action in last_backward.items():
            completes[action] = (*completes.get(action, ()), name)
        return [
            self.bind(action, completes.get(action, ()), releases)
            for action, releases in zip(actions, lifetimes, strict=True)
        ]

    def bind(self, action: Action, completes: tuple[str, ...], releases: list[SendKey]) -> BoundAction:
        chunk = self.chunk_for(action)
        if action.kind == "F":
            receives, compute = self.bind_receives(chunk.program.receives, action), self.bind_forward(chunk, action)
        elif action.kind == "W":
            receives, compute = list, self.bind_wgrads(chunk, action)
        else:
            receives = self.bind_gradients(chunk.program, action)
            compute = self.bind_backward(chunk.program, action)
        reaches = frozenset(chunk.gradients_of(action))
        return BoundAction(action, receives, compute, reaches, completes, releases)

    def bind_receives(self, edges: Sequence[Edge], action: Action) -> Callable[[], list[RecvHandle]]:
        """Posts the receives of values, or of their gradients, one per edge."""
        calls: list[Callable[[], RecvHandle]] = []
        for k, e in self.numbered_edges(edges):
            shape, dtype = [e.value.shape[d] for d in e.value.memory_order], getattr(torch, e.value.dtype)
            src, dst = (e.src, e.dst) if action.kind == "F" else (e.dst, e.src)
            tag = self.tag(k, action.microbatch, src, dst)
            receive = partial(self.channel.receive, shape, dtype, self.rank_of(src), tag, self.channel_index(src, dst))
            calls.append(self.receive_call(src, dst, tag, receive))
        return lambda: [call() for call in calls]

    def bind_gradients(self, program: Program, action: Action) -> Callable[[], list[RecvHandle]]:
        """Posts the receives of gradients, one per edge, then of their flags, one per peer."""
        edges = [e for e in program.sends if e.value.requires_grad]
        gradients = self.bind_receives(edges, action)
        flags: list[Callable[[], RecvHandle]] = []
        for src, n in Counter(e.dst for e in edges).items():
            tag = self.tag(FLAGS_INDEX, action.microbatch, src, program.stage)
            receive = partial(self.flags.receive_flags, n, self.rank_of(src), tag)
            flags.append(self.receive_call(src, program.stage, tag, receive))
        return lambda: [*gradients(), *(call() for call in flags)]

    def numbered_edges(self, edges: Sequence[Edge]) -> list[tuple[int, Edge]]:
        """Edges with their index among the edges of their directed pair: equal at both ends."""
        counts: dict[tuple[int, int], int] = {}
        numbered = []
        for edge in edges:
            pair = (edge.src, edge.dst)
            numbered.append((counts.setdefault(pair, 0), edge))
            counts[pair] += 1
        return numbered

    def bind_forward(self, chunk: ChunkModule, action: Action) -> Callable[[list[torch.Tensor]], None]:
        program, module, i = chunk.program, chunk.module, action.microbatch
        inputs = self.input_indices[i][action.chunk // len(self.ranks)]
        place = {name: k for k, name in enumerate(program.results)}
        # Tensors travel without gaps and in their memory order. So a cut changes neither the memory format
        # (channels_last stays fast) nor the kernels chosen after it, which would change the last bits of the result.
        sends = [
            (place[e.value.name], edge_check(e), e.value.memory_order, e.src, e.dst, self.tag(k, i, e.src, e.dst))
            for k, e in self.numbered_edges(program.sends)
        ]
        orders = [inverse_permutation(e.value.memory_order) for e in program.receives]
        tracked = [e.value.requires_grad for e in program.receives]
        roots = [place[v.name] for v in distinct_values(program.sends) if v.requires_grad]

        def forward(received: list[torch.Tensor]) -> None:
            received = [tensor.permute(order) for tensor, order in zip(received, orders, strict=True)]
            if self.training:
                for tensor, needs_grad in zip(received, tracked, strict=True):
                    tensor.requires_grad_(needs_grad)
            slots, captured = chunk.wgrads.open_slots() if chunk.wgrads is not None else ((), [])
            with self.saving():
                results = module(*(self.to_device(self.data.inputs[i][k]) for k in inputs), *received, *slots)
            for k, check, order, src, dst, tag in sends:
                check(results[k])
                self.send(results[k].detach().permute(order), src, dst, tag)
            # Gradient edges, not tensors: backward does not need an output's memory once it is sent.
            edges = [gradient_edge(results[k]) for k in roots] if self.training else []
            if program.out_spec is not None:
                self.finish_microbatch(program, results, place, edges, i)
            if self.training:
                inputs_with_grad = [t for t, needs_grad in zip(received, tracked, strict=True) if needs_grad]
                self.saved[action] = SavedForward(inputs_with_grad, edges, captured)

        return forward

    def finish_microbatch(
        self, program: Program, results: Sequence[torch.Tensor], place: dict[str, int], edges: list[Any], i: int
    ) -> None:
        """On the last stage: compute the loss of microbatch ``i``, and keep its outputs where they are wanted.

        Args:
            results: outputs of the stage's program, most of them [samples of the microbatch, ...].
        """
        leaves = [results[place[leaf.name]] if isinstance(leaf, Ref) else leaf for leaf in program.outputs]
        if self.batch_loss is not None:
            edges += self.batch_loss.keep(leaves)
        elif self.loss_fn is not None:
            loss = self.loss_fn(unflatten(leaves, program.out_spec), tree_map(self.to_device, self.data.targets[i]))
            check_loss(loss)
            loss = loss * self.data.shares[i]
            self.results.losses[i] = loss.detach()
            edges.append(gradient_edge(loss))
        elif self.training:  # the caller computes the loss, and gives gradients of all outputs
            edges += [gradient_edge(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        if self.keep_outputs:
            # While training, an output of an earlier stage may lie in memory that the next step overwrites.
            copy = torch.Tensor.clone if self.training else torch.Tensor.detach
            self.results.outputs[i] = [
                copy(leaf.detach()) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
            ]

    def loss_gradients(self, i: int) -> Sequence[torch.Tensor | None]:
        """On the last stage: gradient of the loss of microbatch ``i``, or those of its outputs for another loss."""
        if self.output_gradients:
            return [None if g is None else self.to_device(g) * self.loss_scale for g in self.output_gradients[i]]
        loss, own = self.results.losses[i], self.batch_loss
        if own is None:
            return () if loss is None else (torch.full_like(loss, self.loss_scale),)
        if loss is None:  # this is the first backward
            share = self.data.shares[i]
            loss = own.compute(self.data.targets[0], self.loss_scale * share, self.to_device)
            # All microbatches of all replicas have a part of it, so that the parts add up to it.
            part = loss * (share / len(own.outputs.sizes))
            self.results = replace(self.results, losses=[part] * len(self.chunks))
        return own.gradients[i]

    def bind_backward(self, program: Program, action: Action) -> Callable[[list[torch.Tensor]], None]:
        i, stage, forward = action.microbatch, program.stage, replace(action, kind="F")
        values = [v for v in distinct_values(program.sends) if v.requires_grad]
        position = {v.name: k for k, v in enumerate(values)}
        edges_out = [e for e in program.sends if e.value.requires_grad]
        readers = [(position[e.value.name], inverse_permutation(e.value.memory_order), e.dst) for e in edges_out]
        peers = list(Counter(e.dst for e in edges_out))
        tracked = [e for e in program.receives if e.value.requires_grad]
        back = [
            (edge_check(e, "the gradient of "), e.value.memory_order, e.src, self.tag(k, i, stage, e.src))
            for k, e in self.numbered_edges(tracked)
        ]

        def backward(received: list[torch.Tensor]) -> None:
            inputs, edges, captured = self.saved.pop(forward)
            gradients: dict[int, torch.Tensor] = {}
            exists = {p: iter(flags.tolist()) for p, flags in zip(peers, received[len(readers) :], strict=True)}
            for (k, order, dst), tensor in zip(readers, received):
                if next(exists[dst]):
                    gradient = tensor.permute(order)
                    gradients[k] = gradients[k] + gradient if k in gradients else gradient
            if program.out_spec is not None:
                first = len(values)
                gradients |= {first + k: g for k, g in enumerate(self.loss_gradients(i)) if g is not None}
            roots = [(e, gradients[k]) for k, e in enumerate(edges) if e is not None and k in gradients]
            if roots:
                torch.autograd.backward([e for e, _ in roots], [g for _, g in roots])
            self.after_backward()
            if action.kind == "I":
                self.captured[replace(action, kind="W")] = captured
            # A missing gradient travels as zeros. Its flag keeps the receiver from using them: with a gradient of zeros
            # weight decay would change parameters that the loss does not depend on.
            flags: dict[int, list[bool]] = {}
            for tensor, (check, order, dst, tag) in zip(inputs, back, strict=True):
                flags.setdefault(dst, []).append(tensor.grad is not None)
                gradient = tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
                check(gradient)
                self.send(gradient.permute(order), stage, dst, tag)
            for dst, exists_for_dst in flags.items():
                self.send_flags(exists_for_dst, stage, dst, self.tag(FLAGS_INDEX, i, stage, dst))

        return backward

    def bind_wgrads(self, chunk: ChunkModule, action: Action) -> Callable[[list[torch.Tensor]], None]:
        """Compute the gradients of weights that the chunk's backward has left."""

        def compute(received: list[torch.Tensor]) -> None:
            captured = self.captured.pop(action)
            if chunk.wgrads is not None:
                chunk.wgrads.compute(captured)
            self.after_backward()

        return compute
