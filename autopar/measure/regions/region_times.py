"""Times of a graph's regions: from the cache, or measured now in worker processes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

import torch

from autopar.errors import MeasuringWarning, UsageError, WorkerError
from autopar.ir.graph import Graph
from autopar.ir.hardware import Hardware
from autopar.ir.plan_parts import CostSource
from autopar.ir.program import Program
from autopar.ir.units import percent, plural
from autopar.measure.device import RegionSetting, region_setting
from autopar.measure.machine.points import MAX_STEADY_SPREAD
from autopar.measure.regions.cache import RegionTimes, TimesCache, cache_folder, digest
from autopar.measure.regions.progress import RegionProgressBar
from autopar.measure.regions.task import RegionTask
from autopar.measure.regions.timed_regions import TimedRegion, timed_regions
from autopar.measure.workers import WorkerLimits, run_workers
from autopar.runtime.launch.devices import describes
from autopar.runtime.launch.torch_settings import TorchSettings

WORKER = "autopar.measure.regions.worker:run"
LIMIT_SECONDS = 600.0  # for one region, compilation included

ProgressCallback = Callable[[int, int, str], None]  # (regions done, regions in all, description)
MeasuredRegions = Sequence[tuple[tuple[str, ...], RegionTimes]]  # names of each region's operations, and its times


class RegionTimer:
    """Times of graphs in one setting.

    Args:
        may_measure: whether regions that are not in the cache are measured.
    """

    def __init__(
        self, setting: RegionSetting, cache: TimesCache, may_measure: bool, progress: ProgressCallback
    ) -> None:
        self.setting, self.cache = setting, cache
        self.may_measure, self.progress = may_measure, progress

    def times(
        self, graph: Graph, ranks: int, size: int, at_size: Callable[[], Graph], what: str
    ) -> MeasuredRegions | None:
        """Times of a graph's regions with ``size`` samples, except for regions that do not fit in memory.

        Args:
            graph: traced with any number of samples.
            ranks: of its tensor-parallel axis.
            at_size: traces the graph with ``size`` samples.
            what: the graph in words, for the progress.
        Returns:
            None if a region is not in the cache and may not be measured.
        Raises:
            WorkerError: a worker process failed; regions measured before that are in the cache.
        """
        regions = tuple(timed_regions(graph))
        keys = [cache_key(region, ranks, graph.batch, size) for region in regions]
        times_by_key = {key: self.cache.get(key) for key in dict.fromkeys(keys)}
        if not all(times_by_key.values()):
            if not self.may_measure:
                return None
            sized_regions = regions if graph.batch == size else tuple(timed_regions(at_size()))
            same_ops = [r.ops for r in sized_regions] == [r.ops for r in regions]
            assert same_ops, "the graph has other regions at another batch size"
            measured = self.measure(sized_regions, ranks, size, what)
            for key, region in zip(keys, sized_regions):
                times = times_by_key[key] = measured.get(region.text)
                if times is not None and times.spread <= MAX_STEADY_SPREAD and graph.batch != size:
                    self.cache.put(key, times)
        return [(r.ops, times) for r, key in zip(regions, keys) if (times := times_by_key[key]) is not None]

    def measure(self, regions: Sequence[TimedRegion], ranks: int, size: int, what: str) -> Mapping[str, RegionTimes]:
        """Times by the region's text, measured if the cache has none."""
        keys = {region.text: cache_key(region, ranks, size, size) for region in regions}
        times_by_text = {text: times for text, key in keys.items() if (times := self.cache.get(key)) is not None}
        programs = {region.text: region.program for region in regions if region.text not in times_by_text}

        def keep(text: str, times: RegionTimes | None) -> None:
            if times is None:
                return
            times_by_text[text] = times
            if times.spread <= MAX_STEADY_SPREAD:
                self.cache.put(keys[text], times)

        self.measure_programs(programs, ranks, keep, what)
        unsteady = max((times_by_text[text].spread for text in programs.keys() & times_by_text.keys()), default=0.0)
        if unsteady > MAX_STEADY_SPREAD:
            warnings.warn(
                f"Times of {what} lie up to {percent(unsteady, 0)} apart, so something else uses this device. They "
                "count in this plan and are not kept.",
                MeasuringWarning,
                stacklevel=2,
            )
        if num_missing := len(programs.keys() - times_by_text.keys()):
            warnings.warn(
                f"{plural(num_missing, 'region')} of {what} need more memory than the device has free: priced by the "
                "cost model.",
                MeasuringWarning,
                stacklevel=2,
            )
        return times_by_text

    def measure_programs(
        self, programs: Mapping[str, Program], ranks: int, keep: Callable[[str, RegionTimes | None], None], what: str
    ) -> None:
        """Time programs in as many simultaneous processes as the setting says, and call ``keep`` with each result.

        Raises:
            WorkerError: a process failed, or took too long.
        """
        if not programs:
            return
        setting, texts = self.setting, list(programs)
        task = RegionTask(
            tuple((programs[text], ranks) for text in texts), setting.device_type, setting.execution_mode,
            setting.threads, TorchSettings.current(),
        )  # fmt: skip
        results: list[list[RegionTimes | None]] = [[] for _ in range(setting.processes)]
        done = 0

        def on_result(rank: int, times: RegionTimes | None) -> bool:
            nonlocal done
            results[rank].append(times)
            if min(map(len, results)) == done:
                return False
            keep(texts[done], slowest([own[done] for own in results]))
            done += 1
            self.progress(done, len(texts), what)
            return True

        self.progress(0, len(texts), what)
        try:
            exit = run_workers(
                WORKER, task, setting.processes, setting.threads or None, WorkerLimits(LIMIT_SECONDS), on_result,
                name="measuring",
            )  # fmt: skip
        finally:
            self.progress(len(texts), len(texts), what)  # also removes the bar after a failure or Ctrl-C
        if done < len(texts):
            problem = f"had no result in {LIMIT_SECONDS:.0f} s" if exit.timed_out else "ended"
            last_line = exit.last_lines[exit.failed_rank or 0]
            raise WorkerError(
                f"The process that times {what} {problem}; it said last: {last_line}. What was measured before is kept "
                f"in {self.cache.folder}. Plan again, or with cost='analytic' (--cost analytic)."
            )


def cache_key(region: TimedRegion, ranks: int, traced: int, size: int) -> str:
    """A region's name in the cache.

    Args:
        traced: samples with which the region was traced.
        size: samples that the times are for. The text of a region traced with another number says too little.
    """
    samples = "" if traced == size else f"traced with {traced}, for {size} samples"
    return digest(region.text, f"{ranks} ranks", samples)


def slowest(process_times: Sequence[RegionTimes | None]) -> RegionTimes | None:
    """The times of the slowest of simultaneous processes, for which a step would wait; None if one lacked memory."""
    times = [t for t in process_times if t is not None]
    if len(times) < len(process_times):
        return None
    return max(times, key=lambda t: t.forward_seconds + t.backward_seconds)


def region_timer_for(cost: CostSource, hardware: Hardware, devices: int, backend: str | None) -> RegionTimer | None:
    """The timer that prices operations by measurements on this machine's device; None if the cost model prices them.

    Args:
        cost: with "auto" nothing is measured, but earlier measurements are used.
        devices: number of ranks that will train, on all nodes.
        hardware: the plan's machine, with the execution mode that is measured.
    Raises:
        UsageError: "measured" is requested for another device than this machine's.
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
    return (
        None
        if cache.is_empty and cost == "auto"
        else RegionTimer(setting, cache, cost == "measured", RegionProgressBar())
    )


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
