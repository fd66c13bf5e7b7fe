"""Times of the pieces of graphs: from the cache, or measured now in processes of their own."""

from __future__ import annotations

import pickle
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from autopar.errors import MeasuringWarning, UsageError, WorkerError
from autopar.ir.graph import Graph
from autopar.ir.hardware import Hardware
from autopar.ir.plan import CostSource
from autopar.ir.program import Program
from autopar.ir.units import percent, plural
from autopar.measure.device import RegionSetting, region_setting
from autopar.measure.machine.points import MAX_STEADY_SPREAD
from autopar.measure.regions.cache import TIMES as FROM_JSON
from autopar.measure.regions.cache import RegionTimes, TimesCache, cache_folder, digest
from autopar.measure.regions.progress import RegionProgressBar
from autopar.measure.regions.task import TASK_FILE, TIMES_FILE, RegionTask
from autopar.measure.regions.timed_regions import TimedRegion, timed_regions
from autopar.measure.workers import end, free_port, last_line, start
from autopar.runtime.launch.devices import describes
from autopar.runtime.launch.environment import launched
from autopar.runtime.launch.torch_settings import TorchSettings

WORKER = "autopar.measure.regions.worker"
POLL_SECONDS = 0.1
LIMIT_SECONDS = 600.0  # for one piece, compiling included

# Is told how many of how many pieces are measured, and of what.
ProgressCallback = Callable[[int, int, str], None]
MeasuredRegions = Sequence[tuple[tuple[str, ...], RegionTimes]]  # operations of each piece, and its times


class RegionTimer:
    """Times of graphs in one setting.

    Args:
        may_measure: else what is not in the cache stays unknown.
    """

    def __init__(
        self, setting: RegionSetting, cache: TimesCache, may_measure: bool, progress: ProgressCallback
    ) -> None:
        self.setting, self.cache = setting, cache
        self.may_measure, self.progress = may_measure, progress

    def times(
        self, graph: Graph, ranks: int, size: int, at_size: Callable[[], Graph], what: str
    ) -> MeasuredRegions | None:
        """The times of a graph's pieces with ``size`` samples, but those of pieces that no device has room for.

        Args:
            graph: traced with any number of samples.
            ranks: of its tensor-parallel axis.
            at_size: traces it with that many.
            what: the graph in words, for the progress.
        Returns:
            None where some are unknown and may not be measured.
        Raises:
            WorkerError: the process that measures failed; what it measured before is kept.
        """
        regions = tuple(timed_regions(graph))
        keys = [cache_key(p, ranks, graph.batch, size) for p in regions]
        known = {name: self.cache.get(name) for name in dict.fromkeys(keys)}
        if not all(known.values()):
            if not self.may_measure:
                return None
            sized_regions = regions if graph.batch == size else tuple(timed_regions(at_size()))
            assert [p.ops for p in sized_regions] == [p.ops for p in regions], "another batch size divides otherwise"
            found = self.measure(sized_regions, ranks, size, what)
            for name, piece in zip(keys, sized_regions):
                known[name] = found.get(piece.text)
                times = known[name]
                if times is not None and times.spread <= MAX_STEADY_SPREAD and graph.batch != size:
                    self.cache.put(name, times)
        return [(piece.ops, times) for piece, name in zip(regions, keys) if (times := known[name]) is not None]

    def measure(self, regions: Sequence[TimedRegion], ranks: int, size: int, what: str) -> Mapping[str, RegionTimes]:
        """Times by the text of a piece, measured where the cache has none."""
        keys = {p.text: cache_key(p, ranks, size, size) for p in regions}
        known = {text: times for text, name in keys.items() if (times := self.cache.get(name)) is not None}
        programs = {p.text: p.program for p in regions if p.text not in known}

        def keep(text: str, times: RegionTimes | None) -> None:
            if times is None:
                return
            known[text] = times
            if times.spread <= MAX_STEADY_SPREAD:
                self.cache.put(keys[text], times)

        self.run_workers(programs, ranks, keep, what)
        unsteady = max((known[text].spread for text in programs.keys() & known.keys()), default=0.0)
        if unsteady > MAX_STEADY_SPREAD:
            warnings.warn(
                f"Times of {what} lie up to {percent(unsteady, 0)} apart, so something else uses this device. They "
                "count in this plan and are not kept.",
                MeasuringWarning,
                stacklevel=2,
            )
        if left := len(programs.keys() - known.keys()):
            warnings.warn(
                f"{plural(left, 'piece')} of {what} need more memory than the device has free: priced by the cost "
                "model.",
                MeasuringWarning,
                stacklevel=2,
            )
        return known

    def run_workers(
        self, programs: Mapping[str, Program], ranks: int, keep: Callable[[str, RegionTimes | None], None], what: str
    ) -> None:
        """Measure programs in as many processes at once as the setting says.

        Raises:
            WorkerError: one failed, or took too long.
        """
        if not programs:
            return
        setting, texts = self.setting, list(programs)
        task = RegionTask(
            tuple((programs[text], ranks) for text in texts), setting.device_type, setting.execution_mode,
            setting.threads, TorchSettings.current(),
        )  # fmt: skip
        with tempfile.TemporaryDirectory(prefix="autopar-measuring-") as name:
            folders = [Path(name) / str(k) for k in range(setting.processes)]
            for folder in folders:
                folder.mkdir()
                (folder / TASK_FILE).write_bytes(pickle.dumps(task))
            processes: list[Any] = []
            try:
                for folder in folders:
                    processes.append(start(WORKER, folder, 0, 1, free_port(), setting.threads or None))
                done, deadline = 0, time.monotonic() + LIMIT_SECONDS
                self.progress(done, len(texts), what)
                while done < len(texts):
                    ended = [p.poll() for p in processes]
                    rows = [read_times(folder / TIMES_FILE) for folder in folders]
                    for k in range(done, min(map(len, rows))):
                        keep(texts[k], slowest([row[k] for row in rows]))
                        done, deadline = k + 1, time.monotonic() + LIMIT_SECONDS
                        self.progress(done, len(texts), what)
                    if done < len(texts) and (any(ended) or time.monotonic() > deadline):
                        self.fail(folders, ended, what)
                    time.sleep(POLL_SECONDS)
            finally:
                end(processes)
                self.progress(len(texts), len(texts), what)  # also ends what is shown of a failure or Ctrl-C

    def fail(self, folders: Sequence[Path], ended: Sequence[int | None], what: str) -> None:
        """Say why there is no measurement; raises WorkerError."""
        died = next((folder for folder, code in zip(folders, ended) if code), None)
        said = last_line((died or folders[0]) / "0.log")
        problem = "ended" if died else f"had no result in {LIMIT_SECONDS:.0f} s"
        raise WorkerError(
            f"The process that times {what} {problem}; it said last: {said}. What was measured before is kept in "
            f"{self.cache.folder}. Plan again, or with cost='analytic' (--cost analytic)."
        )


def cache_key(region: TimedRegion, ranks: int, traced: int, size: int) -> str:
    """A piece's name in the cache; of one that was traced with another number of samples than is meant, another."""
    samples = "" if traced == size else f"traced with {traced}, for {size} samples"
    return digest(region.text, f"{ranks} ranks", samples)


def read_times(path: Path) -> list[RegionTimes | None]:
    """What a process has left so far: its last line may not be whole."""
    if not path.exists():
        return []
    return [None if text == "null" else FROM_JSON.validate_json(text) for text in path.read_text().split("\n")[:-1]]


def slowest(process_times: Sequence[RegionTimes | None]) -> RegionTimes | None:
    """What several processes measured at the same time, of the slowest, as a step waits for that; nothing where one had
    no room."""
    times = [t for t in process_times if t is not None]
    if len(times) < len(process_times):
        return None
    return max(times, key=lambda t: t.forward_seconds + t.backward_seconds)


def region_timer_for(cost: CostSource, hardware: Hardware, devices: int, backend: str | None) -> RegionTimer | None:
    """What prices operations by measurements on the device at hand; None where the cost model prices them.

    Args:
        asked: with "auto" nothing is measured, and what was measured before is used.
        hardware: that the plan is for, running programs in the way that is measured.
    Raises:
        UsageError: "measured" is asked for on another device than the plan's, or under a launcher.
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
    """Why nothing is measured here for a machine; empty where it can be."""
    if (launch := launched()) is not None:
        return (
            f"{launch.launcher}'s processes would each measure. Make the plan before: autopar plan … --cost measured "
            "-o plan.json, and pass plan='plan.json'."
        )
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() and backend != "gloo" else None
    if gpu is None and hardware.device_type == "cuda":
        return f"cost model {hardware.name} is of {hardware.device} and there is no GPU here. Use cost='analytic'."
    if gpu is not None and hardware.device_type == "cpu":
        return f"cost model {hardware.name} is of processors and here is {gpu}. Pass backend='gloo' or a GPU's."
    if gpu is not None and not describes(hardware, gpu):
        return f"cost model {hardware.name} is of {hardware.device} and here is {gpu}. Use cost='analytic'."
    return ""
