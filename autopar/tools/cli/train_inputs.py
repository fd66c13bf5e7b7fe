"""Model and images of a training run, which fit each other."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from autopar.api.model_source import ModelSource
from autopar.errors import UsageError
from autopar.ir.units import plural
from autopar.tools.bench.request import num_classes
from autopar.tools.cli.flags import BuildFlags, parse_kwargs
from autopar.tools.cli.initial_weights import pretrained_arguments
from autopar.tools.cli.models import size_argument, sized, with_classes
from autopar.tools.cli.train_request import Run
from autopar.train import OF_OWN_SIZE, Data, PartSampler, Wanted, load_data, model_config, num_images
from autopar.train.data.loader import check_augmentation
from autopar.train.data.mixup import check_even

OWN_SIDE = 32  # of the images of `OF_OWN_SIZE`


def model_and_data(asked: Run) -> tuple[ModelSource, Data, int]:
    """Model with the data's number of classes, data in the model's image size, and the model's number of logits.

    Raises:
        UsageError: flags contradict each other, or there is no such data.
    """
    given = parse_kwargs(asked.build.model_kwargs)
    flags = asked.regularization.model_kwargs()
    for name in flags.keys() & given.keys():
        flag = "--drop" if name == "drop_rate" else "--drop-path"
        raise UsageError(f"{flag} {flags[name]} and --model-kwargs {name}={given[name]} are both given. Leave one out.")
    usual = pretrained_arguments(asked.model, asked.build.img_size) if asked.weights.pretrained else {}
    source = ModelSource(asked.model, usual | given | flags, channels_last=bool(asked.build.channels_last))
    side = given_side(asked.build, source) or (OWN_SIDE if asked.data.data in OF_OWN_SIZE else None)
    data = load_data(asked.data.data, wanted_images(asked, source, side))
    check_augmentation(data, asked.augmentation.augmentation(data.augmentation), asked.augmentation.aug_repeats or 1)
    source = with_classes(source, data.num_classes)
    source = source if side is None else sized(source, side)
    outputs = num_outputs(source, data)
    check_classes(data, outputs, source.name)
    return source, data, outputs


def num_outputs(source: ModelSource, data: Data) -> int:
    """Number of logits for each image of the data; the data's classes if the model does not run on the meta device.

    One that makes tensors on the CPU does not. Whether it takes the images at all, its trace says.

    Raises:
        UsageError: the model does not return one row of logits.
    """
    try:
        return num_classes(source.build("meta"), (1, *data.form.shape), source.channels_last)
    except UsageError as error:
        if error.__cause__ is None:
            raise
        return data.num_classes


def check_classes(data: Data, outputs: int, model: str) -> None:
    """Raise a UsageError if the data has one class, or more than the model has outputs."""
    if data.num_classes < 2:
        raise UsageError(f"Data set {data.name} has images of one class, which leaves nothing to learn. Add others.")
    if outputs < data.num_classes:
        raise UsageError(
            f"{model} returns {plural(outputs, 'logit')} for an image, and data set {data.name} has "
            f"{data.num_classes} classes. Use a model with as many."
        )


def wanted_images(asked: Run, source: ModelSource, side: int | None) -> Wanted:
    """Request for images of the given statistics, else the model's, except where the data decides.

    Args:
        side: of the images; None takes the model's.

    Raises:
        UsageError: the model's images are not square.
    """
    flags = asked.data
    given: dict[str, Any] = {
        "channels": source.kwargs.get("in_chans", 3),
        "seed": asked.seed,
        "folder": flags.data_dir,
        "download": flags.download,
        "num_train": flags.train_num_samples,
        "num_test": flags.val_num_samples,
        "selection": flags.selection(),
    } | flags.pixels()
    if side is not None and flags.data in OF_OWN_SIZE:
        return Wanted(side, **given)
    return Wanted(**asdict(model_config(source, side)) | given)


def given_side(flags: BuildFlags, source: ModelSource) -> int | None:
    """Side of the images in pixels by ``--img-size``, else by the model's arguments; None without.

    Raises:
        UsageError: the model's argument is not one number.
    """
    given = size_argument(source)
    if flags.img_size is None and given is not None and not isinstance(given, int):
        raise UsageError(f"Images are square: write the size {given} as one number, or use --img-size.")
    return flags.img_size or given


def steps_per_epoch(asked: Run, data: Data) -> int:
    """Number of updates per epoch.

    Raises:
        UsageError: the data has too few images for an update, or its batches cannot be mixed.
    """
    accumulated = asked.optimizer.grad_accum_steps
    sampler = PartSampler(num_images(data.train), asked.at_once, group=accumulated)
    if asked.mixup(data.num_classes) is not None:
        check_even(asked.at_once, 1)
    return len(sampler) // accumulated
