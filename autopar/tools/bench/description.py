"""Plans, results and machines on one line each, for tables, progress and records."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
from contextlib import suppress
from pathlib import Path

import torch

from autopar.ir.plan import Plan
from autopar.ir.units import TIME, plural, text
from autopar.runtime.launch.devices import Machine
from autopar.tools.bench.row import BenchRow


def plan_label(plan: Plan) -> str:
    """The plan's mesh, schedule and microbatches: ``pp 2 × dp 2, 1f1b, 4 microbatches of 8``."""
    mesh = plan.mesh
    axes = [f"{name} {size}" for name, size in (("pp", mesh.pp), ("tp", mesh.tp), ("dp", mesh.dp)) if size > 1]
    chunks = f" × {plan.chunks}" if plan.chunks > 1 else ""
    extra = [f"{plan.schedule}{chunks}"] if mesh.pp > 1 else []
    extra += [plan.replicas.zero_text] if plan.zero else []
    levels = {stage.recompute for stage in plan.stages}
    extra += ["recomputing" if levels == {"all"} else "recomputing in part"] if levels != {"none"} else []
    cut = f"{plural(plan.microbatches, 'microbatch', 'es')} of {plan.microbatch_size}"
    return ", ".join([" × ".join(axes) or "1 device", *extra, cut])


def outcome_text(row: BenchRow) -> str:
    """A row's step time and rate, or the reason why it has none."""
    if row.median_seconds is None or row.samples_per_second is None:
        return row.reason or ""
    return f"{text(row.median_seconds, TIME)} a step, {row.samples_per_second:,.1f} samples/s"


def machine_text(machine: Machine, devices: int) -> str:
    """Devices and versions, for the record."""
    cpu = f"{platform.machine()} CPU, {plural(machine.num_threads, 'thread')} a process"
    device = f"{devices} × {torch.cuda.get_device_name()}" if machine.device_type == "cuda" else cpu
    return f"{device}, torch {torch.__version__}, Python {platform.python_version()}"


def commit() -> str | None:
    """The commit of autopar if it runs from a checkout or was installed from one."""
    root = Path(__file__).parents[3]
    if (root / ".git").exists():
        with suppress(OSError, subprocess.CalledProcessError):
            command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
            return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
    with suppress(importlib.metadata.PackageNotFoundError, json.JSONDecodeError):
        origin = importlib.metadata.distribution("autopar").read_text("direct_url.json")
        return json.loads(origin or "{}").get("vcs_info", {}).get("commit_id")
    return None
