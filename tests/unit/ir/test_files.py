"""Replacement of files: the old content until the new one is whole."""

from __future__ import annotations

import os
from pathlib import Path
from stat import S_IMODE

import pytest

from autopar.ir.files import replacing


def test_the_old_content_is_there_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("old")
    path.chmod(0o600)
    with replacing(path) as file:
        file.write_text("ne")
        assert path.read_text() == "old" and file.parent == tmp_path
        file.write_text("new")
    assert (path.read_text(), S_IMODE(path.stat().st_mode), list(tmp_path.iterdir())) == ("new", 0o600, [path])


@pytest.mark.parametrize("there", [False, True])
def test_after_an_error_the_file_is_as_it_was(there: bool, tmp_path: Path) -> None:
    path = tmp_path / "log"
    if there:
        path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as file:
        file.write_text("new")
        raise KeyboardInterrupt
    assert [p.read_text() for p in tmp_path.iterdir()] == ["old"] * there


def test_what_a_killed_process_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "log.tmp").write_text("half a line")
    with replacing(tmp_path / "log") as file:
        file.write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_links_stay_and_devices_are_written_to(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "log")
    with replacing(tmp_path / "link") as file:
        file.write_text("new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "log").read_text() == "new"
    with replacing(Path(os.devnull)) as file:
        assert file == Path(os.devnull)
