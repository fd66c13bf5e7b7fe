"""Choice of ``--loader``: images decoded by loader processes or by the GPU, the faster one of both by measurement."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from time import perf_counter

from autopar.api.model import ParallelModel
from autopar.errors import UsageError
from autopar.ir.units import plural
from autopar.runtime.launch.devices import this_machine
from autopar.tools.cli.output import remark
from autopar.tools.cli.train_request import Run
from autopar.train import Data, PartLoader, is_rank_zero, read_run
from autopar.train.data.device_samples import check_device_images

CPU, GPU, AUTO = "cpu", "gpu", "auto"
SETTING = "--loader"  # in a checkpoint's settings, if it is not CPU
ROUNDS, MAX_SECONDS = 3, 10.0  # batches of each loader process that are timed, and limit of a measurement

MakeLoader = Callable[[bool], PartLoader]


def possible_loader(asked: Run, data: Data) -> str:
    """The loader that is asked for; ``cpu`` in place of ``auto`` where the GPU is no choice.

    Raises:
        UsageError: the flag has an unknown value, or ``gpu`` is impossible; says why.
    """
    loader = asked.data.loader
    if loader not in (CPU, GPU, AUTO):
        raise UsageError(f"--loader {loader} is unknown. It is one of {CPU}, {GPU}, {AUTO}.")
    if loader == CPU:
        return CPU
    try:
        check_device_images(data.train, data.form, asked.augmentation.augmentation(data.augmentation))
        if this_machine(backend=asked.constraints.get("backend")).device_type == "cpu":
            raise UsageError("--loader gpu needs a GPU, and this run has none. Leave it out.")
    except UsageError:
        if loader == GPU:
            raise
        return CPU
    return loader


def resumed_loader(possible: str, asked: Run, checkpoint: Path) -> str:
    """Loader of the run that wrote a checkpoint, which a resumed run keeps: pixels of decoders differ slightly.

    Args:
        possible: as by `possible_loader`.

    Raises:
        UsageError: another one is asked for, or it is impossible here.
    """
    before = read_run(checkpoint).settings.get(SETTING, CPU)
    if asked.data.loader not in (AUTO, before):
        raise UsageError(
            f"Checkpoint {checkpoint} is of a run with --loader {before}, and pixels differ slightly between decoders. "
            f"Give --loader {before} or {AUTO}."
        )
    if before == GPU and possible == CPU:
        raise UsageError(
            f"Checkpoint {checkpoint} is of a run with --loader gpu, which is impossible here: this run has no GPU, or "
            "its augmentation has changed. Resume it as it was."
        )
    return before


def faster_loader(pm: ParallelModel, make: MakeLoader, workers: int) -> str:
    """The loader with which training is faster, by the images a second of all data ranks; prints both.

    All ranks of torchrun call it. Either makes images while the GPU trains.

    Args:
        make: loader of this rank's part of the batches; True lets the GPU decode.
        workers: loader processes of a rank.

    Raises:
        UsageError: an image cannot be read.
    """
    impossible, by_device, by_processes = "", 0.0, 0.0
    if pm.needs_inputs:
        try:
            loader = make(True)
        except UsageError as error:
            impossible = str(error)
        else:
            images_per_second(loader, workers)  # afterwards the files are in memory for both
            by_device = images_per_second(loader, workers)
            del loader  # ends its processes
        by_processes = images_per_second(make(False), workers)
    gpu, cpu = pm.data_sum([by_device, by_processes])
    trained = pm.plan.prediction.samples_per_second
    chosen = GPU if min(gpu, trained) > cpu else CPU
    if is_rank_zero():
        processes = f"{cpu:,.0f} on CPU with {plural(workers, 'worker')}"
        if chosen == GPU:
            reason = f"{gpu:,.0f} images/s against {processes}"
        elif gpu > cpu:
            reason = f"{processes}, {gpu:,.0f} images/s on the GPU, and training takes {trained:,.0f}"
        else:
            reason = impossible or f"{processes}, {gpu:,.0f} images/s on the GPU"
        remark(f"loader      {chosen}: {reason}\n")
    return chosen


def images_per_second(loader: PartLoader, workers: int) -> float:
    """Images of this rank's part that a loader makes in a second after its first batch; 0 without a second batch."""
    images, start, seconds = 0, 0.0, 0.0
    with closing(loader.epoch(1)) as batches:  # type: ignore[type-var]  # a generator
        for number, batch in enumerate(batches):
            if number == 0:  # processes have started
                start = perf_counter()
                continue
            images, seconds = images + batch.count, perf_counter() - start
            if number >= ROUNDS * max(workers, 1) or seconds > MAX_SECONDS:
                break
    return images / seconds if images else 0.0
