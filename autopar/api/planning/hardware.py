"""The machine to plan for: one cost model for all ranks, with the memory that each of them has."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

from autopar.api.options import Options
from autopar.cost.hardware.load import load_hardware
from autopar.errors import UsageError, caller_level
from autopar.ir.hardware import Hardware
from autopar.ir.units import BYTES, text
from autopar.runtime.launch.devices import Machine, RankDevice, default_hardware_name

MAX_NAMED = 4  # ranks that a message lists for each device
# Relative difference of two ranks' memory that is no difference: firmware and drivers reserve a little of it.
MEMORY_TOLERANCE = 0.02


def planning_hardware(machine: Machine, options: Options, devices: Sequence[RankDevice]) -> Hardware:
    """The cost model to plan with, by default that of the ranks' device.

    Its memory is the file's; for CPU processes without ``hardware=`` it is the host's, shared equally. If some ranks
    have clearly less memory than others, it is at most theirs.

    Args:
        devices: of each rank.

    Raises:
        UsageError: the ranks have different devices, and ``hardware=`` does not say for which to plan.
    """
    if options.hardware is None:
        check_same_devices(devices)
    hardware = machine.described(load_hardware(options.hardware or default_hardware_name(machine)))
    smallest, largest = (limit(device.memory_bytes for device in devices) for limit in (min, max))
    if options.hardware is not None:
        machine.warn_of_other_gpus(hardware, [device.name for device in devices])
    elif machine.device_type == "cpu":
        hardware = replace(hardware, memory_bytes=smallest)
    if largest <= smallest * (1 + MEMORY_TOLERANCE):
        return hardware
    if options.memory is None:
        least = ranks_text([rank for rank, device in enumerate(devices) if device.memory_bytes == smallest])
        warnings.warn(
            f"The ranks have from {text(smallest, BYTES)} ({least}) to {text(largest, BYTES)} of memory: all are "
            "planned for the least. Pass memory= to plan for another amount.",
            stacklevel=caller_level(),
        )
    return replace(hardware, memory_bytes=min(hardware.memory_bytes, smallest))


def check_same_devices(devices: Sequence[RankDevice]) -> None:
    """Raise a UsageError if ranks have devices of different names."""
    names = [device.name for device in devices]
    if len(set(names)) > 1:
        listed = "; ".join(
            f"{name} on {ranks_text([rank for rank, other in enumerate(names) if other == name])}"
            for name in dict.fromkeys(names)
        )
        raise UsageError(
            f"The {len(names)} ranks have different devices: {listed}. A plan prices all ranks alike. Start them on "
            "equal devices, or pass hardware= with the cost model to plan for, that of the slowest."
        )


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0, 1``, or the first few and the number of all."""
    listed = ", ".join(map(str, ranks[:MAX_NAMED]))
    more = f", … ({len(ranks)} in all)" if len(ranks) > MAX_NAMED else ""
    return f"rank{'' if len(ranks) == 1 else 's'} {listed}{more}"
