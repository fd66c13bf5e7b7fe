"""The worker process of `autopar.measure.workers`: ``python -m autopar.measure MODULE:FUNCTION FOLDER``.

When its stdin closes the caller is gone, and the process exits.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import threading
import traceback
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from autopar.measure.workers import PAYLOAD, Emit, result_path


def main(entry: str, folder: Path) -> None:
    """Call the entry function; ends the process, also when the caller is gone."""
    threading.Thread(target=exit_with_parent, daemon=True).start()
    carry_out(entry, folder)


def carry_out(entry: str, folder: Path) -> NoReturn:
    """Call the entry function with the folder's payload; ends the process. A failure's last line is its reason."""
    code = 0
    try:
        module, _, function = entry.partition(":")
        payload = pickle.loads((folder / PAYLOAD).read_bytes())
        getattr(importlib.import_module(module), function)(payload, emitter(folder, int(os.environ["RANK"])))
    except SystemExit as error:
        code = int(error.code or 0)
    except Exception as error:
        code = 1
        traceback.print_exc()
        first_line = str(error).strip().partition("\n")[0]
        print(f"{type(error).__name__}: {first_line}")
    sys.stdout.flush()
    os._exit(code)  # threads of a process group or a compiler may keep an ordinary exit waiting for ever


def emitter(folder: Path, rank: int) -> Emit:
    """A function that writes each result of a rank to the next file, which appears whole."""
    numbers = count()

    def emit(result: Any) -> None:
        path = result_path(folder, rank, next(numbers))
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(pickle.dumps(result))
        temporary.replace(path)

    return emit


def exit_with_parent() -> None:
    """Exit once stdin closes."""
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
