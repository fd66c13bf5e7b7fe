"""Times of a graph's regions: from the cache, or measured now in worker processes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan
from time import monotonic

import torch

from autopar.errors import SEE_DOCTOR, MeasuringWarning, UsageError, WorkerError, caller_level
from autopar.ir.hardware import Hardware
from autopar.ir.plan_parts import CostSource
from autopar.ir.program import Program
from autopar.ir.status import doing
from autopar.ir.tensor_axes import TensorAxes
from autopar.ir.units import percent, plural
from autopar.measure.device import RegionSetting, region_setting
from autopar.measure.machine.points import MAX_STEADY_SPREAD
from autopar.measure.regions.cache import RegionTimes, TimesCache, cache_folder, digest
from autopar.measure.regions.timed_regions import RegionTask, TimedRegion
from autopar.measure.workers import WorkerLimits, run_workers
from autopar.runtime.launch.devices import describes
from autopar.runtime.launch.torch_settings import TorchSettings

WORKER = "autopar.measure.regions.timing:run"
LIMIT_SECONDS = 600.0  # for one region, compilation included
MAX_FAILURES = 3  # processes that fail within a budget, before no more are started
BUDGET_VARIABLE = "AUTOPAR_MEASURE_SECONDS"
BUDGET_SECONDS = {"cuda": 30.0, "cpu": 0.0}  # of cost="auto"; processors would seldom finish a region in that time

ProgressCallback = Callable[[int, int, str], None]  # (regions done, regions in all, description)
SizedProgram = tuple[Program, TensorAxes]  # a region traced with the samples that are timed, and its tensor axes


@dataclass(frozen=True)
class WantedRegion:
    """A region that may be timed.

    Args:
        key: `cache_key` of the region as it was traced.
        axes: its tensor axes.
        size: samples.
        at_size: the region traced with so many samples; None if it cannot be.
    """

    key: str
    axes: TensorAxes
    size: int
    at_size: Callable[[], TimedRegion | None]


class RegionTimer:
    """Times of regions in one setting.

    Args:
        budget_seconds: time that all calls of `times` may take together. Without a limit every region is to be timed:
            a failure is an error, and times that lie apart count.
    """

    def __init__(
        self, setting: RegionSetting, cache: TimesCache, progress: ProgressCallback, budget_seconds: float = inf
    ) -> None:
        self.setting, self.cache, self.progress = setting, cache, progress
        self.budget_seconds, self.spent_seconds = budget_seconds, 0.0

    @property
    def left_seconds(self) -> float:
        """Time that is left of the budget."""
        return max(0.0, self.budget_seconds - self.spent_seconds)

    def times(self, wanted: Sequence[WantedRegion], what: str) -> Mapping[str, RegionTimes | None]:
        """Times of the first regions, as many as the budget allows, by `WantedRegion.key`: those on disk, or measured.

        Regions have None that cannot be traced or do not fit in memory. Within a budget, so have regions that fail, or
        whose times lie apart; a `MeasuringWarning` counts them. Times are put on disk unless they lie apart.
        Tracing with other samples counts as measuring. So that it does not take all of the time, the regions that are
        traced in the first half of what is left are timed before more are traced. A trace that has begun ends.

        Args:
            what: the regions in words, for progress and warnings.
        Raises:
            WorkerError: a process failed, without a budget; times that were measured before are on disk.
            UsageError: times cannot be written to disk, without a budget.
        """
        start = monotonic()
        deadline = start + self.left_seconds
        found: dict[str, RegionTimes | None] = {
            region.key: known for region in wanted if (known := self.cache.get(region.key)) is not None
        }
        waiting = [region for region in wanted if region.key not in found]
        measured: dict[str, RegionTimes | None] = {}  # by the key of the region at its size
        failures: list[str] = []
        try:
            while waiting and (now := monotonic()) < deadline:
                sized_keys: dict[str, str] = {}
                programs: dict[str, SizedProgram] = {}
                while waiting and (not sized_keys or monotonic() < (now + deadline) / 2):
                    region = waiting.pop(0)
                    sized = region.at_size()
                    if sized is None:
                        found[region.key] = None
                        continue
                    key = sized_keys[region.key] = cache_key(sized, region.axes, region.size, region.size)
                    if key not in measured and (times := self.cache.get(key)) is not None:
                        measured[key] = times
                    elif key not in measured:
                        programs[key] = sized.program, region.axes
                failures += self.measure_until(programs, measured, what, deadline)
                for key, sized_key in sized_keys.items():
                    if sized_key in measured:
                        found[key] = measured[sized_key]
                        self.keep(key, found[key])
        except UsageError as error:
            if self.budget_seconds == inf:
                raise
            warnings.warn(str(error), MeasuringWarning, stacklevel=caller_level())
        self.spent_seconds += monotonic() - start
        warn_of_times(measured, what, failures, are_used=self.budget_seconds == inf)
        if self.budget_seconds == inf:
            return found
        return {key: None if is_unsteady(times) else times for key, times in found.items()}

    def keep(self, key: str, times: RegionTimes | None) -> None:
        """Put times into the cache, unless something else used the device."""
        if times is not None and not is_unsteady(times):
            self.cache.put(key, times)

    def measure_until(
        self, programs: Mapping[str, SizedProgram], measured: dict[str, RegionTimes | None], what: str, deadline: float
    ) -> list[str]:
        """Time programs in order until the deadline of the clock; returns a line for each that failed.

        A process that fails takes no other region with it: the next process begins after the region that failed.

        Raises:
            WorkerError: as `times`.
        """

        def keep(key: str, times: RegionTimes | None) -> None:
            self.keep(key, times)
            measured[key] = times

        failures: list[str] = []
        waiting = dict(programs)
        while waiting and (left := deadline - monotonic()) > 0 and len(failures) < MAX_FAILURES:
            failure = self.measure_programs(waiting, keep, what, left)
            if failure and self.budget_seconds == inf:
                raise WorkerError(
                    f"{failure} What was measured before is kept in {self.cache.folder}. Plan again, or with "
                    f"cost='analytic' (--cost analytic). {SEE_DOCTOR}"
                )
            if failure:
                failures.append(failure)
                measured[next(key for key in waiting if key not in measured)] = None
            waiting = {key: program for key, program in waiting.items() if key not in measured}
        return failures

    def measure_programs(
        self,
        programs: Mapping[str, SizedProgram],
        keep: Callable[[str, RegionTimes | None], None],
        what: str,
        limit_seconds: float,
    ) -> str:
        """Time programs in as many simultaneous processes as the setting says, and call ``keep`` with each result.

        Args:
            limit_seconds: time after which no more programs are timed.

        Returns:
            A sentence if a process failed, or took too long for one program; else an empty text.
        """
        setting, keys = self.setting, list(programs)
        task = RegionTask(
            tuple(programs.values()), setting.device_type, setting.execution_mode, setting.threads,
            TorchSettings.current(),
        )  # fmt: skip
        results: list[list[RegionTimes | None]] = [[] for _ in range(setting.processes)]
        done = 0

        def on_result(rank: int, times: RegionTimes | None) -> bool:
            nonlocal done
            results[rank].append(times)
            if min(map(len, results)) == done:
                return False
            keep(keys[done], slowest([own[done] for own in results]))
            done += 1
            self.progress(done, len(keys), shown)
            return True

        limits, end = WorkerLimits(LIMIT_SECONDS, total_seconds=limit_seconds), monotonic() + limit_seconds
        shown = what if limit_seconds == inf else f"{what} for at most {limit_seconds:.0f} s"
        self.progress(0, len(keys), shown)
        exit = run_workers(
            WORKER, task, setting.processes, setting.threads or None, limits, on_result, name="measuring"
        )
        if done < len(keys) and not (exit.timed_out and monotonic() >= end):
            problem = f"had no result in {LIMIT_SECONDS:.0f} s" if exit.timed_out else "ended"
            last_line = exit.last_lines[exit.failed_rank or 0]
            return f"The process that times {what} {problem}; it said last: {last_line.removesuffix('.')}."
        return ""


def have_same_ops(regions: Sequence[TimedRegion], others: Sequence[TimedRegion]) -> bool:
    """Whether two sequences of regions are of the same operations."""
    return [region.ops for region in regions] == [region.ops for region in others]


def is_unsteady(times: RegionTimes | None) -> bool:
    """Whether something else used the device while a region was timed."""
    return times is not None and times.spread > MAX_STEADY_SPREAD


def warn_of_times(times: Mapping[str, RegionTimes | None], what: str, failures: Sequence[str], are_used: bool) -> None:
    """Warn of times that lie apart, and of regions that have none.

    Args:
        times: None for regions that do not fit in memory, or failed.
        failures: a line for each region that failed.
        are_used: whether times that lie apart count.
    """
    apart = [own.spread for own in times.values() if own is not None and is_unsteady(own)]
    num_missing = list(times.values()).count(None) - len(failures)
    said: list[str] = []
    if apart:
        effect = ". They count in this plan and are not kept." if are_used else ": priced by the cost model."
        said.append(
            f"Times of {plural(len(apart), 'region')} of {what} lie up to {percent(max(apart), 0)} apart, so something "
            f"else uses this device{effect}"
        )
    if num_missing:
        said.append(
            f"{plural(num_missing, 'region')} of {what} need more memory than the device has free: priced by the cost "
            "model."
        )
    if failures:
        said.append(
            f"{plural(len(failures), 'region')} of {what} cannot be timed: priced by the cost model. {failures[0]}"
        )
    for message in said:
        warnings.warn(message, MeasuringWarning, stacklevel=caller_level())


def cache_key(region: TimedRegion, axes: TensorAxes, traced: int, size: int) -> str:
    """A region's name in the cache.

    Args:
        traced: samples with which the region was traced.
        size: samples that the times are for. The text of a region traced with another number says too little.
    """
    samples = "" if traced == size else f"traced with {traced}, for {size} samples"
    ranks = " × ".join(str(axis.ranks) for axis in axes) or "1"
    return digest(region.text, f"{ranks} ranks", samples)


def slowest(process_times: Sequence[RegionTimes | None]) -> RegionTimes | None:
    """The times of the slowest of simultaneous processes, for which a step would wait; None if one lacked memory."""
    times = [t for t in process_times if t is not None]
    if len(times) < len(process_times):
        return None
    return max(times, key=lambda t: t.forward_seconds + t.backward_seconds)


def region_timer_for(
    cost: CostSource, measure_seconds: float | None, hardware: Hardware, devices: int, backend: str | None
) -> RegionTimer | None:
    """The timer that prices operations by measurements on this machine's device; None if the cost model prices them.

    Args:
        cost, measure_seconds: as in `autopar.ir.plan_constraints.PlanConstraints`.
        devices: number of ranks that will train, on all nodes.
        hardware: the plan's machine, with the execution mode that is measured.
    Raises:
        UsageError: "measured" is requested for another device than this machine's, or AUTOPAR_MEASURE_SECONDS is wrong.
    """
    if cost == "analytic":
        return None
    problem = device_mismatch(hardware, backend)
    if problem and cost == "measured":
        raise UsageError(f"cost='measured' (--cost measured) times operations on the device at hand, but {problem}")
    if problem:
        return None
    setting = region_setting(hardware.device_type, hardware.execution_mode, devices)
    cache = TimesCache(cache_folder(), setting.text)
    budget_seconds = inf if cost == "measured" else budget(measure_seconds, hardware.device_type)
    return None if cache.is_empty and not budget_seconds else RegionTimer(setting, cache, show_progress, budget_seconds)


def budget(measure_seconds: float | None, device_type: str) -> float:
    """Seconds that "auto" may take: those given, or those in the environment, or the default of a device type.

    Raises:
        UsageError: the environment's are no number of at least 0.
    """
    if measure_seconds is not None:
        return measure_seconds
    given = os.environ.get(BUDGET_VARIABLE) or str(BUDGET_SECONDS[device_type])
    try:
        seconds = float(given)
    except ValueError:
        seconds = nan
    if not 0 <= seconds < inf:
        raise UsageError(f"{BUDGET_VARIABLE}={given} must be a number of seconds of at least 0.")
    return seconds


def device_mismatch(hardware: Hardware, backend: str | None) -> str:
    """Why times measured on this machine do not hold for a cost model's; empty if they do."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() and backend != "gloo" else None
    if gpu is None and hardware.device_type == "cuda":
        return f"cost model {hardware.name} is of {hardware.device} and there is no GPU here. Use cost='analytic'."
    if gpu is not None and hardware.device_type == "cpu":
        return f"cost model {hardware.name} is of processors and here is {gpu}. Pass backend='gloo' or a GPU's."
    if gpu is not None and not describes(hardware, gpu):
        return f"cost model {hardware.name} is of {hardware.device} and here is {gpu}. Use cost='analytic'."
    return ""


def show_progress(done: int, total: int, what: str) -> None:
    """The progress callback of a `RegionTimer` that changes the status."""
    doing(f"timing regions of {what}: {done} of {total} done")
