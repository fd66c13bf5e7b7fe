"""A kill at any moment and a full disk leave a whole checkpoint; whatever is wrong with one is a clear message."""

from __future__ import annotations

import functools
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support import kills
from support.checkpoint_models import (
    ADAMW,
    CLASSES,
    ROWS,
    STEPLR,
    assert_equal,
    contents,
    edit_header,
    grouped,
    rehash,
    save_small,
    small,
    unchanged,
)
from support.forks import forked
from torch import nn

import autopar
from autopar import CheckpointError, ResumeWarning, UsageError, WorkerError
from autopar.api.checkpoint import read_weights
from autopar.runtime.memory.peaks import TensorPeak


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_small(tmp_path / "saved")


def test_killed_at_any_moment_it_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """`support/kills.py 1000` is the long form."""
    done = forked(Path(kills.__file__), [str(tmp_path / "saved"), "15"], [{}], None)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.fullmatch(r"15 kills, \d+ of them while files were being written, 0 checkpoints lost\n", done.stdout)


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_takes_no_more(saved: Path) -> None:
    before = contents(saved)
    with small() as pm:
        with unchanged(pm), files_of_at_most(2048), pytest.raises(CheckpointError) as error:
            pm.save_checkpoint(saved, {"step": 2})
        message = (
            r"saved: File too large on rank 0 .* needs .* KiB, .* free there\. The one that was there is as it was\."
        )
        assert re.search(message, str(error.value))
        assert pm.load_checkpoint(saved) == {"step": 1}
        assert_equal(contents(saved), before)
        assert [path.name for path in saved.glob("data-*")] == ["data-1"]
        pm.save_checkpoint(saved)


def test_a_disk_that_is_too_small(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(saved)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with small() as pm, unchanged(pm), pytest.raises(CheckpointError) as error:
        pm.save_checkpoint(saved)
    assert f"Cannot save a checkpoint to {saved}: No space left on device ({saved}) on rank 0" in str(error.value)
    assert "1,000 B are free there. The one that was there is as it was." in str(error.value)
    assert [path.name for path in saved.glob("data-*")] == ["data-1"]


FULL = """
import os, shutil, sys
from pathlib import Path
import torch
from support.checkpoint_models import CLASSES, ROWS, assert_equal, save_small, small
from autopar import CheckpointError
from autopar.api.checkpoint import read_header, read_weights

torch.set_num_threads(1)
disk = Path(sys.argv[1])
saved, filler, page = disk / "saved", disk / "filler", os.sysconf("SC_PAGE_SIZE")
before = read_weights(save_small(saved))
with small() as pm:
    pm.load_checkpoint(saved)
    pm.train_step(ROWS, CLASSES)
    for pages in range(1, 30):
        filler.write_bytes(bytes(shutil.disk_usage(disk).free - pages * page))
        try:
            pm.save_checkpoint(saved)
        except CheckpointError as error:
            print(f"{pages}: {error}")
            filler.unlink()
            assert read_header(saved).updates == 1
            assert_equal(read_weights(saved), before)
            assert sorted(path.name for path in saved.iterdir()) == [".saving", "checkpoint.json", "data-1"]
        else:
            break
    assert read_header(saved).updates == 2
    assert_equal(read_weights(saved), pm.state_dict())
"""


@pytest.mark.full
def test_a_full_disk(tmp_path: Path) -> None:
    """On a file system of its own, with ever more room until a second checkpoint fits: each file once is too much."""
    mounting = ["unshare", "--map-root-user", "--mount", "sh", "-ec", 'mount -t tmpfs -o size=1m none "$0"; exec "$@"']
    if shutil.which("unshare") is None or subprocess.run([*mounting, str(tmp_path), "true"]).returncode:
        pytest.skip("this machine lets nobody mount a file system")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [*mounting, str(tmp_path), sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    failures = done.stdout.splitlines()
    assert len(failures) > 3
    for line in failures:
        assert re.search(
            r"Cannot save a checkpoint to .*saved: .*No space left on device.* on rank 0 .*Make room", line
        )
        assert "The one that was there is as it was." in line


def test_a_rank_that_is_killed_while_it_writes(tmp_path: Path) -> None:
    marker, folder, caller = tmp_path / "marker", tmp_path / "saved", os.getpid()

    def make(params: Any) -> torch.optim.Optimizer:
        """An optimizer; from then on, a worker dies in the middle of writing as soon as a file is there."""
        if os.getpid() == caller:  # plans
            return ADAMW(params)
        from autopar.runtime.checkpoint.reshard_planners import PartsSavePlanner

        look_up = PartsSavePlanner.lookup_object

        def look_up_or_die(self: Any, index: Any) -> torch.Tensor:
            if marker.exists() and "2." in index.fqn:  # the last stage's
                os.kill(os.getpid(), signal.SIGKILL)
            return look_up(self, index)

        PartsSavePlanner.lookup_object = look_up_or_die
        return ADAMW(params)

    with small(devices=2, pp=2, microbatches=2, optimizer=make) as pm:
        pm.train_step(ROWS, CLASSES)
        pm.save_checkpoint(folder, {"step": 1})
        before = contents(folder)
        pm.train_step(ROWS, CLASSES)
        marker.touch()
        with pytest.raises(
            WorkerError, match=r"Rank 1 \(stage 1\) died during save_checkpoint: killed by SIGKILL\. All"
        ):
            pm.save_checkpoint(folder)
        assert pm._ranks.processes == []
    assert_equal(contents(folder), before)
    with small() as pm:
        assert pm.load_checkpoint(folder) == {"step": 1}
        pm.save_checkpoint(folder)
    assert len(list(folder.glob("data-*"))) == 1


class Stubborn(torch.optim.SGD):
    """Cannot be saved on the rank that has the last layer, as long as a file is there."""

    marker: str

    def state_dict(self) -> dict[str, Any]:
        if Path(self.marker).exists() and any(len(p) == 4 for group in self.param_groups for p in group["params"]):
            raise OSError(5, "Input/output error")
        return super().state_dict()


def test_one_rank_that_fails_is_one_error_on_all_and_training_goes_on(tmp_path: Path) -> None:
    marker, folder = tmp_path / "marker", tmp_path / "saved"

    def make(params: Any) -> torch.optim.Optimizer:
        optimizer = Stubborn(params, lr=0.1)
        optimizer.marker = str(marker)
        return optimizer

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    with autopar.parallelize(model, 2, ROWS, optimizer=make, pp=2, microbatches=2) as pm:
        marker.touch()
        with pytest.raises(CheckpointError, match=r"Input/output error on rank 1 \(stage 1\)\. Make room, or choose"):
            pm.save_checkpoint(folder)
        assert list(tmp_path.glob("saved/data-*")) == []
        marker.unlink()
        pm.train_step(ROWS, CLASSES)
        pm.save_checkpoint(folder)
        assert_equal(read_weights(folder), pm.state_dict())


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


class Shell:
    def __reduce__(self) -> Any:
        return os.system, ("echo taken",)


def broken(saved: Path, how: str) -> None:
    data = saved / "data-1"
    if how == "no folder":
        shutil.rmtree(saved)
    elif how == "empty":
        (saved / "checkpoint.json").unlink()
    elif how == "foreign":
        (saved / "checkpoint.json").write_text('{"weights": []}')
    elif how == "cut header":
        cut(saved / "checkpoint.json", 100)
    elif how == "newer":
        edit_header(saved, schema_version=7)
    elif how == "field":
        edit_header(saved, updates="many")
    elif how == "truncated":
        cut(data / "__0_0.distcp", 1000)
    elif how == "missing":
        (data / "__0_0.distcp").unlink()
    elif how == "elsewhere":
        edit_header(saved, data="../data-1")
    elif how == "pickle":
        (data / ".metadata").write_bytes(pickle.dumps(Shell()))
        rehash(saved)
    elif how == "noise":
        raw = bytearray((data / "training.pt").read_bytes())
        raw[40:80] = bytes(40)
        (data / "training.pt").write_bytes(raw)
        rehash(saved)
    elif how == "noise in tensors":
        raw = bytearray((data / "__0_0.distcp").read_bytes())
        raw[::7] = bytes(len(raw[::7]))
        (data / "__0_0.distcp").write_bytes(raw)
        rehash(saved)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no folder", r"saved is not a checkpoint: it does not exist\. Give the folder that save_checkpoint wrote\.$"),
        (
            "empty",
            r"saved is not a checkpoint: it has no checkpoint\.json\. Give the folder that save_checkpoint wrote\. "
            r"Kept there: .*saved/data-1 after 1 update\.$",
        ),
        ("foreign", r"checkpoint\.json is not of autopar: it has no schema_version\. Give a checkpoint's folder"),
        ("cut header", r"checkpoint\.json is not a complete JSON file: .* at line \d+, column \d+\..* use another"),
        ("newer", r"checkpoint\.json: field schema_version is 7, this autopar reads 1 to 2\. Upgrade autopar\."),
        ("field", r"checkpoint\.json is not a valid checkpoint\. Field updates: Input should be a valid integer"),
        (
            "truncated",
            r"is damaged: in data-1, 1 of 3 files .*: __0_0\.distcp has 1,000 of [\d,]+ bytes\. Copy it again",
        ),
        ("missing", r"is damaged: in data-1, 1 of 3 files .*: __0_0\.distcp is missing"),
        ("elsewhere", r"its header lists 3 files in '\.\./data-1', which no save writes\. Use another"),
        ("pickle", r"\.metadata is damaged: it names posix\.system\. Use another"),
        ("noise", r"training\.pt is damaged: .* Use another checkpoint\."),
    ],
)
def test_a_broken_checkpoint(how: str, message: str, saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    broken(saved, how)
    with small() as pm, unchanged(pm), pytest.raises(CheckpointError, match=message):
        pm.load_checkpoint(saved)
    assert "taken" not in capfd.readouterr().out


@pytest.mark.parametrize("devices", [1, 2])
def test_a_file_that_cannot_be_read_once_loading_has_begun(devices: int, saved: Path) -> None:
    broken(saved, "noise in tensors")
    message = r"Cannot load the checkpoint in .*saved: .* on rank 0 .* so the model was closed\. Call autopar"
    with small(devices=devices) as pm:
        with pytest.raises(CheckpointError, match=message):
            pm.load_checkpoint(saved)
        with pytest.raises(UsageError, match=r"Call autopar\.parallelize again"):
            pm.train_step(ROWS, CLASSES)


@pytest.mark.parametrize("fresh", [True, False])
def test_tensors_are_read_in_place(fresh: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())), nn.Linear(64, 4))
    rows, largest = torch.randn(8, 64), 64 * 64 * 4
    with autopar.parallelize(model, 1, rows, optimizer=ADAMW) as pm:
        pm.train_step(rows, CLASSES)
        pm.save_checkpoint(tmp_path)
        saved = pm.state_dict()
    with autopar.parallelize(model, 1, rows, optimizer=ADAMW) as pm:
        if not fresh:
            pm.train_step(rows, 3 - CLASSES)
        with TensorPeak() as peak:
            pm.load_checkpoint(tmp_path)
        assert_equal(pm.state_dict(), saved)
        state = sum(t.nbytes for t in saved.values()) * 2
        assert peak.bytes < (state if fresh else 0) + 3 * largest


@pytest.mark.parametrize("how", ["no folder", "missing"])
def test_what_is_not_there_may_be_on_another_node(how: str, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(saved, how)
    nodes = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}
    for name, value in nodes.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CheckpointError, match=r", on a disk that all nodes share\.$"):
        read_weights(saved)


@pytest.mark.parametrize("how", ["foreign", "newer", "cut header"])
def test_a_header_that_is_not_ours_is_not_overwritten(how: str, saved: Path) -> None:
    broken(saved, how)
    text = (saved / "checkpoint.json").read_text()
    with small() as pm, unchanged(pm), pytest.raises(CheckpointError):
        pm.save_checkpoint(saved)
    assert (saved / "checkpoint.json").read_text() == text


def test_folders_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / "data-12").mkdir()
    (tmp_path / "data-12" / "photos.tar").write_text("mine")
    with small() as pm:
        pm.save_checkpoint(tmp_path)
        pm.save_checkpoint(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("data-*")) == ["data-12", "data-14"]


def test_another_model(saved: Path) -> None:
    models = {
        r"another model \(Sequential, here Sequential\)\. Of 4 weights, "
        r"3 other: 0\.weight float32\[16, 8\] there, float32\[24, 8\] here, 0\.bias .* 2\.weight": nn.Sequential(
            nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 4)
        ),
        r"Of 4 weights, 2 missing there \(1\.weight, 1\.bias\); 2 unknown here \(2\.weight, 2\.bias\)": nn.Sequential(
            nn.Linear(8, 16), nn.Linear(16, 4)
        ),
        r"4 other: 0\.weight float32\[16, 8\] there, float64\[16, 8\] here, .* and 1 more": nn.Sequential(
            nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)
        ).double(),
    }
    for message, model in models.items():
        rows = ROWS.to(next(model.parameters()).dtype)
        with small(model, rows=rows) as pm, pytest.raises(CheckpointError, match=message):
            pm.load_checkpoint(saved)


def test_another_optimizer(saved: Path) -> None:
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    message = (
        r"has the state of AdamW \(amsgrad, betas, .*\), the optimizer here is SGD \(.*momentum.*\)\. Pass the same"
    )
    with small(optimizer=sgd) as pm, unchanged(pm), pytest.raises(CheckpointError, match=message):
        pm.load_checkpoint(saved)
    adam = functools.partial(torch.optim.Adam, lr=0.1)
    with (
        small(optimizer=adam) as pm,
        pytest.warns(ResumeWarning, match="was saved with .*, here it is"),
    ):
        pm.load_checkpoint(saved)  # AdamW but for the decay: the same state
        assert pm.learning_rates() == [0.01]


def test_other_groups(tmp_path: Path) -> None:
    with small(optimizer=grouped, lr_scheduler=STEPLR) as pm:
        pm.save_checkpoint(tmp_path)
    message = r"0\.weight and 0\.bias are in one parameter group here, .*: weight_decay 0\.1 and 0\.0\. Group the"
    with small() as pm, unchanged(pm), pytest.raises(CheckpointError, match=message):
        pm.load_checkpoint(tmp_path)

    def apart(params: Any) -> torch.optim.Optimizer:
        return ADAMW([{"params": [p], "weight_decay": 0.1} for p in params])

    message = "here has 4 parameter groups, in the checkpoint it has 2"
    with small(optimizer=apart, lr_scheduler=STEPLR) as pm, pytest.raises(CheckpointError, match=message):
        pm.load_checkpoint(tmp_path)


def test_another_seed_or_batch(saved: Path) -> None:
    with small(seed=3) as pm, pytest.warns(ResumeWarning, match=r"saved with seed 0, here it is 3: .* Pass seed=0"):
        pm.load_checkpoint(saved)
    with small(rows=ROWS[:4]) as pm, pytest.warns(ResumeWarning, match="global batch of 8, here it is 4: gradients"):
        pm.load_checkpoint(saved)
    with small(lr_scheduler=STEPLR) as pm, pytest.warns(ResumeWarning, match="has no learning-rate scheduler"):
        pm.load_checkpoint(saved)
        pm.save_checkpoint(saved)
    with (
        small() as pm,
        pytest.warns(ResumeWarning, match="was saved with scheduler StepLR; this run has none: learning"),
    ):
        pm.load_checkpoint(saved)


def test_two_savers(saved: Path) -> None:
    script = f"""
import fcntl, sys
file = open({str(saved / ".saving")!r}, "a")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""
    other = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdout.readline() == "locked\n"
    with small() as pm:
        with unchanged(pm), pytest.raises(CheckpointError, match=r"Another process is saving a checkpoint to .*saved"):
            pm.save_checkpoint(saved)
        other.communicate()
        pm.save_checkpoint(saved)


class WithoutState(torch.optim.lr_scheduler.StepLR):
    def state_dict(self) -> dict[str, Any]:
        raise AttributeError("'WithoutState' object has no attribute 'milestones'")


def test_only_errors_of_the_disk_ask_for_room(tmp_path: Path) -> None:
    scheduler = functools.partial(WithoutState, step_size=1)
    with small(lr_scheduler=scheduler) as pm, unchanged(pm), pytest.raises(CheckpointError) as error:
        pm.save_checkpoint(tmp_path / "saved")
    assert str(error.value).endswith(
        "saved: AttributeError: 'WithoutState' object has no attribute 'milestones' on rank 0 (stage 0). Training can "
        "go on; mend the state_dict() of the optimizer or the scheduler that raised it."
    )


class Watching(torch.optim.lr_scheduler.StepLR):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"watch": Path("here")}


class Refusing(torch.optim.lr_scheduler.StepLR):
    def state_dict(self) -> dict[str, Any]:
        raise ArithmeticError("no state today")


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with small() as pm, unchanged(pm):
        with pytest.raises(UsageError, match="extra cannot be saved: Object of type Tensor is not JSON"):
            pm.save_checkpoint(tmp_path, {"loss": torch.zeros(())})
        with pytest.raises(UsageError, match=r"extra cannot be saved: key 0 is an int\. It must consist"):
            pm.save_checkpoint(tmp_path, {"best": [{0: 1.5}]})
        with pytest.raises(UsageError, match=r'The folder to save to is ""\.'):
            pm.save_checkpoint("")
        with pytest.raises(
            CheckpointError, match=r"Cannot save a checkpoint to .*file: File exists .* choose another f"
        ):
            pm.save_checkpoint(tmp_path / "file")
    watching = functools.partial(Watching, step_size=1)
    message = r"The scheduler state cannot be saved: .*keep other objects out of state_dict\(\)"
    with small(lr_scheduler=watching) as pm, unchanged(pm), pytest.raises(CheckpointError, match=message):
        pm.save_checkpoint(tmp_path)
    refusing = functools.partial(Refusing, step_size=1)
    message = r"ArithmeticError: no state today on rank 0 \(stage 0\)\. Training can go on; mend the state_dict\(\)"
    with small(lr_scheduler=refusing) as pm, unchanged(pm), pytest.raises(CheckpointError, match=message):
        pm.save_checkpoint(tmp_path)
    assert list(tmp_path.glob("data-*")) == []
