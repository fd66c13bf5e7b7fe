"""Kills of a process that saves checkpoints, at random moments: ``python kills.py FOLDER KILLS``.

After each kill, every checkpoint in the folder must be whole, with all weights of one save, and the newest one must not
be older than the last that was seen there. The tests do a few kills; a thousand take some minutes.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import autopar
from autopar.api.checkpoint import read_header, read_weights

KEEP = 2


def data_folders(folder: Path) -> int:
    """Number of data folders, complete or not."""
    return len(list(folder.glob("data-*")))


def main() -> None:
    """Save, kill and check; prints the counts."""
    folder, kills = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 4))
    pm = autopar.parallelize(model, 1, torch.randn(4, 64), optimizer=torch.optim.AdamW)

    def save(counter: int) -> None:
        pm.load_state_dict({name: torch.full_like(t, float(counter)) for name, t in pm.state_dict().items()})
        pm.save_checkpoint(folder, {"counter": counter}, keep=KEEP)

    save(0)
    begin = time.perf_counter()
    save(1)
    seconds = time.perf_counter() - begin
    unfinished, counter = 0, 1
    for kill in range(kills):
        child = os.fork()  # an import of torch for every kill would take seconds
        if child == 0:
            while True:
                counter += 1
                save(counter)
        time.sleep(random.uniform(0, 3 * seconds))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        unfinished += data_folders(folder) > KEEP
        found = read_header(folder).extra["counter"]
        assert found >= counter, f"kill {kill}: the newest checkpoint is of save {found}, {counter} was there before"
        for header in folder.glob("**/checkpoint.json"):
            values = {float(v) for t in read_weights(header.parent).values() for v in t.unique()}
            expected = float(read_header(header.parent).extra["counter"])
            assert values == {expected}, f"kill {kill}: {header.parent} has weights of {values}, not of {expected}"
        counter = found
    assert pm.load_checkpoint(folder) == {"counter": counter}
    save(counter + 1)
    assert data_folders(folder) == KEEP
    print(f"{kills} kills, {unfinished} of them while files were being written, 0 checkpoints lost")


if __name__ == "__main__":
    main()
