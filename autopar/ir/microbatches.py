"""How a replica's batch is cut into microbatches: like `torch.chunk`."""

from __future__ import annotations

from autopar.ir.units import plural


def microbatch_size(batch: int, microbatches: int) -> int:
    """Samples of the largest microbatch; at least 1, even for an empty batch."""
    return max(1, -(-batch // microbatches))


def microbatch_sizes(batch: int, microbatches: int) -> list[int]:
    """Samples of each microbatch: equal except for a smaller last one, and at most ``microbatches`` of them."""
    size = microbatch_size(batch, microbatches)
    return [min(size, batch - start) for start in range(0, batch, size)]


def microbatch_factors(batch: int, microbatches: int) -> tuple[float, ...]:
    """Size of each microbatch as a share of the largest."""
    sizes = microbatch_sizes(batch, microbatches)
    return tuple(size / sizes[0] for size in sizes)


def microbatches_text(batch: int, microbatches: int) -> str:
    """A batch's microbatches as text: ``16 microbatches of 4``, ``3 microbatches of 2 and 1 of 1``."""
    size = microbatch_size(batch, microbatches)
    whole, rest = divmod(batch, size)
    return f"{plural(whole, 'microbatch', 'es')} of {size}" + (f" and 1 of {rest}" if rest else "")


def microbatch_mismatch(batch: int, replicas: int, microbatches: int | None, size: int | None) -> str:
    """A sentence that says why a requested number or size of microbatches is impossible; empty where it is possible.

    Args:
        batch: global; the replicas share it evenly.
        microbatches, size: requested values for one replica; at most one of them.
    """
    local, counts = batch // replicas, range(1, batch // replicas + 1)
    if microbatches is not None:
        name, requested = "microbatches", microbatches
        possible = {-(-local // microbatch_size(local, n)) for n in counts}
        cut = microbatches_text(local, microbatches)
    elif size is not None:
        name, requested = "microbatch_size", size
        possible = {microbatch_size(local, n) for n in counts}
        cut = microbatches_text(local, -(-local // size))
    else:
        return ""
    if requested in possible:
        return ""
    near = [*sorted(n for n in possible if n < requested)[-1:], *sorted(n for n in possible if n > requested)[:1]]
    whose = f"each of {replicas} replicas" if replicas > 1 else "the batch"
    return (
        f"{name}={requested} becomes {cut}: {whose} has {plural(local, 'sample')}, cut into parts of one size but "
        f"for the last, as torch.chunk cuts. Use {' or '.join(f'{name}={n}' for n in near)} to get what is asked for."
    )
