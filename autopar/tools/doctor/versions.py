"""Versions of Python, torch and other packages, compared with autopar's bounds and with those that were tried."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import zip_longest

import autopar
from autopar.ir.units import first_few
from autopar.tools.doctor.finding import Finding, Probe, Subject

# Versions under which the benchmarks and the tests ran (docs/benchmarks.md); those of GPUs on NVIDIA H200.
TRIED: Mapping[str, Sequence[str]] = {
    "Python": ("3.11", "3.12"),
    "torch": ("2.11.0", "2.15.0"),
    "CUDA": ("13.0",),
    "driver": ("580.159",),
    "torchvision": ("0.26.0", "0.29.2"),
    "timm": ("1.0.29", "1.0.31"),
}
MIN_PYTHON = "3.11"
NAMED = ("torch", "torchvision", "timm")  # packages with a line of their own
VISION_REMEDY = "pip install 'autopar[vision]'"
REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?:\[[^]]*\])?(?P<bounds>[^;]*)")
BOUND = re.compile(r"(>=|<)\s*([\d.]+)")
MAX_NAMED = 4  # packages in a line


def package_versions(subject: Subject) -> Iterator[Finding]:
    """Findings on autopar, Python and all packages that autopar requires."""
    del subject
    yield Finding("versions", "autopar", "ok", autopar.__version__)
    yield against_bounds("Python", platform.python_version(), f">={MIN_PYTHON}", "Install a newer Python.")
    bounds = required()
    others: list[Finding] = []
    for name in dict.fromkeys((*NAMED, *bounds)):
        finding = package(name, bounds.get(name, ""))
        if name in NAMED or finding.status != "ok":
            yield finding
        else:
            others.append(finding)
    texts = [f"{finding.name} {finding.value}" for finding in others]
    if texts:
        yield Finding("versions", "other packages", "ok", first_few(texts, MAX_NAMED))
    if not bounds:
        yield Finding("versions", "requirements", "absent", "autopar runs from a folder, without metadata of a package")


def torch_libraries(subject: Subject) -> Iterator[Finding]:
    """Findings on the libraries that torch was built with."""
    del subject
    import torch
    import torch.distributed as dist
    from torch.cuda import nccl

    cuda = torch.version.cuda
    if cuda is None:
        yield Finding("versions", "CUDA", "absent", "this torch was built for CPU")
    else:
        yield Finding("versions", "CUDA", "ok", with_tried("CUDA", cuda))
        if dist.is_nccl_available():
            yield Finding("versions", "NCCL", "ok", ".".join(map(str, nccl.version())))
    if not dist.is_gloo_available():
        remedy = "Install a build of torch with Gloo, over which ranks agree and CPU processes send tensors."
        yield Finding("versions", "Gloo", "broken", "this torch was built without it", remedy)


def required() -> dict[str, str]:
    """Bounds of the packages that autopar requires or takes as an extra, by name: ``{"pulp": "<4,>=3.3"}``.

    Empty where autopar is not installed as a package.
    """
    try:
        texts = requires("autopar") or []
    except PackageNotFoundError:
        return {}
    bounds: dict[str, str] = {}
    for text in texts:
        match = REQUIREMENT.match(text)
        if match is not None and ("extra ==" not in text or match["name"] in NAMED):
            bounds.setdefault(match["name"], match["bounds"].strip())
    return bounds


def package(name: str, bounds: str) -> Finding:
    """Finding on an installed package, or one that is missing."""
    try:
        installed = version(name)
    except PackageNotFoundError:
        if name in ("timm", "torchvision"):
            return Finding("versions", name, "absent", f"not installed; its models need it: {VISION_REMEDY}")
        return Finding("versions", name, "broken", "not installed", f"pip install '{name}{bounds}'")
    return against_bounds(name, installed, bounds, f"pip install -U '{name}{bounds}'")


def against_bounds(name: str, installed: str, bounds: str, remedy: str) -> Finding:
    """Finding on a version: broken outside of its bounds, with a remark if it is newer than those that were tried."""
    for sign, limit in BOUND.findall(bounds):
        if (compared(installed, limit) >= 0) != (sign == ">="):
            need = "at least" if sign == ">=" else "less than"
            return Finding("versions", name, "broken", f"{installed}, and autopar needs {need} {limit}", remedy)
    return Finding("versions", name, "ok", with_tried(name, installed))


def with_tried(name: str, installed: str) -> str:
    """A version, with a remark if autopar was not tried with it."""
    tried = TRIED.get(name, ())
    if not tried or any(numbers(installed)[: len(numbers(one))] == numbers(one) for one in tried):
        return installed
    newest = tried[-1]
    if compared(installed, newest) > 0:
        return f"{installed}, newer than {newest}, the newest that autopar was tried with"
    return f"{installed}; autopar was tried with {' and '.join(tried)}"


def compared(release: str, other: str) -> int:
    """1, 0 or -1 for a release that is newer than another, equal to it, or older; 2.11 equals 2.11.0."""
    pairs = zip_longest(numbers(release), numbers(other), fillvalue=0)
    return next((1 if first > second else -1 for first, second in pairs if first != second), 0)


def numbers(text: str) -> tuple[int, ...]:
    """Numbers of a release without what follows them: ``(2, 11, 0)`` of 2.11.0+cu130."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match is not None else ()


TORCH_REMEDY = "Install torch again, by the command on pytorch.org for this machine."
PROBES = (
    Probe("versions", "packages", package_versions, "Install autopar again.", needs_torch=False),
    Probe("versions", "libraries of torch", torch_libraries, TORCH_REMEDY, limit_seconds=30.0),
)
