"""Flags of ``autopar train``, with the names of timm's training script."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from autopar.errors import UsageError

if TYPE_CHECKING:
    from autopar.train import Augmentation, Selection

AMP_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # timm's names of precisions
CLIP_MODES = ("norm", "value")
EMA_DECAY, MIXUP_PROB, MIXUP_SWITCH_PROB = 0.9998, 1.0, 0.5


@dataclass(frozen=True)
class DataFlags:
    """The data set, and how its images are read."""

    data: Annotated[
        str,
        Option(
            help="Data set: digits (no download), cifar10, cifar100, imagefolder, synthetic, hf:NAME (Hugging Face's "
            "datasets: a folder, or a name of the hub), wds:SHARDS (WebDataset, such as wds:train-{000..127}.tar).",
            metavar="NAME",
        ),
    ]
    data_dir: Annotated[Path | None, Option(help="Folder of the data set's files.", metavar="PATH")] = None
    download: Annotated[bool, Option("--download", help="Fetch the files into --data-dir.")] = False
    train_split: Annotated[
        str | None, Option(help="Split of the training images of hf:, such as 'train[:90%]'.", metavar="NAME")
    ] = None
    val_split: Annotated[
        str | None, Option(help="Split of the test images of hf:; their shards for wds:.", metavar="NAME|SHARDS")
    ] = None
    input_key: Annotated[
        str | None,
        Option(help="Column of the images (hf:; image or img), or suffixes (wds:; 'jpg;png;webp').", metavar="NAME"),
    ] = None
    target_key: Annotated[
        str | None, Option(help="Column of the classes (hf:; label), or suffix (wds:; cls).", metavar="NAME")
    ] = None
    num_classes: Annotated[
        int | None, Option(min=1, help="Classes of hf: or wds:, where the data does not tell.", metavar="N")
    ] = None
    streaming: Annotated[
        bool, Option("--streaming", help="Stream hf: instead of reading it by index; needs no copy of it on disk.")
    ] = False
    train_num_samples: Annotated[
        int | None,
        Option(min=1, help="Use the first N training images only; of a stream, N images are an epoch.", metavar="N"),
    ] = None
    val_num_samples: Annotated[int | None, Option(min=1, help="Use the first N test images only.", metavar="N")] = None
    workers: Annotated[
        int | None, Option("--workers", "-j", min=0, help="Data-loading processes per rank.", metavar="N")
    ] = None
    loader: Annotated[
        str,
        Option(
            help="Decode and crop images in the data-loading processes (cpu) or on the GPU (gpu); auto times both.",
            metavar="cpu|gpu|auto",
        ),
    ] = "cpu"

    mean: Annotated[
        tuple[float, float, float] | None, Option(help="Mean of the pixels; the model's by default.", metavar="R G B")
    ] = None
    std: Annotated[
        tuple[float, float, float] | None,
        Option(help="Standard deviation of the pixels; the model's by default.", metavar="R G B"),
    ] = None
    interpolation: Annotated[
        str | None,
        Option(help="Interpolation of test images, such as bicubic; the model's by default.", metavar="NAME"),
    ] = None
    crop_pct: Annotated[
        float | None,
        Option(min=0.01, max=1, help="Share of the side that test images keep; the model's by default.", metavar="X"),
    ] = None

    def selection(self) -> Selection:
        """Parts of a data set that a library reads."""
        from autopar.train import Selection

        return Selection(
            self.train_split, self.val_split, self.input_key, self.target_key, self.num_classes, self.streaming
        )

    def pixels(self) -> dict[str, Any]:
        """Fields of `autopar.train.Wanted` for the flags about pixels that were given."""
        names = ("mean", "std", "interpolation", "crop_pct")
        return {name: value for name, value in asdict(self).items() if name in names and value is not None}


@dataclass(frozen=True)
class WeightsFlags:
    """Weights from which training starts; random ones without a flag."""

    pretrained: Annotated[
        bool, Option("--pretrained", help="Start from the library's pretrained weights; a head of other size is new.")
    ] = False
    pretrained_path: Annotated[
        Path | None,
        Option(help="Start from the weights in FILE as if timm had pretrained them: the head is new.", metavar="FILE"),
    ] = None
    initial_checkpoint: Annotated[
        Path | None,
        Option(
            help="Start from all the weights in a .safetensors or .pth file, or in a folder of an earlier run.",
            metavar="PATH",
        ),
    ] = None


@dataclass(frozen=True)
class AugmentationFlags:
    """Random changes of training images; the data set has defaults for flags that are not given."""

    shift: Annotated[int | None, Option(min=0, help="Move images by up to N pixels.", metavar="N")] = None
    scale: Annotated[
        tuple[float, float] | None,
        Option(help="Area of the random crop, as a share of the image's.", metavar="MIN MAX"),
    ] = None
    ratio: Annotated[tuple[float, float] | None, Option(help="Aspect ratio of the random crop.", metavar="MIN MAX")] = (
        None
    )
    hflip: Annotated[float | None, Option(min=0, max=1, help="Probability of mirroring an image.", metavar="P")] = None
    color_jitter: Annotated[float | None, Option(min=0, help="Strength of colour changes.", metavar="X")] = None
    aa: Annotated[
        str | None,
        Option(help="AutoAugment policy of timm: rand-m9-mstd0.5, augmix-m3, 3a, original, …", metavar="NAME"),
    ] = None
    reprob: Annotated[
        float | None, Option(min=0, max=1, help="Probability of erasing a part of an image.", metavar="P")
    ] = None

    train_interpolation: Annotated[
        str | None,
        Option(help="Interpolation of training images: random (bilinear or bicubic), bicubic, …", metavar="NAME"),
    ] = None
    aug_repeats: Annotated[
        float | None,
        Option(min=1, max=1000, help="Repeated augmentation: a batch has each of its images N times.", metavar="N"),
    ] = None

    def augmentation(self, usual: Augmentation) -> Augmentation:
        """The data set's usual augmentation, with the flags that were given in place of its values."""
        given = {name: value for name, value in asdict(self).items() if value is not None and name != "aug_repeats"}
        return replace(usual, **given)


@dataclass(frozen=True)
class OptimizerFlags:
    """Optimizer, clipping, accumulation and moving average."""

    opt: Annotated[str, Option(help="Optimizer: any of timm's, such as adamw, sgd, lamb.", metavar="NAME")] = "adamw"
    lr: Annotated[float, Option(min=0, help="Peak learning rate.", metavar="X")] = 1e-3
    weight_decay: Annotated[
        float, Option(min=0, help="Weight decay of weight matrices; biases and norms have none.", metavar="X")
    ] = 0.05
    momentum: Annotated[
        float | None, Option(min=0, help="Momentum of optimizers that have one; 0.9 by default.", metavar="X")
    ] = None
    opt_eps: Annotated[float | None, Option(min=0, help="Epsilon; the optimizer's own by default.", metavar="X")] = None
    opt_betas: Annotated[
        tuple[float, float] | None, Option(help="Betas; the optimizer's own by default.", metavar="B1 B2")
    ] = None
    layer_decay: Annotated[
        float | None,
        Option(min=0, help="Layer-wise decay: learning rate of a layer relative to the next one's.", metavar="X"),
    ] = None
    clip_grad: Annotated[
        float | None, Option(min=0, help="Limit of the gradients' norm or values: see --clip-mode.", metavar="X")
    ] = None
    clip_mode: Annotated[
        str | None,
        Option(
            help="norm (of all gradients together; default) or value (of each element). Replaces an optimizer's own "
            "limit of the norm, such as LAMB's.",
            metavar="NAME",
        ),
    ] = None
    amp_dtype: Annotated[
        str | None,
        Option(help="Instead of --precision, by timm's names: float32, bfloat16 or float16.", metavar="DTYPE"),
    ] = None
    grad_accum_steps: Annotated[
        int, Option(min=1, help="Compute the batch in N parts and accumulate their gradients.", metavar="N")
    ] = 1
    model_ema: Annotated[bool, Option("--model-ema", help="Keep a moving average of the weights (EMA).")] = False
    model_ema_decay: Annotated[
        float | None,
        Option(min=0, max=1, help=f"Decay of the moving average per update; {EMA_DECAY} by default.", metavar="X"),
    ] = None

    def options(self) -> dict[str, Any]:
        """Arguments of the optimizer for the flags that were given."""
        given = {"eps": self.opt_eps, "betas": self.opt_betas}
        return {name: value for name, value in given.items() if value is not None}

    def carried(self) -> dict[str, Any]:
        """Flags whose values a checkpoint of the optimizer contains."""
        names = ("opt", "lr", "weight_decay", "momentum", "opt_eps", "opt_betas", "layer_decay")
        return {name: value for name, value in asdict(self).items() if name in names}

    def clipping(self) -> dict[str, Any]:
        """Keyword argument of `autopar.parallelize` for clipping; none without ``--clip-grad``.

        Raises:
            UsageError: an unknown mode.
        """
        mode = self.clip_mode or CLIP_MODES[0]
        if mode not in CLIP_MODES:
            raise UsageError(f"--clip-mode {mode} is unknown. It is one of {', '.join(CLIP_MODES)}.")
        return {} if self.clip_grad is None else {f"clip_grad_{mode}": self.clip_grad}

    def precision(self, precision: str | None) -> dict[str, Any]:
        """Keyword argument of `autopar.plan` for ``--amp-dtype``; none without it.

        Args:
            precision: value of ``--precision``, None if it is not given.
        Raises:
            UsageError: an unknown dtype, or two flags with different precisions.
        """
        if self.amp_dtype is None:
            return {}
        if self.amp_dtype not in AMP_DTYPES:
            raise UsageError(f"--amp-dtype {self.amp_dtype} is unknown. It is one of {', '.join(AMP_DTYPES)}.")
        chosen = AMP_DTYPES[self.amp_dtype]
        if precision not in (None, chosen):
            raise UsageError(f"--amp-dtype {self.amp_dtype} and --precision {precision} disagree. Leave one out.")
        return {"precision": chosen}


@dataclass(frozen=True)
class ScheduleFlags:
    """Schedule of the learning rate."""

    sched: Annotated[
        str,
        Option(
            help="Learning-rate schedule: onecycle, or timm's cosine, step, multistep, poly, tanh, …", metavar="NAME"
        ),
    ] = "cosine"
    sched_on_updates: Annotated[
        bool, Option("--sched-on-updates", help="Change the learning rate after each update, not each epoch.")
    ] = False
    warmup_epochs: Annotated[
        int | None,
        Option(min=0, help="Warm-up epochs; by default a sixth of all epochs, at most 5.", metavar="N"),
    ] = None
    warmup_lr: Annotated[
        float | None, Option(min=0, help="Learning rate at the start of warm-up; 1e-5 by default.", metavar="X")
    ] = None
    min_lr: Annotated[float | None, Option(min=0, help="Final learning rate; 0 by default.", metavar="X")] = None
    decay_epochs: Annotated[
        float | None, Option(min=0, help="Epochs between decays of the learning rate.", metavar="X")
    ] = None
    decay_milestones: Annotated[
        list[int] | None, Option(help="Epoch at which the learning rate decays; may be repeated.", metavar="N")
    ] = None
    decay_rate: Annotated[
        float | None, Option(min=0, help="Factor by which the learning rate decays.", metavar="X")
    ] = None

    def carried(self) -> dict[str, Any]:
        """Flags whose values a checkpoint of the schedule contains."""
        return asdict(self)

    def warmup(self, epochs: int) -> int:
        """Epochs in which the rate rises."""
        return min(5, epochs // 6) if self.warmup_epochs is None else self.warmup_epochs

    def options(self, epochs: int) -> dict[str, Any]:
        """Arguments of the schedule: the flags that were given, and a warm-up; none for onecycle."""
        if self.sched == "onecycle":
            return {}
        given = {n: v for n, v in asdict(self).items() if n not in ("sched", "sched_on_updates") and v is not None}
        return given | {"warmup_epochs": self.warmup(epochs), "step_on_epochs": not self.sched_on_updates}


@dataclass(frozen=True)
class RegularizationFlags:
    """Measures against overfitting."""

    smoothing: Annotated[float, Option(min=0, max=0.999, help="Label smoothing.", metavar="X")] = 0.0
    mixup: Annotated[float, Option(min=0, max=1000, help="Alpha of Mixup; 0 is off.", metavar="X")] = 0.0
    cutmix: Annotated[float, Option(min=0, max=1000, help="Alpha of CutMix; 0 is off.", metavar="X")] = 0.0
    mixup_prob: Annotated[
        float | None,
        Option(min=0, max=1, help=f"Probability of mixing in an update; {MIXUP_PROB} by default.", metavar="P"),
    ] = None
    mixup_switch_prob: Annotated[
        float | None,
        Option(
            min=0,
            max=1,
            help=f"Probability of CutMix if Mixup is on as well; {MIXUP_SWITCH_PROB} by default.",
            metavar="P",
        ),
    ] = None
    drop: Annotated[float | None, Option(min=0, max=1, help="Dropout: the model's drop_rate.", metavar="P")] = None
    drop_path: Annotated[
        float | None, Option(min=0, max=1, help="Stochastic depth: the model's drop_path_rate.", metavar="P")
    ] = None

    def model_kwargs(self) -> dict[str, float]:
        """Arguments of the model for the flags that were given."""
        given = {"drop_rate": self.drop, "drop_path_rate": self.drop_path}
        return {name: value for name, value in given.items() if value is not None}
