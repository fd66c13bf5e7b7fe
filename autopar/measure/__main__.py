"""The worker process of `autopar.measure.workers`: ``python -m autopar.measure MODULE:FUNCTION FOLDER``.

When its stdin closes the caller is gone, and the process exits.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from autopar.measure.workers import carry_out


def main(entry: str, folder: Path) -> None:
    """Call the entry function; ends the process, also when the caller is gone."""
    threading.Thread(target=exit_with_parent, daemon=True).start()
    carry_out(entry, folder)


def exit_with_parent() -> None:
    """Exit once stdin closes."""
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
