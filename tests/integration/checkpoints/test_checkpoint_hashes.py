"""Any damage to a checkpoint is seen, and older ones that are kept can be used instead; `autopar verify` says so."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.checkpoint_models import (
    CLASSES,
    ROWS,
    as_version_1,
    assert_equal,
    edit_header,
    rehash,
    save_small,
    small,
    unchanged,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from typer.testing import CliRunner

from autopar import CheckpointError, ResumeWarning, UsageError
from autopar.api.checkpoint import read_header, read_weights
from autopar.ir.checkpoint_header import Header
from autopar.runtime.checkpoint.folder import copy_checkpoint, remove_checkpoint
from autopar.runtime.checkpoint.reshard_planners import read_metadata
from autopar.runtime.checkpoint.save_load import inspect
from autopar.tools.cli.app import app

FILES = ["checkpoint.json", ".metadata", "training.pt", "__0_0.distcp"]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_small(tmp_path / "saved")


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Folder with a checkpoint after one update, kept with one after two."""
    with small() as pm:
        for step in (1, 2):
            pm.train_step(ROWS, CLASSES)
            pm.save_checkpoint(tmp_path / "two", {"step": step}, keep=2)
    return tmp_path / "two"


def path_of(folder: Path, name: str) -> Path:
    return folder / name if name == "checkpoint.json" else folder / read_header(folder).data / name


@contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    """Within ``with``, one bit of a file is another one."""
    raw = bytearray(before := path.read_bytes())
    raw[bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)
    yield
    path.write_bytes(before)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_seen_wherever_it_is(name: str, two: Path) -> None:
    path = path_of(two, name)
    bits, draw = 8 * path.stat().st_size, random.Random(0)
    for bit in (bits // 2, *(draw.randrange(bits) for _ in range(15))):
        with flipped(path, bit), pytest.raises(CheckpointError) as error:
            read_weights(two)
        message = str(error.value)
        assert name in message and f"Kept there: {two / 'data-'}" in message and "data-1 after 1 update" in message
    assert len(read_weights(two)) == 4


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_not_loaded_and_an_older_one_is(name: str, two: Path) -> None:
    path = path_of(two, name)
    with small() as pm, flipped(path, 4 * path.stat().st_size):
        with unchanged(pm), pytest.raises(CheckpointError, match=f"{name}.*Kept there: .*data-1 after 1 update"):
            pm.load_checkpoint(two)
        assert pm.load_checkpoint(two / "data-1") == {"step": 1}
        assert_equal(pm.state_dict(), read_weights(two / "data-1"))


def test_ranks_share_the_files(two: Path) -> None:
    path = path_of(two, "training.pt")
    with flipped(path, 4 * path.stat().st_size):
        found = [inspect(str(two), part, 3) for part in range(3)]
    assert [type(one) for one in found] == [Header, Header, CheckpointError]


@pytest.mark.full
def test_each_rank_of_a_pool_checks_its_part(tmp_path: Path) -> None:
    with small(devices=2, pp=2, microbatches=2) as pm:
        pm.train_step(ROWS, CLASSES)
        pm.save_checkpoint(tmp_path)
        assert set(read_header(tmp_path).files) == {".metadata", "training.pt", "__0_0.distcp", "__1_0.distcp"}
        for name in ("__0_0.distcp", "__1_0.distcp"):
            path = tmp_path / "data-1" / name
            with flipped(path, 4 * path.stat().st_size), unchanged(pm), pytest.raises(CheckpointError, match=name):
                pm.load_checkpoint(tmp_path)
        pm.load_checkpoint(tmp_path)


# -- older ones -----------------------------------------------------------------------------------------------------


def test_as_many_are_kept_as_were_asked_for(tmp_path: Path) -> None:
    states = []
    with small() as pm:
        for step in range(1, 5):
            pm.train_step(ROWS, CLASSES)
            pm.save_checkpoint(tmp_path, {"step": step}, keep=3)
            states.append(pm.state_dict())
        assert sorted(path.name for path in tmp_path.glob("data-*")) == ["data-2", "data-3", "data-4"]
        for number in (2, 3, 4):
            assert_equal(read_weights(tmp_path / f"data-{number}"), states[number - 1])
            assert read_header(tmp_path / f"data-{number}").updates == number
        assert read_header(tmp_path).extra == {"step": 4}
        pm.save_checkpoint(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("data-*")) == ["data-5"]


@pytest.mark.parametrize("keep", [0, -1, True, 1.5, "2", None])
def test_what_is_no_number_of_checkpoints(keep: object, saved: Path) -> None:
    with (
        small() as pm,
        unchanged(pm),
        pytest.raises(UsageError, match=f"keep={keep!r} must be a whole number of at le"),
    ):
        pm.save_checkpoint(saved, keep=keep)
    assert read_header(saved).extra == {"step": 1}


def test_one_that_is_kept_stays_as_it_is_and_may_go_elsewhere(two: Path, tmp_path: Path) -> None:
    with small() as pm:
        with (
            unchanged(pm),
            pytest.raises(CheckpointError, match=r"data-1: it is one that was kept, and stays as it wa"),
        ):
            pm.save_checkpoint(two / "data-1")
        shutil.copytree(two / "data-1", tmp_path / "mine")
        assert pm.load_checkpoint(tmp_path / "mine") == {"step": 1}
    done = CliRunner().invoke(app, ["export", str(tmp_path / "mine"), "-o", str(tmp_path / "mine" / "model")])
    assert done.exit_code == 2 and "it lies in the checkpoint" in done.output
    (two / "training.pt").write_text("somebody's")
    for folder in (two, tmp_path / "mine"):
        remove_checkpoint(folder)
    assert not (tmp_path / "mine").exists() and [path.name for path in two.iterdir()] == ["training.pt"]


def test_a_save_that_fails_leaves_all_that_are_kept(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(two)._replace(free=1000)
    path = two / "data-2" / "__0_0.distcp"
    with small() as pm:
        pm.load_checkpoint(two / "data-1")
        with flipped(path, 4 * path.stat().st_size), monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda path: usage)
            with pytest.raises(CheckpointError, match="No space left on device"):
                pm.save_checkpoint(two)
        assert sorted(p.name for p in two.glob("data-*")) == ["data-1", "data-2"]
        pm.save_checkpoint(two)
    assert sorted(p.name for p in two.glob("data-*")) == ["data-3"]


# -- copies and names -----------------------------------------------------------------------------------------------


def test_a_copy_is_as_it_was_saved_or_none(saved: Path, tmp_path: Path) -> None:
    path, target = saved / "data-1" / "__0_0.distcp", save_small(tmp_path / "target")
    edit_header(target, extra="before")
    with flipped(path, 4 * path.stat().st_size), pytest.raises(CheckpointError, match=r"__0_0\.distcp has another SHA"):
        copy_checkpoint(saved, target)
    assert read_header(target).extra == "before" and [p.name for p in target.glob("data-*")] == ["data-1"]
    copy_checkpoint(saved, target)
    assert_equal(read_weights(target), read_weights(saved))
    assert read_header(target).files == read_header(saved).files


@pytest.mark.parametrize("name", ["../../evil.sh", "/tmp/evil.sh", "evil.sh", "sub/training.pt", ""])
def test_a_header_names_only_what_saves_write(name: str, saved: Path, tmp_path: Path) -> None:
    (tmp_path / "evil.sh").write_text("echo evil")
    files = {n: vars(file) for n, file in read_header(saved).files.items()}
    edit_header(saved, files=files | {name: {"size": 9, "sha256": None}})
    message = r"is damaged: its header lists files such as '.*', which no save writes"
    with pytest.raises(CheckpointError, match=message):
        copy_checkpoint(saved, tmp_path / "runs" / "mine" / "best")
    with pytest.raises(CheckpointError, match=message):
        read_weights(saved)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["data-1", "data-1/__0_0.distcp", "data-1/training.pt", "data-1/.metadata"])
def test_links_are_not_followed(name: str, saved: Path, tmp_path: Path) -> None:
    (saved / name).rename(tmp_path / "elsewhere")
    (saved / name).symlink_to(tmp_path / "elsewhere")
    for act in (read_weights, lambda folder: copy_checkpoint(folder, tmp_path / "copy")):
        with pytest.raises(CheckpointError, match=f"{Path(name).name} is a link"):
            act(saved)
    assert not (tmp_path / "copy").exists()


def test_tensors_lie_in_files_of_the_checkpoint(saved: Path) -> None:
    path = saved / "data-1" / ".metadata"
    metadata = read_metadata(saved / "data-1")
    places = {i: replace(place, relative_path="../../other.distcp") for i, place in metadata.storage_data.items()}
    metadata.storage_data = places
    path.write_bytes(pickle.dumps(metadata))
    rehash(saved)
    with small() as pm, unchanged(pm), pytest.raises(CheckpointError, match=r"it names '\.\./\.\./other\.distcp'"):
        pm.load_checkpoint(saved)


# -- version 1 ------------------------------------------------------------------------------------------------------


def test_one_of_version_1_is_loaded_and_says_that_it_has_no_hashes(saved: Path, tmp_path: Path) -> None:
    expected = read_weights(saved)
    as_version_1(saved)
    assert json.loads((saved / "checkpoint.json").read_text())["schema_version"] == 1
    with small() as pm:
        with pytest.warns(ResumeWarning, match=r"saved has no hashes: an earlier autopar saved it\."):
            assert pm.load_checkpoint(saved) == {"step": 1}
        assert_equal(pm.state_dict(), expected)
        with pytest.warns(ResumeWarning, match=r"saved has no hashes"):
            assert_equal(read_weights(saved), expected)
        copy_checkpoint(saved, tmp_path / "copy")
        pm.save_checkpoint(saved)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResumeWarning)
        assert_equal(read_weights(saved), expected)
        assert_equal(read_weights(tmp_path / "copy"), expected)
    assert [path.name for path in saved.glob("data-*")] == ["data-2"]


# -- autopar verify -------------------------------------------------------------------------------------------------


def verify(folder: Path) -> tuple[int, str, str]:
    """Exit code, table without its first two lines, and errors of ``autopar verify``."""
    done = CliRunner().invoke(app, ["verify", str(folder)])
    return done.exit_code, "\n".join(done.stdout.splitlines()[2:]), done.stderr


def test_a_checkpoint_and_those_kept_with_it_are_verified(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(two.parent)
    code, table, errors = verify(Path("two"))
    rows = [line.split() for line in table.splitlines()]
    assert (code, errors) == (0, "")
    assert [(row[0], row[1], row[2], row[-2:]) for row in rows] == [
        ("two", "2", "3", ["as", "saved"]), ("two/data-1", "1", "3", ["as", "saved"]),
    ]  # fmt: skip
    with flipped(two / "checkpoint.json", 1000):
        code, table, errors = verify(Path("two"))
    assert code == 2 and [line.split()[-1] for line in table.splitlines()] == ["damaged", "saved", "saved"]
    assert "1 of 3 checkpoints cannot be used.\ntwo/checkpoint.json is" in errors
    path = two / "data-1" / "__0_0.distcp"
    with flipped(path, 4 * path.stat().st_size):
        code, table, errors = verify(Path("two"))
    assert code == 2 and [line.split()[-1] for line in table.splitlines()] == ["saved", "damaged"]
    assert "1 of 2 checkpoints cannot be used.\nThe checkpoint in two/data-1 is damaged: in it, 1 of 3" in errors
    assert (
        "__0_0.distcp has another SHA-256. Copy it again, or use another checkpoint. Kept there: two/data-2" in errors
    )


def test_a_run_stands_for_its_checkpoints(
    two: Path, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    two.rename(tmp_path / "run" / "last")
    saved.rename(tmp_path / "run" / "best")
    as_version_1(tmp_path / "run" / "best")
    monkeypatch.chdir(tmp_path)
    code, table, _ = verify(Path("run"))
    assert code == 0 and [line.split()[0] for line in table.splitlines()] == ["run/last", "run/last/data-1", "run/best"]
    assert table.endswith("no hashes; sizes as saved")
    (tmp_path / "run" / "last" / "checkpoint.json").unlink()
    code, table, errors = verify(Path("run"))
    assert code == 2 and "run/last is not a checkpoint: it has no checkpoint.json" in errors
    assert [line.split()[-1] for line in table.splitlines()] == ["damaged", "saved", "saved", "saved"]
    (tmp_path / "empty").mkdir()
    for nothing, message in (("empty", "it has no checkpoint.json"), ("nowhere", "it does not exist")):
        code, table, errors = verify(Path(nothing))
        assert (code, table) == (2, "") and f"error: {nothing} is not a checkpoint: {message}. Give" in errors


@pytest.mark.parametrize("fault", ["no element", "outside", "no tensor", "another shape", "no state", "headers"])
def test_what_the_hashes_of_a_wrong_save_hide(fault: str, saved: Path) -> None:
    """Faults of whoever wrote the checkpoint, with hashes that fit."""
    data, metadata = saved / "data-1", read_metadata(saved / "data-1")
    tensor = metadata.state_dict_metadata["model.0.weight"]
    assert isinstance(tensor, TensorStorageMetadata)
    index = next(i for i in metadata.storage_data if i.fqn == "model.0.weight")
    message = {
        "no element": r"has 0 of 128 elements of model\.0\.weight",
        "outside": r"does not have all of model\.0\.weight in its files",
        "no tensor": r"metadata has no tensor model\.0\.weight",
        "another shape": r"has 0\.weight in another shape than its header",
        "no state": r"training\.pt is damaged: ",
        "headers": r"The headers of .*saved and .*data-1 differ",
    }[fault]
    if fault == "no element":
        tensor.chunks.clear()
    elif fault == "outside":
        metadata.storage_data[index] = replace(metadata.storage_data[index], length=10**9)
    elif fault == "no tensor":
        del metadata.state_dict_metadata["model.0.weight"]
    elif fault == "another shape":
        tensor.size = torch.Size([4])
    elif fault == "no state":
        (data / "training.pt").write_bytes(b"none")
    elif fault == "headers":
        edit_header(data, updates=7)
    (data / ".metadata").write_bytes(pickle.dumps(metadata))
    rehash(saved)
    if fault != "headers":
        rehash(data)
    code, _, errors = verify(saved)
    assert code == 2
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(errors)
