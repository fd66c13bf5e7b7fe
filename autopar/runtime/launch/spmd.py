"""Backends in which this process is a rank: a single rank, or one of those that a launcher started."""

from __future__ import annotations

import atexit
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from autopar.errors import SEE_DOCTOR, UsageError
from autopar.ir.pytree import tree_map
from autopar.runtime.comm.connect import connect_rank
from autopar.runtime.comm.in_process import InProcessMailboxes, LocalTransport
from autopar.runtime.comm.process_group import as_bytes, check_default_group, destroy_groups, launch_async
from autopar.runtime.comm.protocols import TransportError
from autopar.runtime.commands import command_named, run_command
from autopar.runtime.launch.environment import launched, launcher_store
from autopar.runtime.launch.failure_watch import FailureWatcher, exit_after_failure, publish_uncaught
from autopar.runtime.launch.interrupt import interrupt_at_end
from autopar.runtime.launch.machine_fault import may_be_of_machine
from autopar.runtime.launch.model_groups import DEFAULT_GROUP, DROPPED, close_dropped
from autopar.runtime.launch.recipe_text import SAME_ARGUMENTS, check_agreement, optimizer_texts, recipe_texts
from autopar.runtime.memory.out_of_memory import lack_of_memory, out_of_memory
from autopar.runtime.random_state import RandomState
from autopar.runtime.rank import Rank
from autopar.runtime.spec import RankSpec, RankStepResult, StepNumbers, rank_text
from autopar.sharding.tensors import contiguous_copy

MODELS = itertools.count()  # numbers of the models of this process, equal on all ranks, which separate their keys


class InProcessBackend:
    """Single rank in this process, without workers and without copies of inputs."""

    def __init__(self, spec: RankSpec, tensors: Mapping[str, torch.Tensor]) -> None:
        self.failed: str | None = None
        self.lock = threading.RLock()  # held during a command and while a result is read
        self.call_seconds = 0.0  # duration of the last call
        self.numbers: Sequence[int] = (0,)
        copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        with settings_active(spec):
            self.rank = Rank(spec, copies, LocalTransport(spec.rank, InProcessMailboxes()))
        self.random = RandomState(spec.rank_seed, self.rank.device)

    def call(self, name: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Run one command on the rank."""
        with running_command(self, name, command_named(name).reads_only), self.random.active():
            result = carry_out(self.rank, name, arguments[0])
        return {0: read_under(result, lambda: running_command(self, name, reads_only=True))}

    def close(self) -> None:
        with self.lock:
            self.failed = self.failed or "close() was called."
            self.rank.close()


class SpmdBackend:
    """This process's rank among those of a launcher. Every rank makes the same calls in the same order.

    An exception gets the rank and the action as a note. The launcher then ends the other ranks.
    """

    def __init__(
        self, spec: RankSpec, tensors: Mapping[str, torch.Tensor], backend: str, timeout_seconds: float
    ) -> None:
        """Join the process group (the caller's if there is one) and take parts of rank 0's weights.

        Args:
            tensors: whole weights by name, with equal names on all ranks.

        Raises:
            UsageError: the ranks' recipes differ, the caller's process group does not fit, or open models
                run over another backend.
        """
        self.failed: str | None = None
        self.lock = threading.RLock()  # held during a command, while a result is read, and in waits for other ranks
        self.closed = False
        self.call_seconds = 0.0  # duration of the last call
        self.unread = 0  # number of steps that are launched on a GPU and whose numbers are not read yet
        self.numbers: Sequence[int] = (spec.rank,)
        device, world = torch.device(spec.device), spec.mesh.devices
        self.opened = ExitStack()  # process groups and their users
        number = next(MODELS)
        # Without close() the process groups remain until the next model. They do not keep the rank's memory.
        self.when_dropped = weakref.finalize(self, DROPPED.__setitem__, number, self.opened)
        self.when_dropped.atexit = False
        self.alarm: FailureWatcher | None = None  # until the ranks have met
        try:
            launch = launched()
            assert launch is not None
            in_users_group = DEFAULT_GROUP.is_users()
            if in_users_group:
                check_default_group(spec.rank, world, device)
            store = launcher_store(launch)
            publish_uncaught(store, spec.rank)
            name = rank_text(spec.mesh, spec.rank, spec.placement)
            self.alarm = FailureWatcher(store, f"failed/{number}", name, waits_of(self))
            self.opened.callback(self.alarm.close)
            with settings_active(spec), self.watched("parallelize"):
                if not in_users_group:
                    group_store = dist.PrefixStore(f"group/{number}", store)
                    group = DEFAULT_GROUP.join(backend, spec.rank, world, device, timeout_seconds, group_store)
                    self.opened.callback(DEFAULT_GROUP.leave, group)
                # Gloo for objects, also where NCCL carries the tensors.
                self.control: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
                self.opened.callback(destroy_groups, [self.control])
                recipes, dropped = zip(*self.all_of((recipe_texts(spec), list(DROPPED))))
                close_dropped(dropped)
                check_agreement(recipes, spec.rank, "train alike", SAME_ARGUMENTS)
                own = self.received(spec, tensors)
                self.rank = connect_rank(spec, own, timeout_seconds, self.opened)
                optimizers = self.all_of(optimizer_texts(self.rank))
                check_agreement(optimizers, spec.rank, "train alike", SAME_ARGUMENTS)
        except BaseException:
            self.close()
            raise
        self.random = RandomState(spec.rank_seed, device)

    def received(self, spec: RankSpec, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Parts of rank 0's weights that this rank holds, by name.

        Args:
            tensors: whole weights; on ranks other than 0 only their shapes and dtypes are read.
        """
        names = {weight.name for weight in spec.weights}
        received = {}
        for name, tensor in sorted(tensors.items()):  # one by one: a rank has no room for all of them
            if spec.rank == 0:
                whole = contiguous_copy(tensor)
            else:
                whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            try:
                dist.broadcast(as_bytes(whole.view(-1)), 0, group=self.control)
            except RuntimeError as error:
                raise TransportError(f"receiving {name} from rank 0: {error}") from error
            if name in names:
                received[name] = spec.local_part(name, whole)
        return received

    def parts_of_rank0(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """As `received`, for the running rank. All ranks make the call."""
        check_open(self)
        with self.report_failures("receiving weights from rank 0"):
            return self.received(self.rank.spec, tensors)

    def gathered(self, thing: Any, uses_files: bool = False) -> list[Any]:
        """Objects that the ranks pass, by rank. All ranks make the call.

        Args:
            uses_files: whether a rank may read or write files first, so that the others wait as long as for a save.
        """
        check_open(self)
        with self.report_failures("gathering what all ranks have"):
            return self.all_of(thing, self.rank.checkpoint_group if uses_files else None)

    def all_of(self, thing: Any, group: Any = None) -> list[Any]:
        """Objects that the ranks pass, by rank; ``group`` is another process group of all ranks than `control`."""
        things: list[Any] = [None] * dist.get_world_size()
        try:
            dist.all_gather_object(things, thing, group=group or self.control)
        except RuntimeError as error:
            raise TransportError(f"gathering what all ranks have: {error}") from error
        return things

    def exchange(self, numbers: Sequence[int], uses_files: bool = False) -> Callable[[], list[list[int]]]:
        """Start an all-gather of a few integers, equally many on each rank. The result waits and returns rows by rank.

        Only the hosts communicate, so no GPU is waited for. No GPU waits either while steps are launched ahead.

        Args:
            uses_files: as for `gathered`.
        """
        check_open(self)
        own = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        options = AllgatherOptions()
        if uses_files:
            options.timeout = timedelta(seconds=self.rank.spec.checkpoint_seconds)
        with self.report_failures("agreeing on a call"):
            delivery = launch_async(lambda: self.control.allgather([rows], [own], options), "agreeing on a call")

        def rows_by_rank() -> list[list[int]]:
            with self.report_failures("agreeing on a call"):
                delivery()
            return [row.tolist() for row in rows]

        return rows_by_rank

    def outputs(self, own: Any, source: int, readers: Sequence[int]) -> Any:
        """Outputs that rank ``source`` passes as ``own``, on all ``readers``. Source and readers make the call."""
        with self.report_failures("passing outputs on"):
            received = [own]
            try:
                if self.rank.spec.rank != source:
                    dist.recv_object_list(received, source, group=self.control)
                    return tree_map(self.on_device, received[0])
                copies = [tree_map(on_cpu, own)]
                for reader in readers:
                    if reader != source:
                        dist.send_object_list(copies, reader, group=self.control)
            except RuntimeError as error:
                raise TransportError(f"passing outputs on from rank {source}: {error}") from error
            return own

    def on_device(self, leaf: Any) -> Any:
        return leaf.to(self.rank.device) if isinstance(leaf, torch.Tensor) else leaf

    def watched(self, what: str) -> AbstractContextManager[None]:
        """Context of the failure watcher around a command; empty without a watcher."""
        return self.alarm.report_failures(what) if self.alarm else nullcontext()

    @contextmanager
    def report_failures(self, what: str) -> Iterator[None]:
        """Context for waits for other ranks. Their failure ends the wait; this rank's failure is published to them."""
        try:
            with self.lock, self.watched(what):
                yield
        except BaseException:
            atexit.register(exit_after_failure, weakref.ref(self.rank))
            raise

    def call(self, name: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Run one command on this rank. Returns all ranks' results; for replicated commands only this rank's."""
        number = self.rank.spec.rank
        command = command_named(name)
        with running_command(self, name, command.reads_only), self.report_failures(name):
            with self.random.active():
                result = carry_out(self.rank, name, arguments[number])
            if not command.replicated:
                return dict(enumerate(self.all_of(result, self.rank.checkpoint_group if command.uses_files else None)))
            result = read_under(result, lambda: self.reading(name))
            self.unread += isinstance(result, RankStepResult) and not isinstance(result.numbers, StepNumbers)
        return {number: result}

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Context for the wait for a step's numbers."""
        with running_command(self, name, reads_only=True), self.report_failures(name):
            yield
            self.unread -= 1

    def close(self) -> None:
        with self.lock:
            if self.closed:
                return
            self.closed = True
            self.failed = self.failed or "close() was called."
            self.when_dropped.detach()
            # A communicator may wait for a rank that is gone.
            with self.watched("close"):
                self.opened.close()


def waits_of(ranks: SpmdBackend) -> Callable[[], bool]:
    """Function that says whether the ranks have unread steps. It does not keep a dropped model alive."""
    own = weakref.ref(ranks)

    def waits() -> bool:
        ranks = own()
        return ranks is not None and ranks.failed is None and ranks.unread > 0

    return waits


@contextmanager
def running_command(ranks: InProcessBackend | SpmdBackend, command: str, reads_only: bool) -> Iterator[None]:
    """Context that times a command, under the run's settings of torch.

    After a command that raised, the ranks accept no further command. The failed command may have left some
    microbatches' gradients, half of an update, or an advanced random state. A first Ctrl-C waits for the end of a
    command that only reads. Several threads may run commands; each waits for the end of another's.

    Raises:
        UsageError: an earlier command has raised, or the ranks are closed.
    """
    with ranks.lock, interrupt_at_end(command) if reads_only else nullcontext():
        check_open(ranks)
        start = time.perf_counter()
        try:
            with settings_active(ranks.rank.spec):
                yield
        except BaseException as error:
            ranks.failed = f"{type(error).__name__} during {command}."
            raise
        ranks.call_seconds = time.perf_counter() - start


def settings_active(spec: RankSpec) -> AbstractContextManager[None]:
    """Context of a rank in the caller's process: the run's settings of torch, and the rank's device."""
    return spec.settings.active(torch.device(spec.device))


def check_open(ranks: InProcessBackend | SpmdBackend) -> None:
    """Raise a UsageError if a command has raised, or the ranks are closed."""
    if ranks.failed is not None:
        raise UsageError(f"This model was closed: {ranks.failed} Call autopar.parallelize again.")


def carry_out(rank: Rank, name: str, arguments: tuple[Any, ...]) -> Any:
    """Result of one command. An exception gets the rank and its action as a note.

    Raises:
        DeviceMemoryError: the rank's device ran out of memory.
    """
    try:
        with rank.active():
            return run_command(rank, name, arguments)
    except Exception as error:
        if (lack := lack_of_memory(error)) is not None:
            raise out_of_memory(rank, name, lack) from error
        action = rank.current_step.current_action if rank.current_step else None
        name = rank_text(rank.mesh, rank.spec.rank, rank.spec.placement)
        error.add_note(f"autopar: {name}" + (f", in action {action}" if action else ""))
        if may_be_of_machine(error):
            error.add_note(f"autopar: {SEE_DOCTOR}")
        raise


def read_under(result: Any, guard: Callable[[], AbstractContextManager[None]]) -> Any:
    """Result of a command. The wait for a step's unread numbers runs inside ``guard()``."""
    if not isinstance(result, RankStepResult) or isinstance(result.numbers, StepNumbers):
        return result
    read = result.numbers

    def guarded() -> StepNumbers:
        with guard():
            return read()

    return replace(result, numbers=guarded)


def on_cpu(leaf: Any) -> Any:
    return leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf
