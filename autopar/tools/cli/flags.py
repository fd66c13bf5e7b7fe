"""Flags that several commands share, each defined once, and parsers of their texts."""

from __future__ import annotations

import ast
import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from typer import Argument, Option

from autopar.errors import UsageError
from autopar.tools.cli.completion import choices, hardware_names, offered, timm_names

DEFAULT_BATCH = 64
ModelArgument = Annotated[
    str,
    Argument(
        help="A timm name, torchvision:NAME, or package.module:factory.",
        metavar="MODEL",
        autocompletion=offered(timm_names),
    ),
]
JsonFlag = Annotated[bool, Option("--json", help="Print the result as JSON and nothing else.")]


@dataclass(frozen=True)
class BuildFlags:
    """Flags that build the model."""

    img_size: Annotated[int | None, Option(min=1, help="Side of the images, in pixels.", metavar="N")] = None
    model_kwargs: Annotated[
        list[str] | None,
        Option(help="Arguments of the model, such as depth=6 patch_size=8.", metavar="NAME=VALUE ..."),
    ] = None
    channels_last: Annotated[
        bool | None,
        Option(
            "--channels-last/--no-channels-last",
            help="Keep model and images in channels_last memory format, or compute in the contiguous one; by default "
            "compiled convolutions on GPUs compute in channels_last where torch.compile would.",
        ),
    ] = None

    def layout(self) -> dict[str, Any]:
        """Keyword argument of `autopar.plan` for the memory format, if it was given."""
        return {} if self.channels_last is None else {"channels_last": self.channels_last}


@dataclass(frozen=True)
class ModelFlags(BuildFlags):
    """Flags that build the model, and its inputs."""

    inputs: Annotated[
        list[str] | None,
        Option(
            "--input",
            help="Shape of the input including the batch, such as 8,3,64,64. Repeat it for several inputs, each "
            "with its name: --input image=8,3,64,64 --input tokens=8,16:int64.",
            metavar="[NAME=]SHAPE[:DTYPE]",
        ),
    ] = None


def zero_stage(text: str) -> int | None:
    """ZeRO stage in a text; None for ``auto``.

    Raises:
        UsageError: the text is neither.
    """
    if text == "auto":
        return None
    if not text.isdecimal():
        raise UsageError(f"--zero {text} is no ZeRO stage. It is 0, 1, 2, 3 or auto.")
    return int(text)


def tensor_sizes(text: str) -> int | tuple[int, ...]:
    """Ranks of the tensor axis in ``--tp 4``, or of several axes in ``--tp 2x2`` or ``--tp 2,2``.

    Raises:
        UsageError: the text is neither.
    """
    parts = text.replace("x", ",").split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise UsageError(f"--tp {text} is no tensor-parallel size. Write the ranks, or those of several axes: 2x2.")
    sizes = tuple(map(int, parts))
    return sizes[0] if len(sizes) == 1 else sizes


@dataclass(frozen=True)
class PlanFlags:
    """Constraints on the plan; the planner chooses the others."""

    memory: Annotated[
        str | None, Option(help="Memory that a plan may use per device, such as 24GiB.", metavar="SIZE")
    ] = None
    hardware: Annotated[
        str | None,
        Option(
            help="Cost model: the name of a shipped one, or a TOML file.",
            metavar="NAME|FILE",
            autocompletion=offered(hardware_names),
        ),
    ] = None
    cost: Annotated[
        str | None,
        Option(
            help="Source of operation times: analytic (the cost model), measured (all timed here), or auto (default): "
            "the cost model, and where the device is at hand the operations timed whose errors could turn the choice. "
            "Times are kept.",
            metavar="NAME",
            autocompletion=choices("cost"),
        ),
    ] = None
    measure_seconds: Annotated[
        float | None,
        Option(
            help="Time that --cost auto may take to time operations; 0 for none, so that only times count that were "
            "kept. By default $AUTOPAR_MEASURE_SECONDS, or 30 on GPUs and 0 on processors.",
            metavar="SECONDS",
        ),
    ] = None
    pp: Annotated[int | None, Option(help="Pipeline-parallel size: ranks of a pipeline.", metavar="N")] = None
    tp: Annotated[
        Any,
        Option(
            help="Tensor-parallel size: ranks that split each operation. Sizes such as 2x4 make several axes, of which "
            "the last one's ranks are neighbours.",
            metavar="N|NxM",
            parser=tensor_sizes,
        ),
    ] = None
    dp: Annotated[int | None, Option(help="Data-parallel size: replicas that share the batch.", metavar="N")] = None
    zero: Annotated[
        int | None,
        Option(
            help="ZeRO stage: replicas divide the optimizer state (1), the gradients too (2), the parameters too (3, "
            "as FSDP), or nothing (0); auto (default): the fastest that fits.",
            metavar="0|1|2|3|auto",
            parser=zero_stage,
        ),
    ] = None
    dp_shard: Annotated[
        int | None,
        Option(
            help="Replicas that divide what --zero says; each such group has a copy of all. By default all of them, or "
            "those of a node where that is faster.",
            metavar="N",
        ),
    ] = None
    reduce_dtype: Annotated[
        str | None,
        Option(
            help="Dtype in which gradients travel between replicas: float32 (default), or bfloat16, which halves the "
            "bytes and rounds gradients.",
            metavar="DTYPE",
            autocompletion=choices("reduce_dtype"),
        ),
    ] = None
    microbatches: Annotated[
        int | None,
        Option(
            help="Microbatches per replica and step, of equal size but for a smaller last one, as torch.chunk cuts.",
            metavar="N",
        ),
    ] = None
    microbatch_size: Annotated[
        int | None, Option(help="Samples per microbatch at most; fewer if that makes microbatches equal.", metavar="N")
    ] = None
    chunks: Annotated[
        int | None,
        Option(
            help="Stages per rank (virtual pipeline size) under interleaved and interleaved-overlap; the "
            "planner chooses by default.",
            metavar="N",
        ),
    ] = None
    schedule: Annotated[
        str | None,
        Option(
            help="Pipeline schedule: 1f1b, interleaved, interleaved-overlap, gpipe; with split backwards zb-h1, zb-v, "
            "searched; or auto (default: the fastest).",
            metavar="NAME",
            autocompletion=choices("schedule"),
        ),
    ] = None
    precision: Annotated[
        str | None,
        Option(
            help="fp32; bf16 or fp16 as torch.autocast with float32 weights; or bf16-params, bfloat16 copies of "
            "float32 parameters. By default the model's own precision.",
            metavar="NAME",
            autocompletion=choices("precision"),
        ),
    ] = None
    recompute: Annotated[
        str | None,
        Option(
            help="Activation checkpointing: none, all (every stage), or auto (default): stages that do not fit "
            "without it.",
            metavar="NAME",
            autocompletion=choices("recompute"),
        ),
    ] = None
    balance: Annotated[
        str | None,
        Option(
            help="Quantity that stages share evenly: time (default), params, flops, or uniform (number of operations).",
            metavar="NAME",
            autocompletion=choices("balance"),
        ),
    ] = None
    pin: Annotated[
        list[str] | None,
        Option(
            help="Place a module or operation on a stage, such as blocks.3=1; may be repeated.", metavar="NAME=STAGE"
        ),
    ] = None

    def constraints(self) -> dict[str, Any]:
        """Keyword arguments of `autopar.plan` for the flags that were given."""
        given = {k: v for k, v in asdict(self).items() if v is not None and k != "pin"}
        return given | ({"pins": parse_pins(self.pin)} if self.pin else {})


@dataclass(frozen=True)
class RunFlags:
    """Settings of a run on this machine."""

    backend: Annotated[
        str | None, Option(help="gloo (CPU) or nccl (GPUs); by default nccl if there are GPUs.", metavar="NAME")
    ] = None

    compile: Annotated[
        bool | None, Option("--compile/--no-compile", help="Compile stages by torch.compile; by default on GPUs.")
    ] = None
    cuda_graph: Annotated[
        bool | None,
        Option("--cuda-graph/--no-cuda-graph", help="Replay training steps as CUDA graphs; by default on GPUs."),
    ] = None

    transport: Annotated[
        str | None,
        Option(
            help="Transport of tensors between stages and tensor-parallel GPUs: auto (default), nccl, or symmetric "
            "(symmetric memory).",
            metavar="NAME",
        ),
    ] = None

    def constraints(self) -> dict[str, Any]:
        """Keyword arguments of `autopar.parallelize` for the flags that were given."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def parse_shape(text: str) -> tuple[int, ...]:
    """Shape in a text such as ``8,3,64,64``.

    Raises:
        UsageError: a size is not a whole number of at least 1.
    """
    parts = text.replace("x", ",").split(",")
    if not all(p.strip().isdecimal() and int(p) > 0 for p in parts):
        raise UsageError(
            f"Cannot read --input {text!r} as a shape. Write the batch and the other sizes, such as 8,3,64,64."
        )
    return tuple(int(p) for p in parts)


def parse_kwargs(texts: list[str] | None) -> dict[str, Any]:
    """Arguments in texts such as ``depth=6`` and ``global_pool=avg``: Python literals, or else strings.

    Raises:
        UsageError: a text has no name, or a value that a plan file cannot hold.
    """
    result: dict[str, Any] = {}
    for item in texts or []:
        name, equals, value = item.partition("=")
        if not equals or not name.strip().isidentifier():
            raise UsageError(f"Cannot read --model-kwargs {item!r}. Write NAME=VALUE, such as depth=6.")
        try:
            result[name.strip()] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            result[name.strip()] = value
        try:
            json.dumps(result[name.strip()])
        except TypeError as error:
            raise UsageError(f"--model-kwargs {item!r}: a plan file cannot hold this value. {error}.") from error
    return result


def parse_pins(texts: list[str]) -> dict[str, int]:
    """Stage by name from texts such as ``blocks.3=1``.

    Raises:
        UsageError: a text has no name or no stage number, or one name has two stages.
    """
    pins: dict[str, int] = {}
    for text in texts:
        name, equals, stage = text.rpartition("=")
        if not equals or not name.strip() or not stage.strip().isdecimal():
            raise UsageError(f"Cannot read --pin {text!r}. Write NAME=STAGE, such as blocks.3=1; stages count from 0.")
        if pins.setdefault(name.strip(), int(stage)) != int(stage):
            raise UsageError(f"--pin gives {name} two stages, {pins[name.strip()]} and {int(stage)}. Give one.")
    return pins
