"""``autopar export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar.tools.cli.flags import JsonFlag
from autopar.tools.cli.json_output import prints_json, show_json


@prints_json
def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            help="A checkpoint, or the --output of a training run, whose last checkpoint is exported.", metavar="FOLDER"
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.", metavar="MODEL.safetensors")],
    ema: Annotated[
        bool, typer.Option("--ema", help="Export the moving average of the weights (EMA) instead of the weights.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Write a checkpoint's weights as a state dict of the unmodified model, which timm loads by checkpoint_path=."""
    from autopar.errors import UsageError
    from autopar.ir.units import plural
    from autopar.runtime.checkpoint.folder import read_header
    from autopar.tools.cli.output import check_writable

    check_writable(output)
    if output.suffix != ".safetensors":  # by its name, timm would read another format
        raise UsageError(f"-o {output} must end in .safetensors: that is the format of the file.")
    if not checkpoint.is_dir():
        read_header(checkpoint)  # raises, before torch is imported
    from autopar.api.checkpoint import read_weights
    from autopar.train import last_of, save_weights

    checkpoint = last_of(checkpoint)
    header = read_header(checkpoint)
    weights = read_weights(checkpoint, ema)
    try:
        save_weights(weights, output, {"format": "pt", "model": header.model, "updates": str(header.updates)})
    except Exception as error:  # safetensors wraps errors of the system in its own type
        raise UsageError(
            f"Cannot write {output}: {error}. Give a file in a folder that exists and has room."
        ) from error
    if as_json:
        written = {"file": output, "tensors": len(weights), "ema": ema, "model": header.model}
        show_json(written | {"updates": header.updates})
    else:
        typer.echo(f"{output}: {len(weights)} tensors of {header.model} after {plural(header.updates, 'update')}")
