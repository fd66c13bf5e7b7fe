"""All findings on this machine, in the order of the page's sections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.cost.hardware.load import load_hardware
from autopar.errors import HardwareError, UsageError
from autopar.ir.hardware import Hardware
from autopar.ir.units import plural
from autopar.tools.doctor import disk, host, launcher, limits, variables, versions
from autopar.tools.doctor.attempt import findings_of, reason, within
from autopar.tools.doctor.finding import SECTIONS, STATUSES, Finding, Gpu, Probe, Status, Subject

if TYPE_CHECKING:
    from autopar.tools.doctor.gpu_processes import SeenGpus

CPU_DEVICES, MAX_CPU_DEVICES = 2, 8  # processes between which transfers are measured; all pairs are alike
IMPORT_SECONDS, GPU_SECONDS = 120.0, 120.0
DRIVER_REMEDY = "The driver does not answer to torch: run nvidia-smi, load the driver again or restart the machine."
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What is checked.

    Args:
        devices: between which transfers are measured; by default all GPUs, or two CPU processes.
        hardware: name or file of the cost model to compare with; by default that of this machine's device.
    """

    run_folder: Path = Path()
    devices: int | None = None
    hardware: str | None = None


@dataclass(frozen=True)
class Page:
    """Findings in the order of their sections."""

    findings: tuple[Finding, ...]

    @property
    def counts(self) -> dict[Status, int]:
        """Number of findings of each status."""
        numbers = Counter(finding.status for finding in self.findings)
        return {status: numbers[status] for status in STATUSES}

    @property
    def exit_code(self) -> int:
        """1 if something is broken, else 0."""
        return int(self.counts["broken"] > 0)


def checked_machine(request: Request, progress: Progress = lambda name: None) -> Page:
    """The page on this machine.

    Args:
        progress: called with the name of each probe before it runs.

    Raises:
        UsageError: the request names a run folder that is none, a cost model that cannot be read, or more devices than
            there are.
    """
    if not request.run_folder.is_dir():
        raise UsageError(
            f"--run-folder {request.run_folder} is no folder. Give one that exists; runs are written there."
        )
    given = load_hardware(request.hardware) if request.hardware is not None else None
    subject = Subject((), request.devices or CPU_DEVICES, given, request.run_folder)
    findings = sorted(all_findings(request, subject, progress), key=lambda finding: SECTIONS.index(finding.section))
    return Page(tuple(findings))


def all_findings(request: Request, subject: Subject, progress: Progress) -> Iterator[Finding]:
    """Findings in the order of probing. Raises as `checked_machine`."""
    progress("torch")
    try:
        within(IMPORT_SECONDS, import_torch)
    except Exception as error:  # torch has many ways to fail at its import
        yield Finding("versions", "import of torch", "broken", reason(error), versions.TORCH_REMEDY)
        probes = (*versions.PROBES, *limits.PROBES, *launcher.PROBES, *host.PROBES, *variables.PROBES, *disk.PROBES)
        yield from probed([probe for probe in probes if not probe.needs_torch], subject, progress)
        yield Finding("devices", "all else", "absent", "not checked, since torch cannot be imported")
        return
    from autopar.tools.doctor import devices, in_processes

    yield from probed([devices.PROCESSOR], subject, progress)  # while nothing of this command computes
    in_processes.start_server()  # imports torch while the following probes run
    quick = (*versions.PROBES, *limits.PROBES, *launcher.PROBES, *host.PROBES, *variables.PROBES)
    yield from probed(quick, subject, progress)
    started = probed([host.START], subject, progress)
    yield from started
    if started[0].status != "broken":
        yield from on_devices(request, subject, progress)
    else:
        yield Finding("devices", "all else", "absent", "not checked, since worker processes do not start")
    yield from probed(disk.PROBES, subject, progress)


def on_devices(request: Request, subject: Subject, progress: Progress) -> Iterator[Finding]:
    """Findings that need processes or devices. Raises a UsageError for more devices than there are."""
    from autopar.tools.doctor import compiler, devices, links, planning

    progress("GPUs")
    gpus: tuple[Gpu, ...] = ()
    try:
        seen = within(GPU_SECONDS, devices.seen_gpus)
        gpus = seen.gpus
        yield from findings_of(presence_probe(seen), subject)
    except Exception as error:  # to report it is the result
        yield Finding("devices", "GPUs", "broken", reason(error), DRIVER_REMEDY)
    number = num_devices(request, len(gpus))
    hardware = subject.hardware or default_hardware(gpus)
    subject = replace(subject, gpus=gpus, devices=number, hardware=hardware)
    probes = (
        *devices.PROBES, *links.PROBES, links.transfer_probe(number), *compiler.PROBES, *planning.PROBES
    )  # fmt: skip
    yield from probed(probes, subject, progress)


def import_torch() -> None:
    """Import torch. Raises what its import raises."""
    import torch  # noqa: F401


def presence_probe(seen: SeenGpus) -> Probe:
    """Probe that compares GPUs that torch sees with nvidia-smi's."""
    from autopar.tools.doctor import devices

    return Probe("devices", "GPUs", lambda subject: devices.presence(seen), DRIVER_REMEDY, limit_seconds=30.0)


def probed(probes: Iterable[Probe], subject: Subject, progress: Progress) -> list[Finding]:
    """Findings of probes, one probe after the other."""
    findings: list[Finding] = []
    for probe in probes:
        progress(f"{probe.section}: {probe.name}")
        findings += findings_of(probe, subject)
    return findings


def num_devices(request: Request, gpus: int) -> int:
    """Number of devices between which transfers are measured.

    Raises:
        UsageError: more were requested than there are.
    """
    if request.devices is None:
        return gpus or CPU_DEVICES
    if gpus and request.devices > gpus:
        raise UsageError(f"--devices {request.devices}, but torch sees {plural(gpus, 'GPU')}. Give {gpus} at most.")
    if not gpus and request.devices > MAX_CPU_DEVICES:
        raise UsageError(
            f"--devices {request.devices}, but there is no GPU, and transfers between more than {MAX_CPU_DEVICES} "
            "CPU processes say nothing new. Give fewer, or leave it out."
        )
    return request.devices


def default_hardware(gpus: tuple[Gpu, ...]) -> Hardware | None:
    """Cost model that autopar would choose for this machine; None if the installation has none."""
    from autopar.runtime.launch.devices import DEFAULT_GPU_COST_MODEL, Machine, default_hardware_name, gpu_cost_model

    try:
        if gpus:
            return load_hardware(gpu_cost_model(gpus[0].name) or DEFAULT_GPU_COST_MODEL)
        return load_hardware(default_hardware_name(Machine("gloo", "cpu", 1, None)))
    except HardwareError:  # the probe of the cost model says so
        return None
