"""Training run of the stress test: ``python stress_run.py AXIS FAULT``, in the folder of its checkpoint.

Writes each phase into the file ``journal`` and, at the end, all losses into ``losses.json``. A run in a folder with a
checkpoint goes on from it. FAULT is JSON of an `Injected` fault: one that only the user's code can cause.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import autopar

STEPS, SAVE_EVERY = 8, 2
TIMEOUT_SECONDS, CHECKPOINT_SECONDS = 3.0, 8.0
SLOW_SECONDS = TIMEOUT_SECONDS + 1.0
JOURNAL, LOSSES, CHECKPOINT = "journal", "losses.json", "checkpoint"


@dataclass
class Injected:
    """Fault on one rank: in a call of the loss function, or in a call of `os.fsync`.

    Args:
        kind: "none", "raise", "full disk" (``limit`` bytes per file, at a loss), "no space" or "slow disk" (at a sync).
        rank: the rank.
        call: number of the call at which it happens, from 0.
    """

    kind: str = "none"
    rank: int = 0
    call: int = 0
    limit: int = 0
    calls: int = 0
    patched: bool = False

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Cross-entropy, with the fault."""
        if self.kind in ("raise", "full disk") and dist.get_rank() == self.rank:
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            now = self.calls == self.call
            if now and self.kind == "raise":
                raise ArithmeticError("a fault of the loss")
            if self.kind == "full disk":
                resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit if now else hard, hard))
            self.calls += 1
        return F.cross_entropy(output, target)

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        """AdamW; from then on `os.fsync` of this process has the fault."""
        if self.kind in ("no space", "slow disk") and dist.is_initialized() and not self.patched:
            self.patched = True
            if dist.get_rank() == self.rank:
                fsync = os.fsync

                def faulty(file: int) -> None:
                    self.calls += 1
                    if self.calls == self.call + 1 and self.kind == "slow disk":
                        time.sleep(SLOW_SECONDS)
                    elif self.calls == self.call + 1:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    fsync(file)

                os.fsync = faulty
        return torch.optim.AdamW(params, lr=1e-2, eps=1e-3)


def note(phase: str) -> None:
    """Append a phase to the journal, in one write."""
    with Path(JOURNAL).open("a") as file:
        file.write(f"{phase}\n")


def part(tensor: torch.Tensor, pm: autopar.ParallelModel) -> torch.Tensor:
    """This process's part of a global batch."""
    return tensor.chunk(pm.data_size)[pm.data_rank]


def main() -> None:
    axis, fault = sys.argv[1], Injected(**json.loads(sys.argv[2]))
    warnings.simplefilter("ignore", autopar.PlanDependentRandomWarning)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.RReLU(), nn.Linear(16, 16), nn.Dropout(0.1), nn.Linear(16, 4))
    x, y = torch.randn(STEPS, 8, 8), torch.randint(0, 4, (STEPS, 8))
    constraints: dict[str, Any] = {axis: 2, "microbatches": 2}
    constraints |= {"timeout": TIMEOUT_SECONDS, "checkpoint_timeout": CHECKPOINT_SECONDS}
    note("start")
    with autopar.parallelize(model, 2, x[0], loss_fn=fault.loss, optimizer=fault.optimizer, **constraints) as pm:
        losses: list[float] = []
        if (Path(CHECKPOINT) / "checkpoint.json").exists():
            note("load")
            losses = pm.load_checkpoint(CHECKPOINT)
        while len(losses) < STEPS:
            k = len(losses)
            note("step")
            losses.append(pm.train_step(part(x[k], pm), part(y[k], pm)).loss)
            print(f"step {k}: {losses[-1]}", flush=True)
            if len(losses) % SAVE_EVERY == 0:
                note("evaluation")
                pm.eval()
                pm(part(x[k], pm))
                pm.train()
                note("save")
                try:
                    pm.save_checkpoint(CHECKPOINT, losses)
                except autopar.CheckpointError as error:
                    print(error, file=sys.stderr)
        note("close")
    if int(os.environ.get("RANK", "0")) == 0:
        Path(LOSSES).write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
