"""One rank's step: a schedule bound to modules, peers and slots, then run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.errors import UsageError
from autopar.ir import Edge, Program, Ref, Value
from autopar.pytree import tree_map, unflatten
from autopar.runtime.settle import settled
from autopar.runtime.stopwatch import Stopwatch
from autopar.runtime.transport import Delivery, Receipt, Transport
from autopar.schedule import Action, Schedule

FLAGS_NUMBER = (1 << 11) - 1  # in tags, past every edge of a pair


@dataclass(frozen=True)
class Chunk:
    """A program with its module: what runs for one microbatch shape."""

    program: Program
    module: nn.Module


@dataclass(frozen=True)
class Span:
    """Measured compute of one action, without waiting for its inputs; seconds since the rank's first action."""

    action: Action
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class StepData:
    """What one rank is given for a step, a list entry per microbatch.

    ``inputs`` are the tensors of ``program.inputs``; ``targets`` and ``shares`` (the microbatch's part of the mean over
    the batch) matter on the last stage.
    """

    inputs: list[list[torch.Tensor]]
    targets: list[Any]
    shares: list[float]


NO_DATA = StepData([], [], [])


class BoundStep:
    """A schedule bound to one rank.

    Everything that can be looked up is looked up here, once; `run` only waits, computes and sends.
    """

    def __init__(
        self,
        schedule: Schedule,
        stage: int,
        ranks: Sequence[int],
        chunks: Sequence[Chunk],
        transport: Transport,
        device: torch.device,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None,
        training: bool,
    ) -> None:
        """Bind.

        Args:
            schedule: the actions of all stages; those of ``stage`` are run.
            ranks: the rank of each stage to exchange tensors with.
            chunks: the chunk to use for each microbatch (they differ in shape only).
            device: where a microbatch's inputs and targets are taken when their turn comes.
            loss_fn: on the last stage of a training step.
            training: keep what backward needs; otherwise run without gradients.
        """
        self.ranks, self.transport = ranks, transport
        self.device = device
        self.loss_fn = loss_fn
        self.training = training
        self.data = NO_DATA
        self.held: list[Any] = [None] * len(chunks)
        self.losses: list[torch.Tensor | None] = [None] * len(chunks)
        self.outputs: list[list[Any]] = [[] for _ in chunks]
        self.current: Action | None = None
        self.computing = False
        self.stopwatch = Stopwatch(device)
        self.marks: list[tuple[Action, Any, Any]] = []
        self.keep_outputs = False
        self.loss_scale = 1.0
        self.sent: dict[tuple[int, Action], list[Delivery]] = {}
        actions = schedule[stage]
        self.last_backward = max((k for k, a in enumerate(actions) if a.kind == "B"), default=-1)
        self.work = [self.bind(action, chunks[action.microbatch]) for action in actions]
        self.settles = [self.bind_settle(action, chunks[action.microbatch].program, schedule) for action in actions]

    def run(self, data: StepData, keep_outputs: bool, before_last_backward: Callable[[], None] | None = None) -> None:
        """Run all actions; losses and outputs are left in ``losses`` and ``outputs``."""
        self.data, self.keep_outputs = data, keep_outputs
        self.outputs = [[] for _ in self.outputs]
        self.marks = []
        self.sent.clear()
        early, last = self.transport.posts_early, len(self.work) - 1
        posted = self.work[0][1]() if self.work else []
        with torch.set_grad_enabled(self.training):
            for k, (action, _, compute) in enumerate(self.work):
                self.current = action
                following = self.work[k + 1][1]() if early and k < last else None
                received = [receipt() for receipt in posted]
                self.settle(self.settles[k])
                if before_last_backward is not None and k == self.last_backward:
                    before_last_backward()
                self.computing, start = True, self.stopwatch.mark()
                compute(received)
                self.computing = False
                self.marks.append((action, start, self.stopwatch.mark()))
                if k < last:
                    posted = following if following is not None else self.work[k + 1][1]()
            self.settle(list(self.sent))
        self.data, self.current = NO_DATA, None

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> None:
        """Send to a stage during an action; the tensor is freed once `settle` was told of that action and stage."""
        self.keep(dst, self.transport.send(tensor.contiguous(), self.ranks[dst], tag))

    def keep(self, dst: int, delivery: Delivery) -> None:
        assert self.current is not None
        self.sent.setdefault((dst, self.current), []).append(delivery)

    def settle(self, messages: Sequence[tuple[int, Action]]) -> None:
        """Wait for what was sent to each (stage, in an action), and let go of it."""
        for message in messages:
            for delivery in self.sent.pop(message, ()):
                delivery()

    def spans(self) -> tuple[Span, ...]:
        """What each action of the last run took, in order; times count from the first action's start."""
        seconds = self.stopwatch.seconds
        return tuple(
            Span(a, seconds(self.marks[0][1], start), seconds(self.marks[0][1], end)) for a, start, end in self.marks
        )

    def started_ns(self) -> int:
        """When on the host's clock the first action of the last run started; error as `Stopwatch.host_ns`."""
        return self.stopwatch.host_ns(self.marks[0][1]) if self.marks else 0

    def here(self, leaf: Any) -> Any:
        """A tensor on this rank's device; anything else as it is."""
        return leaf.to(self.device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf

    def bind(self, action: Action, chunk: Chunk) -> tuple[Action, Callable[[], list[Receipt]], Callable[..., None]]:
        """The action, what posts its receives, and what computes it once they are there."""
        if action.kind == "F":
            return action, self.bind_receives(chunk.program.receives, action), self.bind_forward(chunk, action)
        return action, self.bind_gradients(chunk.program, action), self.bind_backward(chunk.program, action)

    def bind_settle(self, action: Action, program: Program, schedule: Schedule) -> list[tuple[int, Action]]:
        """What may be waited for before the action."""
        lower, higher = {e.src for e in program.receives}, {e.dst for e in program.sends}
        return settled(action, schedule, sorted(lower if action.kind == "F" else higher), sorted(higher))

    def bind_receives(self, edges: Sequence[Edge], action: Action) -> Callable[[], list[Receipt]]:
        """What posts the receives of values, or of their gradients, one per edge."""
        backward = action.kind == "B"
        calls = [
            (
                [e.value.shape[d] for d in memory_order(e.value)],
                getattr(torch, e.value.dtype),
                self.ranks[e.dst if backward else e.src],
                tag_of(k, action),
            )
            for k, e in self.numbered(edges)
        ]
        return lambda: [self.transport.receive(*call) for call in calls]

    def bind_gradients(self, program: Program, action: Action) -> Callable[[], list[Receipt]]:
        """What posts the receives of gradients, one per edge, then of their flags, one per peer."""
        edges = [e for e in program.sends if e.value.requires_grad]
        gradients = self.bind_receives(edges, action)
        flags = [
            (n, self.ranks[peer], tag_of(FLAGS_NUMBER, action)) for peer, n in Counter(e.dst for e in edges).items()
        ]
        return lambda: [*gradients(), *(self.transport.receive_flags(*call) for call in flags)]

    def numbered(self, edges: Sequence[Edge]) -> list[tuple[int, Edge]]:
        """Edges with their place among those of their directed pair: the same number at both ends."""
        counts: dict[tuple[int, int], int] = {}
        numbered = []
        for edge in edges:
            pair = (edge.src, edge.dst)
            numbered.append((counts.setdefault(pair, 0), edge))
            counts[pair] += 1
        return numbered

    def bind_forward(self, chunk: Chunk, action: Action) -> Callable[[list[torch.Tensor]], None]:
        program, module, i = chunk.program, chunk.module, action.microbatch
        place = {name: k for k, name in enumerate(program.results)}
        sends = [
            (place[e.value.name], memory_order(e.value), e.dst, tag_of(k, action))
            for k, e in self.numbered(program.sends)
        ]
        orders = [inverse(memory_order(e.value)) for e in program.receives]
        tracked = [e.value.requires_grad for e in program.receives]
        roots = [place[v.name] for v in unique_values(program.sends) if v.requires_grad]

        def forward(received: list[torch.Tensor]) -> None:
            received = [tensor.permute(order) for tensor, order in zip(received, orders, strict=True)]
            if self.training:
                for tensor, wanted in zip(received, tracked, strict=True):
                    tensor.requires_grad_(wanted)
            results = module(*map(self.here, self.data.inputs[i]), *received)
            for k, order, dst, tag in sends:
                self.send(results[k].detach().permute(order), dst, tag)
            # Gradient edges, not tensors: once sent, an output's memory is not needed for backward.
            edges = [gradient_edge(results[k]) for k in roots] if self.training else []
            if program.out_spec is not None:
                self.finish(program, results, place, edges, i)
            if self.training:
                self.held[i] = ([t for t, wanted in zip(received, tracked, strict=True) if wanted], edges)

        return forward

    def finish(
        self, program: Program, results: Sequence[torch.Tensor], place: dict[str, int], edges: list, i: int
    ) -> None:
        """On the last stage: the loss of one microbatch, and its outputs if they are wanted."""
        leaves = [results[place[leaf.name]] if isinstance(leaf, Ref) else leaf for leaf in program.outputs]
        if self.loss_fn is not None:
            loss = self.loss_fn(unflatten(leaves, program.out_spec), tree_map(self.here, self.data.targets[i]))
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
                raise UsageError(
                    f"loss_fn must return a tensor with one element, the mean loss over its samples; it returned "
                    f'{got}. Use reduction="mean", or call .mean() on it.'
                )
            loss = loss * self.data.shares[i]
            self.losses[i] = loss.detach()
            if self.training and not loss.requires_grad:
                raise UsageError(
                    "The loss has no gradient: loss_fn detached it, or nothing that it reads can be trained. "
                    "Return a loss that depends on the model's outputs, without .item() or .detach()."
                )
            edges.append(gradient_edge(loss))
        if self.keep_outputs:
            self.outputs[i] = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def bind_backward(self, program: Program, action: Action) -> Callable[[list[torch.Tensor]], None]:
        i = action.microbatch
        values = [v for v in unique_values(program.sends) if v.requires_grad]
        position = {v.name: k for k, v in enumerate(values)}
        edges_out = [e for e in program.sends if e.value.requires_grad]
        readers = [(position[e.value.name], inverse(memory_order(e.value)), e.dst) for e in edges_out]
        peers = list(Counter(e.dst for e in edges_out))
        tracked = [e for e in program.receives if e.value.requires_grad]
        back = [(memory_order(e.value), e.src, tag_of(k, action)) for k, e in self.numbered(tracked)]
        flags_tag = tag_of(FLAGS_NUMBER, action)

        def backward(received: list[torch.Tensor]) -> None:
            inputs, edges = self.held[i]
            gradients: dict[int, torch.Tensor] = {}
            exists = {p: iter(flags.tolist()) for p, flags in zip(peers, received[len(readers) :], strict=True)}
            for (k, order, dst), tensor in zip(readers, received):
                if next(exists[dst]):
                    gradient = tensor.permute(order)
                    gradients[k] = gradients[k] + gradient if k in gradients else gradient
            loss = self.losses[i]
            if loss is not None:
                gradients[len(values)] = torch.full_like(loss, self.loss_scale)
            roots = [(e, gradients[k]) for k, e in enumerate(edges) if e is not None and k in gradients]
            if roots:
                torch.autograd.backward([e for e, _ in roots], [g for _, g in roots])
            # Zeros fill the place of a gradient that there is none of; the flags keep them from counting as one, which
            # would have weight decay change parameters that the loss does not depend on.
            flags: dict[int, list[bool]] = {}
            for tensor, (order, src, tag) in zip(inputs, back, strict=True):
                flags.setdefault(src, []).append(tensor.grad is not None)
                gradient = tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
                self.send(gradient.permute(order), src, tag)
            for src, own in flags.items():
                self.keep(src, self.transport.send_flags(own, self.ranks[src], flags_tag))
            self.held[i] = None

        return backward


def gradient_edge(tensor: torch.Tensor) -> Any:
    """Where a tensor's gradient enters its graph; None for one that has no graph after all."""
    return torch.autograd.graph.get_gradient_edge(tensor) if tensor.requires_grad else None


def memory_order(value: Value) -> list[int]:
    """A tensor's dims from the outermost in memory to the innermost; the plain order for an expanded tensor.

    Tensors travel in this order, without gaps, so that a cut changes neither the memory format (channels_last stays
    fast) nor the kernels chosen after it, and with them the last bits of the result.
    """
    dims = list(range(len(value.shape)))
    if any(size != 1 and stride == 0 for size, stride in zip(value.shape, value.stride)):
        return dims
    return sorted(dims, key=lambda d: value.stride[d], reverse=True)


def inverse(order: Sequence[int]) -> list[int]:
    """The permutation that undoes ``order``."""
    return [order.index(d) for d in range(len(order))]


def unique_values(edges: Sequence[Edge]) -> list[Value]:
    """The values that travel over the edges, each once, in order."""
    return list({e.value.name: e.value for e in edges}.values())


def tag_of(number: int, action: Action) -> int:
    """A tag that is unique among the tensors of one directed pair of ranks in one step."""
    return (action.microbatch << 12) + (number << 1) + (action.kind == "B")
