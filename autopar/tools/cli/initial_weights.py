"""Weights from which ``autopar train`` starts: random, pretrained, or of a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.api.checkpoint import read_weights
from autopar.api.model_source import ModelSource
from autopar.api.state_dict import with_versions
from autopar.errors import UsageError
from autopar.tools.cli.train_request import Run
from autopar.train import last_of
from autopar.train.timm_optional import needed

SHOWN = 3  # names of tensors in a message


def check_weights_flags(asked: Run) -> None:
    """Raise a UsageError if flags name two sources of weights, or ``--val-only`` has none or one of training."""
    flags = asked.weights
    given = {
        "--pretrained": flags.pretrained and flags.pretrained_path is None,
        "--pretrained-path": flags.pretrained_path is not None,
        "--initial-checkpoint": flags.initial_checkpoint is not None,
    }
    both = [flag for flag, is_given in given.items() if is_given]
    if len(both) > 1:
        raise UsageError(f"{' and '.join(both)} are both given. Weights come from one of them: leave the other out.")
    if asked.val_only and asked.resume is not None:
        raise UsageError(
            f"--val-only resumes no training. Give the weights by --initial-checkpoint {asked.resume} instead of "
            "--resume."
        )
    if asked.val_only and not both:
        raise UsageError(
            "--val-only would evaluate random weights. Name others by --initial-checkpoint, --pretrained-path or "
            "--pretrained."
        )


def start_model(asked: Run, source: ModelSource, resumes: bool = False) -> nn.Module:
    """Model on the CPU with the weights from which training starts; with random ones if it resumes.

    Raises:
        UsageError: the weights cannot be read, or do not fit the model.
    """
    flags = asked.weights
    torch.manual_seed(asked.seed)
    if not resumes and (flags.pretrained or flags.pretrained_path is not None):
        return pretrained(source, flags.pretrained_path)
    model = source.build("cpu")
    if not resumes and flags.initial_checkpoint is not None:
        load(model, flags.initial_checkpoint, source.name)
    return model


def pretrained(source: ModelSource, path: Path | None) -> nn.Module:
    """Model with the pretrained weights of timm or torchvision; its head is new if it has other classes.

    Args:
        path: a file to load as timm loads its pretrained weights, with a new head.

    Raises:
        UsageError: there are none, they cannot be fetched, or they do not fit.
    """
    library, colon, name = source.name.partition(":")
    if colon and (library != "torchvision" or path is not None):
        flag, of = ("--pretrained-path", "timm") if path is not None else ("--pretrained", "timm and torchvision")
        raise UsageError(f"{flag} is for models of {of}. Give the weights of {source.name} by --initial-checkpoint.")
    if path is not None and not path.is_file():
        raise UsageError(f"--pretrained-path {path}: there is no such file.")
    try:
        model = torchvision_pretrained(source, name) if colon else timm_pretrained(source, path)
    except UsageError:
        raise
    except Exception as error:  # of timm, torch, the hub's library or the network
        where = f" in {path}" if path is not None else ""
        raise UsageError(
            f"The pretrained weights of {source.name}{where} cannot be loaded: {type(error).__name__}: "
            f"{str(error).removesuffix('.')}. Without a network, fetch the file elsewhere and give it by "
            "--pretrained-path (timm) or --initial-checkpoint."
        ) from error
    return model.to(memory_format=torch.channels_last) if source.channels_last else model  # type: ignore[call-overload]


def timm_pretrained(source: ModelSource, path: Path | None) -> nn.Module:
    timm = needed("timm", "--pretrained")
    overlay = {"pretrained_cfg_overlay": {"file": str(path), "num_classes": -1}} if path is not None else {}
    return timm.create_model(source.name, pretrained=True, **overlay, **source.kwargs)


def pretrained_arguments(name: str, side: int | None) -> dict[str, Any]:
    """Arguments that torchvision gives a model for its pretrained weights only.

    Args:
        name: as of a `ModelSource`.
        side: of the images, pixel; None takes that of the weights.
    """
    library, _, model = name.partition(":")
    if library != "torchvision":
        return {}
    if model in ("googlenet", "inception_v3"):  # trained on images normalised in another way
        return {"transform_input": True, "init_weights": False}
    if model.startswith("vit_") and side is None:  # those of vit_h_14 are for larger images
        return {"image_size": torchvision_weights(model).meta["min_size"][0]}
    return {}


def torchvision_weights(name: str) -> Any:
    return needed("torchvision.models", "--pretrained").get_model_weights(name).DEFAULT


def torchvision_pretrained(source: ModelSource, name: str) -> nn.Module:
    weights = torchvision_weights(name)
    model, classes = source.build("cpu"), len(weights.meta["categories"])
    new = model.state_dict()
    published = weights.get_state_dict(progress=False)
    # As torchvision's builders, which have no auxiliary classifiers with aux_logits=False.
    state = {key: value for key, value in published.items() if key in new or not key.startswith(("aux", "AuxLogits"))}
    for key in [key for key, value in state.items() if key in new and new[key].shape != value.shape]:
        if state[key].shape[0] == classes:
            state[key] = new[key]
    check_fits(state, model, str(weights), source.name)
    model.load_state_dict(with_versions(state, published))
    return model


def load(model: nn.Module, path: Path, name: str) -> None:
    """Load all weights of a file, or of the last checkpoint in a run's folder, into a model.

    Raises:
        UsageError: the file is missing or no file of weights, or the weights do not fit.
    """
    if path.is_dir():
        state: Mapping[str, Any] = read_weights(last_of(path), False)
    elif not path.is_file():
        raise UsageError(f"--initial-checkpoint {path}: there is no such file.")
    else:
        try:
            state = needed("timm.models", "--initial-checkpoint").load_state_dict(str(path), weights_only=True)
        except Exception as error:  # of torch, pickle and safetensors
            raise UsageError(
                f"--initial-checkpoint {path} is no file of weights: {type(error).__name__}: "
                f"{str(error).removesuffix('.')}. Give a .safetensors file, or a state dict of torch.save."
            ) from error
    check_fits(state, model, f"--initial-checkpoint {path}", name)
    model.load_state_dict(with_versions(state, model.state_dict()))


def check_fits(state: Mapping[str, Any], model: nn.Module, title: str, name: str) -> None:
    """Check names and shapes of weights.

    Raises:
        UsageError: they are not the model's; names the first ones that differ.
    """
    own = model.state_dict()
    common = [key for key in own if isinstance(state.get(key), Tensor)]
    faults = {
        "held as something else": [key for key in own if key in state and not isinstance(state[key], Tensor)],
        "of another shape": [
            f"{key} ({'×'.join(map(str, state[key].shape))}, the model's is {'×'.join(map(str, own[key].shape))})"
            for key in common
            if state[key].shape != own[key].shape
        ],
        "missing": [key for key in own if key not in state],
        "unknown to the model": [key for key in state if key not in own],
    }
    texts = [
        f"{len(keys)} tensors are {fault}: {', '.join(keys[:SHOWN])}{', …' if len(keys) > SHOWN else ''}"
        for fault, keys in faults.items()
        if keys
    ]
    if texts:
        raise UsageError(
            f"{title} does not fit {name}: {'; '.join(texts)}. For another number of classes, --pretrained-path takes "
            "all but the head of a timm model; --model-kwargs num_classes=N keeps the head."
        )
