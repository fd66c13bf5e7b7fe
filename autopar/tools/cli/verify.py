"""``autopar verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar.tools.cli.flags import JsonFlag
from autopar.tools.cli.json_output import prints_json, show_json


@prints_json
def verify(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            help="A checkpoint, or the --output of a training run, whose checkpoints last and best are verified.",
            metavar="FOLDER",
        ),
    ],
    as_json: JsonFlag = False,
) -> None:
    """Check that a checkpoint is as it was saved, with the older ones that are kept in its folder; needs no GPU.

    Compares the SHA-256 of every file with the header, and the tensors in the files with the model's weights.
    """
    from autopar.errors import CheckpointError
    from autopar.ir.units import plural
    from autopar.runtime.checkpoint.folder import is_checkpoint, kept, read_header

    if not checkpoint.is_dir():
        read_header(checkpoint)  # raises, before torch is imported
    from autopar.runtime.checkpoint.verify import verified
    from autopar.tools.cli.output import show
    from autopar.tools.report.verify_table import verify_numbers, verify_parts
    from autopar.train import BEST, LAST

    folders = [folder for folder in (checkpoint / LAST, checkpoint / BEST) if folder.is_dir()]
    if is_checkpoint(checkpoint):
        folders = [checkpoint]
    elif not folders:
        read_header(checkpoint)  # raises, because there is none
    results = [verified(one) for folder in folders for one in (folder, *kept(folder))]
    if as_json:
        show_json(verify_numbers(results))
    else:
        show(verify_parts(results))
    faults = [result.fault for result in results if result.fault is not None]
    if faults:
        raise CheckpointError(
            f"{len(faults)} of {plural(len(results), 'checkpoint')} cannot be used.\n" + "\n".join(faults)
        )
