"""Checks that the ranks of a launcher make the same calls, with batches that belong together."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import reduce
from operator import and_
from typing import Any, NamedTuple
from zlib import crc32

import torch

from autopar.api.step_result import MAX_STEPS_IN_FLIGHT
from autopar.errors import UsageError
from autopar.ir.mesh import Mesh
from autopar.runtime.engine.metrics import start_readback
from autopar.runtime.launch.spmd import SpmdBackend

SAMPLED_ELEMENTS = 1024  # elements of a sample that `fingerprint` reads, evenly spaced
# Batches of a signature whose content is compared: the first ones, then one in so many.
FIRST_CHECKS, CHECK_EVERY = 3, 16
MAX_KINDS = 64  # bounds the memory of a caller whose batches all differ in shape
MAX_EARLIER, MAX_LISTED = 16, 3  # calls since the last comparison: so many are kept, and listed by an error
HASH_FACTOR = 6364136223846793005  # multiplier of Knuth's MMIX generator: spreads any change over all bits


class Part(NamedTuple):
    """A rank's part of a call, in whole numbers.

    Args:
        batch: samples.
        flag: the rank's flag for `BatchAgreement.any_flag`.
        fingerprint: of this batch, on the CPU.
        late_fingerprint: of a batch on the GPU, `MAX_STEPS_IN_FLIGHT` batches ago.
        kind, shapes: checksums of the batch's signature and of its shapes.
        refused: whether the rank refuses the call.
        call: checksum of the call's text and of those of earlier calls that were not compared.
        unreachable: numbers of kept graphs whose outputs are gone, as bits.
    """

    batch: int = 0
    flag: int = 0
    fingerprint: int = 0
    late_fingerprint: int = 0
    kind: int = 0
    shapes: int = 0
    refused: int = 0
    call: int = 0
    unreachable: int = 0


class BatchAgreement:
    """Agreement of a launcher's ranks on each batch: one all-gather of a few whole numbers.

    Ranks must agree on the number of samples, since ranks with other sizes would wait for tensors that never come.
    Ranks of a tensor-parallel group need the same samples, so fingerprints of inputs and targets are compared: of the
    first `FIRST_CHECKS` batches of each signature, then of every `CHECK_EVERY`-th. Fingerprints of CPU tensors are
    compared before the batch runs. Reading those of GPU tensors would wait for the GPU, so they are compared
    `MAX_STEPS_IN_FLIGHT` batches later. A sampler that shards wrongly does so from the first batch on; it is reported
    at the third batch at the latest.

    A rank that refuses its part of a call, such as a target of a wrong shape, takes part in the all-gather too, so that
    all ranks raise an error and the run can go on. So do ranks that make different calls. Calls in which ranks wait for
    each other are compared before they run, as batches are (`compare`). Others take no part in an all-gather of their
    own: their texts are compared with the next call that does (`note`).

    ``flag`` is sent along with each batch, and ``any_flag`` says whether any rank's flag was true the last time.
    ``kinds`` and ``shapes`` are every rank's checksums of its last batch: all ranks bind and capture steps by them, so
    that they do so together even if they see different parts of the batch. ``unreachable`` has a bit for each kept
    graph whose outputs are gone on all ranks.

    ``whole_replicas`` is true where every rank of a pipeline gets the samples, since it computes losses of them: then
    the fingerprints of all ranks of a replica are compared.
    """

    def __init__(self, ranks: SpmdBackend, mesh: Mesh, data_size: int, whole_replicas: bool = False) -> None:
        self.ranks, self.mesh, self.data_size = ranks, mesh, data_size
        self.whole_replicas = whole_replicas
        self.compares_samples = mesh.tp > 1 or (whole_replicas and mesh.pp > 1)
        self.flag = self.any_flag = False
        self.kinds: tuple[int, ...] = ()
        self.shapes: tuple[int, ...] = ()
        self.unreachable = 0
        self.pending: deque[Callable[[], list[int]]] = deque()  # fingerprints of batches on GPUs
        self.num_batches: Counter[int] = Counter()  # that the ranks agreed on, by kind
        self.earlier: deque[str] = deque(maxlen=MAX_EARLIER)  # the last noted calls since the last comparison
        self.earlier_checksum = 0  # of all of them

    def start(
        self, call: str, batch: int, kind: int, shapes: int, values: Sequence[Any], unreachable: int = 0
    ) -> Callable[[], None]:
        """Start the all-gather; the returned function waits for it and compares the ranks' numbers.

        Args:
            call: the call, without its batch, as text.
            batch, kind, shapes, unreachable: as in `Part`.
            values: leaves of the inputs and targets.

        Raises:
            UsageError: from the returned function, on all ranks, if they do not agree.
        """
        now, late = (0, 0)
        if self.compares_samples:
            now, late = self.fingerprints(values if self.is_checked(kind) else ())
        text = checksum(call, self.earlier_checksum)
        own = Part(batch, self.flag, now, late, kind, shapes, call=text, unreachable=unreachable)
        exchanged = self.ranks.exchange(own)

        def agree() -> None:
            parts = self.parts(exchanged)
            self.check_calls(parts, call)
            if len(self.num_batches) == MAX_KINDS:
                self.num_batches.clear()
            self.num_batches[kind] += 1
            self.kinds, self.shapes = tuple(part.kind for part in parts), tuple(part.shapes for part in parts)
            self.unreachable = reduce(and_, (part.unreachable for part in parts))
            sizes = [(self.mesh.place(rank).replica, part.batch) for rank, part in enumerate(parts)]
            check_batch_sizes(sizes, self.data_size)
            check_same_samples([part.fingerprint for part in parts], self.mesh, whole_replicas=self.whole_replicas)
            ago = f" {MAX_STEPS_IN_FLIGHT} calls ago, so that updates since are wrong"
            check_same_samples([part.late_fingerprint for part in parts], self.mesh, ago, self.whole_replicas)

        return agree

    def note(self, call: str) -> None:
        """Keep a call, with its arguments as text, for the next comparison."""
        self.earlier.append(call)
        self.earlier_checksum = checksum(call, self.earlier_checksum)

    def compare(self, call: str, uses_files: bool = False) -> None:
        """Wait until all ranks make a call, and compare it: before a call outside of batches that waits for all ranks.

        Args:
            call: the call as text.
            uses_files: whether a rank may read or write files first, so that the others wait as long as for a save.

        Raises:
            UsageError: the ranks do not make the same call, on all of them.
        """
        own = Part(flag=self.flag, call=checksum(call, self.earlier_checksum))
        self.check_calls(self.parts(self.ranks.exchange(own, uses_files)), call)

    def check_calls(self, parts: Sequence[Part], call: str) -> None:
        """Raise a UsageError if a rank has refused its part of a call, or the ranks' calls since the last one differ.

        Args:
            parts: of each rank.
            call: this rank's call.
        """
        if any(part.refused for part in parts):  # noted calls are compared the next time
            check_not_refused(self.ranks.gathered(""), None, f"its part of {call}")
        calls = [*self.earlier, call]
        self.earlier.clear()
        self.earlier_checksum = 0
        if len({part.call for part in parts}) > 1:
            self.pending.clear()  # ranks may have added a batch or not
            raise different_calls(self.ranks.gathered(calls))

    def refuse(self, error: Exception) -> None:
        """Take part in the agreement on a call that this rank refuses, and pass the error's message to the others."""
        _, late = self.fingerprints(()) if self.compares_samples else (0, 0)
        self.parts(self.ranks.exchange(Part(flag=self.flag, late_fingerprint=late, refused=True)))
        self.ranks.gathered(str(error) or type(error).__name__)

    def parts(self, exchanged: Callable[[], list[list[int]]]) -> list[Part]:
        """The part of each rank, with `any_flag` set."""
        parts = [Part(*numbers) for numbers in exchanged()]
        self.any_flag = any(part.flag for part in parts)
        return parts

    def is_checked(self, kind: int) -> bool:
        """Whether the next batch of a kind is compared by content."""
        number = self.num_batches[kind] + 1
        return number <= FIRST_CHECKS or number % CHECK_EVERY == 0

    def fingerprints(self, values: Sequence[Any]) -> tuple[int, int]:
        """Fingerprint of the values on the CPU, and of the values that were on a GPU `MAX_STEPS_IN_FLIGHT` calls ago.

        0 stands for no tensor to compare.
        """
        tensors = [leaf for leaf in values if isinstance(leaf, torch.Tensor) and not leaf.is_meta]
        on_gpu = [leaf for leaf in tensors if leaf.device.type != "cpu"]
        on_cpu = [leaf for leaf in tensors if leaf.device.type == "cpu"]
        self.pending.append(start_readback(fingerprint(on_gpu).reshape(1)) if on_gpu else lambda: [0])
        late = self.pending.popleft()()[0] if len(self.pending) > MAX_STEPS_IN_FLIGHT else 0
        return int(fingerprint(on_cpu)) if on_cpu else 0, late


def check_not_refused(refusals: Sequence[str], own: Exception | None, what: str) -> None:
    """Raise if any rank has refused its part of a call.

    Args:
        refusals: message of each rank's error; empty where there is none.
        own: this rank's error.
        what: what was refused, for the message.

    Raises:
        UsageError: another rank has refused; or the own error.
    """
    if own is not None:
        raise own
    rank = next((rank for rank, text in enumerate(refusals) if text), None)
    if rank is not None:
        raise UsageError(f"Rank {rank} refused {what}, so nothing has changed on any rank: {refusals[rank]}")


def different_calls(calls: Sequence[Sequence[str]]) -> UsageError:
    """Error of ranks that make different calls.

    Args:
        calls: each rank's last calls as text. The last of each was compared and not carried out; others were.
    """
    alike = 0  # calls that are the same on all ranks
    while len({tuple(own[: alike + 1]) for own in calls}) == 1 and alike + 1 < min(map(len, calls)):
        alike += 1
    texts = [" and then ".join(own[alike:][:MAX_LISTED]) for own in calls]
    listed = ", ".join(
        f"{text} on rank {', '.join(str(rank) for rank, other in enumerate(texts) if other == text)}"
        for text in dict.fromkeys(texts)
    )
    done = "Nothing has changed."
    if any(len(own) > alike + 1 for own in calls):
        done = "Each rank has carried out all but its last call, so the ranks may differ: go on from a checkpoint."
    return UsageError(
        f"The ranks make different calls: {listed}. {done} Every rank makes the same calls in the same order, on its "
        "own part of the batch."
    )


def check_batch_sizes(batches: Sequence[tuple[int, int]], data_size: int) -> None:
    """Compare the sizes of the ranks' batches.

    Args:
        batches: (data rank, samples) of each rank.

    Raises:
        UsageError: the numbers of samples differ.
    """
    if len({size for _, size in batches}) > 1:
        listed = ", ".join(f"{size} on data rank {number}" for number, size in sorted(set(batches)))
        raise UsageError(
            f"The ranks were given batches of different sizes: {listed}. Each call takes an equal part of the global "
            f"batch on every data rank (pm.data_rank of pm.data_size={data_size}), and the same part on all ranks that "
            "share a data rank."
        )


def check_one_kind(kinds: Sequence[int]) -> None:
    """Check that all ranks were given parts of a batch that can be joined.

    Args:
        kinds: checksum of the shapes, dtypes and constants of each rank's part.

    Raises:
        UsageError: they differ.
    """
    if len(set(kinds)) > 1:
        raise UsageError(
            'loss_over="batch" joins outputs and targets of all ranks, but their shapes, dtypes or constants differ '
            f"between rank 0 and rank {next(rank for rank, kind in enumerate(kinds) if kind != kinds[0])}. Pad them to "
            "one shape."
        )


def check_same_samples(fingerprints: Sequence[int], mesh: Mesh, when: str = "", whole_replicas: bool = False) -> None:
    """Compare the samples of the ranks of each tensor-parallel group, all of which need the same ones.

    Args:
        fingerprints: `fingerprint` of each rank's inputs and targets; 0 where a rank has nothing to compare.
        when: text that names the batch in the message, if it is not the current one.
        whole_replicas: whether all ranks of a data-parallel replica are compared.

    Raises:
        UsageError: two ranks of a group have different samples; names them.
    """
    groups: dict[int, list[int]] = {}
    for rank in range(len(fingerprints)):
        key = mesh.place(rank).replica if whole_replicas else mesh.group(rank, "tp")[0]
        groups.setdefault(key, []).append(rank)
    for group in groups.values():
        own = [(fingerprints[rank], rank) for rank in group if fingerprints[rank]]
        other = next((rank for value, rank in own if value != own[0][0]), None)
        if other is not None:
            shared = f"a replica (pp={mesh.pp}, tp={mesh.tp})" if whole_replicas else f"each operation (tp={mesh.tp})"
            raise UsageError(
                f"Ranks {own[0][1]} and {other} were given different inputs or targets{when}, but share {shared} and "
                f"need the same. Each call takes part pm.data_rank of pm.data_size={mesh.dp} of the global batch: let "
                "samplers shard by these two, not by rank and world size."
            )


def fingerprint(leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """A whole number, never 0, that differs between batches: a hash of some elements of each tensor.

    Elements come from the first and the last sample. The hash is computed on the tensors' device without waiting for
    it, and is the same on each type of device.

    Args:
        leaves: tensors on one device, [batch, ...] or of any shape with fewer than two dims.

    Returns:
        int64, shape [].
    """
    total = torch.ones((), dtype=torch.int64, device=leaves[0].device)
    for leaf in leaves:
        ends = [leaf[0], leaf[-1]] if leaf.ndim > 1 and len(leaf) else [leaf]
        parts = [end.detach().reshape(-1) for end in ends]
        parts = [part[:: -(-len(part) // SAMPLED_ELEMENTS) or 1].contiguous().view(torch.uint8) for part in parts]
        content = torch.cat(parts).to(torch.int64)
        # Multiplication by an odd factor loses no bits; int64 overflow wraps around on every device.
        factors = torch.arange(len(content), device=leaf.device) * 2 + 1
        total = (total * HASH_FACTOR + (content * factors * factors).sum()) | 1
    return total


def checksum(*values: Any) -> int:
    """CRC-32 of the values' ``repr``."""
    return crc32(repr(values).encode())
