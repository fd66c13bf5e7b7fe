"""Checkpoints on the caller's side: saved and loaded through the ranks of a model, or read without ranks."""

from __future__ import annotations

import json
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from autopar.api.dispatch import Dispatcher
from autopar.errors import CheckpointError, ResumeWarning, UsageError
from autopar.ir.checkpoint_header import Header, SavedWeight
from autopar.ir.graph import Weight
from autopar.ir.plan import Plan
from autopar.ir.units import first_few, of_type, plural
from autopar.runtime.checkpoint.folder import check_hashes, check_sizes
from autopar.runtime.checkpoint.folder import read_header as read_header_file
from autopar.runtime.checkpoint.rank_state import OptionChange
from autopar.runtime.spec import RankSpec

MAX_NAMED = 3  # names that an error lists; the rest is counted
NO_HASHES = "has no hashes: an earlier autopar saved it. Damage inside of its files cannot be seen."


def read_header(folder: str | PathLike[str]) -> Header:
    """Header of a checkpoint: model, weights, plan, batch, counters, optimizer and the caller's extra data.

    Raises:
        CheckpointError: the folder has no checkpoint that this version can read.
    """
    return read_header_file(Path(folder))


def read_plan(folder: str | PathLike[str]) -> Plan:
    """Plan of the run that saved the checkpoint.

    ``parallelize(model, …, plan=read_plan(folder))`` continues exactly as that run would have.

    Raises:
        CheckpointError, PlanError: the folder has no checkpoint or plan that this version can read.
    """
    return Plan.from_json(json.dumps(read_header(folder).plan), f"the plan in {folder}")


def read_weights(folder: str | PathLike[str], ema: bool = False) -> dict[str, torch.Tensor]:
    """Full tensors by every name of the model's state dict; a tied weight is one tensor under each of its names.

    Args:
        ema: read the averages of the weights; tensors that are not averaged are read as they are.

    Raises:
        CheckpointError: the folder has no whole checkpoint, or a checkpoint without averages.
    """
    from autopar.runtime.checkpoint.save_load import read_tensors  # imports torch.distributed.checkpoint: slow

    header = read_header(folder)
    check_sizes(Path(folder), header)
    check_hashes(Path(folder), header)
    if not header.has_hashes:
        warnings.warn(f"The checkpoint in {folder} {NO_HASHES}", ResumeWarning, stacklevel=2)
    if ema and not header.ema:
        raise CheckpointError(
            f"The checkpoint in {folder} has no averages of weights: parallelize was given no ema=. "
            "Leave ema (--ema) out."
        )
    saved = [weight for weight in header.weights if weight.names]
    tensors = read_tensors(Path(folder) / header.data, [weight.name for weight in saved], ema)
    return {name: tensors[weight.name] for weight in saved for name in weight.names}


def header_of(
    plan: Plan, weights: Iterable[Weight], state_names: Iterable[str], counters: tuple[int, int, int], extra: Any
) -> Header:
    """Header that a model writes into a checkpoint.

    Args:
        state_names: names in the model's state dict.
        counters: RNG counters: the seed, updates so far, samples since the last update.

    Raises:
        UsageError: JSON cannot represent ``extra``.
    """
    try:
        check_keys(extra)
        json.dumps(extra)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"extra cannot be saved: {error}. It must consist of numbers, texts, lists and dicts with texts for keys."
        ) from error
    names = frozenset(state_names)
    saved = tuple(SavedWeight.of(weight, names) for weight in weights if weight.kind != "constant")
    return Header(plan.model.name, saved, json.loads(plan.to_json()), plan.batch, *counters, extra)


def check_keys(extra: Any) -> None:
    """Raise a TypeError if a dict has a key that is no text: JSON would turn it into one."""
    if isinstance(extra, dict):
        for key in extra:
            if not isinstance(key, str):
                raise TypeError(f"key {key!r} is {of_type(key)}")
    for value in extra.values() if isinstance(extra, dict) else extra if isinstance(extra, list | tuple) else ():
        check_keys(value)


def save_on_ranks(ranks: Dispatcher, folder: str | PathLike[str], header: Header, keep: int) -> None:
    """Write a checkpoint on all ranks, and keep so many of the folder's checkpoints.

    Raises:
        CheckpointError: the checkpoint cannot be written.
    """
    path = str(Path(folder).absolute())
    results = ranks.call_all("save_checkpoint", path, header, keep)
    raise_first(results)


def check_folder(folder: str | PathLike[str]) -> None:
    """Raise a UsageError if a folder to save to is an empty text."""
    if not os.fspath(folder):
        raise UsageError('The folder to save to is "". Give a folder, such as "runs/last"; the current one is ".".')


def check_keep(keep: int) -> None:
    """Raise a UsageError unless ``keep`` is a number of checkpoints."""
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise UsageError(f"keep={keep!r} must be a whole number of at least 1: how many checkpoints a folder keeps.")


def load_on_ranks(ranks: Dispatcher, folder: str | PathLike[str], current: Header, spec: RankSpec) -> Header:
    """Load a checkpoint on all ranks and return its header; a ResumeWarning names each difference to this run.

    Args:
        current: what the model would save.
        spec: the spec of any rank.

    Raises:
        CheckpointError: the folder has no checkpoint, it is damaged or of another model, or the ranks see different
            ones.
    """
    path = str(Path(folder).absolute())
    headers = ranks.call_all("inspect_checkpoint", path)
    raise_first(headers)
    check_same_header(headers, path)
    header: Header = headers[min(headers)]
    check_same_model(header, current, path)
    results = ranks.call_all("load_checkpoint", path, header)
    raise_first(results)
    options = {(change.weight, change.option): change for own in results.values() for change in own}
    for change in [*header_differences(header, current, spec), *option_differences(options.values())]:
        warnings.warn(
            f"The checkpoint in {folder} {change}", ResumeWarning, stacklevel=3
        )  # the caller of load_checkpoint
    return header


def raise_first(results: Mapping[int, Any]) -> None:
    """Raise the CheckpointError of the lowest rank that returned one."""
    for _, result in sorted(results.items()):
        if isinstance(result, CheckpointError):
            raise result


def check_same_header(headers: Mapping[int, Header], folder: str) -> None:
    """Raise a CheckpointError if the ranks read different headers, as from copies of different age on their nodes."""
    texts = {rank: header.to_json() for rank, header in headers.items()}
    first = min(headers)
    other = next((rank for rank in sorted(headers) if texts[rank] != texts[first]), None)
    if other is not None:
        saved = [plural(headers[rank].updates, "update") for rank in (first, other)]
        raise CheckpointError(
            f"The ranks see different checkpoints in {folder}: rank {first} one after {saved[0]}, rank {other} another "
            f"one after {saved[1]}. Nothing was loaded. Use a folder on a disk that all nodes share, or copy one "
            "checkpoint to all of them."
        )


def check_same_model(saved: Header, current: Header, folder: str) -> None:
    """Compare names, shapes and dtypes of weights.

    Raises:
        CheckpointError: some differ; lists the first few.
    """
    before, now = ({weight.name: weight for weight in header.weights} for header in (saved, current))
    missing, unknown = [n for n in now if n not in before], [n for n in before if n not in now]
    different = [
        f"{name} {dtype_and_shape(before[name])} there, {dtype_and_shape(now[name])} here"
        for name in now
        if name in before and dtype_and_shape(now[name]) != dtype_and_shape(before[name])
    ]
    differences = [
        *([f"{len(missing)} missing there ({first_few(missing, MAX_NAMED)})"] if missing else []),
        *([f"{len(unknown)} unknown here ({first_few(unknown, MAX_NAMED)})"] if unknown else []),
        *([f"{len(different)} other: {first_few(different, MAX_NAMED)}"] if different else []),
    ]
    if differences:
        raise CheckpointError(
            f"The checkpoint in {folder} is of another model ({saved.model}, here {current.model}). Of {len(now)} "
            f"weights, {'; '.join(differences)}. Build the model as the run that saved did."
        )


def dtype_and_shape(weight: SavedWeight) -> str:
    return f"{weight.dtype}{list(weight.shape)}"


def header_differences(saved: Header, current: Header, spec: RankSpec) -> list[str]:
    """Differences between the run that saved a checkpoint and this one, as texts that continue "The checkpoint …"."""
    texts = [] if saved.has_hashes else [NO_HASHES]
    before, now = (header.plan["precision"] for header in (saved, current))
    if before != now:
        starts = spec.autocast == "float16"
        scale = (
            ", and the loss scale is initialized again"
            if starts
            else ", without its loss scale"
            if saved.scaler
            else ""
        )
        texts.append(f"was saved in {before}, here it is {now}: training goes on with other rounding{scale}.")
    if saved.seed != current.seed:
        texts.append(
            f"was saved with seed {saved.seed}, here it is {current.seed}: dropout and other random operations draw "
            f"other numbers than that run would have. Pass seed={saved.seed} to go on as it would."
        )
    if saved.batch != current.batch:
        texts.append(
            f"was saved with a global batch of {saved.batch}, here it is {current.batch}: gradients, and the number of "
            "updates in an epoch, change; learning rate and schedule continue unchanged."
        )
    if spec.recipe.optimizer is not None and saved.optimizer is None:
        texts.append("has no optimizer: the one of this run starts from scratch.")
    if spec.recipe.lr_scheduler is not None and saved.scheduler is None:
        texts.append("has no learning-rate scheduler: the one of this run starts from scratch.")
    if spec.recipe.optimizer is not None and spec.recipe.lr_scheduler is None and saved.scheduler is not None:
        texts.append(f"was saved with scheduler {saved.scheduler}; this run has none: learning rates stay as they are.")
    if spec.recipe.ema is not None and not saved.ema:
        texts.append("has no averages of weights: the averages of this run start at its weights.")
    if spec.recipe.ema is None and saved.ema:
        texts.append("has averages of weights; this run has no ema: they are not loaded.")
    return texts


def option_differences(options: Iterable[OptionChange]) -> list[str]:
    """As `header_differences`, for options of parameter groups: one text per option."""
    weights: dict[str, Counter[str]] = {}  # how many weights have the same change, by option
    for change in options:
        weights.setdefault(change.option, Counter())[f"{change.saved}, here it is {change.here}"] += 1
    return [
        f"was saved with {option} "
        + first_few([f"{text} ({plural(number, 'weight')})" for text, number in sorted(counts.items())], MAX_NAMED)
        + ": what was saved stays in use."
        for option, counts in sorted(weights.items())
    ]
