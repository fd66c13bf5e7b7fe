"""``autopar doctor`` on this machine: its page, its JSON, wrong flags, Ctrl-C."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.cli import invoke

from autopar.tools.cli.doctor import doctor
from autopar.tools.doctor.finding import FAULTS, SECTIONS, STATUSES

COMMAND = [sys.executable, "-m", "autopar", "doctor"]
PAGE = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text()


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], int]:
    """Empty folder in which the command ran, what it printed, and its exit code."""
    folder = tmp_path_factory.mktemp("doctor")
    done = subprocess.run([*COMMAND, "--json", "--quiet"], cwd=folder, capture_output=True, text=True)
    assert done.stderr == ""
    return folder, json.loads(done.stdout), done.returncode


def test_json_has_the_documented_keys(checked) -> None:
    _, page, code = checked
    helped = " ".join((doctor.__doc__ or "").partition("With --json:")[2].split())
    assert re.findall(r'\{?"(\w+)":? ?', helped.partition('"findings"')[0]) == [
        "autopar",
        "exit_code",
        "summary",
        *STATUSES,
    ]
    (row,) = re.findall(r"^\| `doctor` \| (.*) \|$", PAGE, re.MULTILINE)
    assert list(page) == re.findall(r"`(\w+)`", row)
    assert list(page["summary"]) == list(STATUSES) and page["exit_code"] == code
    for finding in page["findings"]:
        assert list(finding) == ["section", "name", "status", "value", "remedy", "rate"]
        assert finding["section"] in SECTIONS and bool(finding["remedy"]) == (finding["status"] in FAULTS)
        assert finding["rate"] is None or list(finding["rate"]) == ["measured", "predicted", "unit"]
        assert all(f'"{key}"' in helped for key in (*finding, *(finding["rate"] or ())))


def test_this_machine_was_tried(checked) -> None:
    folder, page, code = checked
    found = {finding["name"]: finding for finding in page["findings"]}
    for name in ("loopback", "worker processes", "solver", "cost model", "inductor"):
        assert found[name]["status"] == "ok", found[name]
    transfers = [finding for finding in page["findings"] if finding["section"] == "links" and finding["rate"]]
    assert transfers and all(finding["rate"]["measured"] > 1e6 for finding in transfers)
    assert found["write"]["rate"]["measured"] > 0 and list(folder.iterdir()) == []
    assert code == (1 if any(finding["status"] == "broken" for finding in page["findings"]) else 0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--devices", "0"], "Invalid value for '--devices'"),
        (["--run-folder", "missing"], "--run-folder missing is no folder. Give one that exists"),
        (["--hardware", "h20-nvlink"], "No cost model is named 'h20-nvlink'. Did you mean"),
    ],
)
def test_wrong_flags(flags: list[str], message: str, folder: Path) -> None:
    code, out, error = invoke("doctor", *flags)
    assert (code, out) == (2, "") and message in error


def test_a_broken_machine_is_exit_code_1(folder: Path) -> None:
    """With a torch that cannot be imported, which ends the page early."""
    program = "import sys; sys.modules['torch'] = None; from autopar.tools.cli.app import main; main()"
    done = subprocess.run([sys.executable, "-c", program, "doctor"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == ""
    assert re.search(
        r"^broken  import of torch +ModuleNotFoundError.*\n +→ Install torch again", done.stdout, re.MULTILINE
    )
    assert re.search(r"\n\n\d+ ok, \d+ slow, 1 broken\n$", done.stdout)


def test_other_processes_of_a_node_print_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert invoke("doctor") == (0, "", "")


def test_ctrl_c_leaves_no_process(folder: Path) -> None:
    process = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    started: list[psutil.Process] = []
    while not started and process.poll() is None:
        started = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate()
    assert (process.returncode, out) == (130, b"") and b"Traceback" not in error
    _, alive = psutil.wait_procs(started, timeout=30)
    assert started and alive == [] and list(folder.iterdir()) == []
