"""Every error and warning that a user of autopar can meet.

A message has four parts: what failed, where in the user's model, the numbers, the remedy. ``exit_code`` is the command
line's exit code for an error.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path

# Meaning of the command line's exit codes.
EXIT_CODES: Mapping[int, str] = {
    0: "done",
    1: "failed",
    2: "wrong arguments, files or inputs",
    3: "no plan fits",
    4: "the model cannot be traced",
    130: "ended by Ctrl-C",
    143: "ended by SIGTERM",
}

# Last sentence of errors whose cause may be the machine and not the caller.
SEE_DOCTOR = "`autopar doctor` checks this machine."

MISSPELT = 0.9  # similarity, as `difflib.get_close_matches` has it, of a name with a letter or two wrong

# Files whose frames are not the user's: functions of autopar are also called through context managers and modules.
INTERNAL = str(Path(__file__).parent) + os.sep
BETWEEN = ("/contextlib.py", "/torch/nn/modules/module.py")


class AutoparError(Exception):
    """Base of all errors that autopar raises on purpose."""

    exit_code = 2


class UsageError(AutoparError):
    """An argument, a name, or an input tensor is not what the call needs."""


class MissingAttributeError(UsageError, AttributeError):
    """An object has no such attribute, unlike its counterpart in PyTorch; the message says what to use instead."""


class PlanError(UsageError):
    """A plan file is broken, stale, or made for another model; the message names the field."""


class CheckpointError(UsageError):
    """A checkpoint cannot be written, or is broken, or of another model; an earlier checkpoint is unchanged."""


class UnreadableDataError(UsageError):
    """An image of a data set cannot be read; the message names it, and the checkpoint saved before, if there is one."""


class HardwareError(UsageError):
    """A cost-model file is unknown, incomplete or malformed."""


class InfeasibleError(AutoparError):
    """No plan satisfies the constraints; the message holds the smallest relaxation that would."""

    exit_code = 3


class TraceError(AutoparError):
    """The model cannot be traced; the message holds file and line in the user's model."""

    exit_code = 4


class ScheduleError(AutoparError):
    """A schedule breaks one of its invariants; the message prints the grid with the bad cell marked."""


class WorkerError(AutoparError):
    """A rank raised, died or hung; the message names rank, stage, action and cause."""

    exit_code = 1


class DeviceMemoryError(WorkerError):
    """A rank's device ran out of memory; the message names rank, stage, action, predicted and actual peak."""


class TrainingError(AutoparError):
    """A training run failed: the loss is not finite, or the unmodified model scores exported weights differently."""

    exit_code = 1


class AssumedFiniteWarning(UserWarning):
    """A model's forward branches on whether activations are finite, and its trace takes the branch for finite ones."""


class AutocastWarning(UserWarning):
    """A model was called within the caller's ``torch.autocast``, which does not reach it."""


class CacheWarning(UserWarning):
    """A file of measured times is damaged; its content is measured again."""


class CaptureWarning(UserWarning):
    """A training step cannot be captured as a CUDA graph and runs without."""


class CompileAheadWarning(UserWarning):
    """Processes that compile before the first step failed; ranks compile in their place."""


class DecodingWarning(UserWarning):
    """A GPU decodes images between its training steps, since CUDA was started with few hardware queues."""


class EvaluationWarning(UserWarning):
    """The model's eval mode cannot be traced, so it can only be trained."""


class FrozenNumberWarning(UserWarning):
    """A model's forward changes a Python number at each call, of which its trace keeps one value."""


class MeasuringWarning(UserWarning):
    """Something cannot be measured on this machine and is priced by the cost model."""


class MicrobatchWarning(UserWarning):
    """The number or size of microbatches differs from the request."""


class NonFiniteLossWarning(UserWarning):
    """The loss of a step is NaN or infinite."""


class MixedSamplesWarning(UserWarning):
    """An output depends on several samples of a batch, and a step computes it for each microbatch alone."""


class PlanDependentRandomWarning(UserWarning):
    """A random operation draws from its rank's generator: its numbers differ from plan to plan."""


class ResumeWarning(UserWarning):
    """Training continues from a checkpoint, but differently from the run that saved it; or it has no hashes."""


class TrackingWarning(UserWarning):
    """An experiment tracker (Weights & Biases, MLflow) failed; the training goes on."""


class UnknownOpWarning(UserWarning):
    """An operation has no sharding rule: every rank of a tensor-parallel group runs it whole."""


class UpdatedStateWarning(UserWarning):
    """A forward or a loss updates tensors, which happens for each microbatch, and on each replica by its samples."""


class VariantWarning(UserWarning):
    """A model is traced for many different shapes or constants of one argument."""


def suggest(name: str, known: Iterable[str], limit: int = 1, cutoff: float = 0.6) -> str:
    """A sentence for an error message, ``" Did you mean cosine or constant?"``; empty where no known name is similar.

    Names that are misspelt by a letter or two come first, then those that begin with the letters and digits of
    ``name``, shortest first: ``vitbase`` and ``ViT-B`` begin ``vit_base_patch16_224``.

    Args:
        limit: number of names in the sentence, at most.
        cutoff: similarity from 0 to 1 that a name must have, as in `difflib.get_close_matches`.
    """
    names, start = list(known), letters_and_digits(name)
    longer = sorted((own for own in names if start and letters_and_digits(own).startswith(start)), key=len)
    misspelt, similar = (get_close_matches(name, names, limit, least) for least in (max(cutoff, MISSPELT), cutoff))
    near = list(dict.fromkeys([*misspelt, *longer, *similar]))[:limit]
    return f" Did you mean {' or '.join(near)}?" if near else ""


def letters_and_digits(name: str) -> str:
    """A name in lower case without ``_``, ``-`` and the like."""
    return "".join(filter(str.isalnum, name.lower()))


def caller_level() -> int:
    """The ``stacklevel`` with which `warnings.warn`, called by this function's caller, names the user's line."""
    frame, level = inspect.currentframe(), 0
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(INTERNAL) and not file.endswith(BETWEEN):
            break
        frame, level = frame.f_back, level + 1
    return level
