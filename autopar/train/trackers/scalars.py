"""Figures of reports under the names that all trackers use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from autopar.train.run.reports import EpochReport, RunPosition, StepReport

STEPS, EPOCHS = "train", "epoch"  # groups of names
UPDATE, EPOCH = "train/update", "epoch/epoch"  # figures that tell how far a run was logged


def scalars(group: str, report: StepReport | EpochReport) -> dict[str, float]:
    """Figures of a report by name, such as ``train/loss``.

    Names are the fields of ``steps.jsonl`` and ``history.jsonl``, after the group. Figures that are None are left out.
    """
    return {f"{group}/{name}": float(value) for name, value in asdict(report).items() if value is not None}


def summary(position: RunPosition, history: Sequence[EpochReport], best: float | None) -> dict[str, float]:
    """Figures of a whole run: updates and epochs done, the best score, and speed and memory of the last epoch."""
    figures = {"summary/updates": float(position.update), "summary/epochs": float(len(history))}
    if best is not None:
        figures["summary/best_score"] = best
    if history:
        figures["summary/samples_per_second"] = history[-1].samples_per_second
        figures["summary/peak_bytes"] = float(history[-1].peak_bytes)
    return figures
