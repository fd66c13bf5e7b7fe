"""The start and the end of the command line's process: what needs no torch, and what is skipped at the end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.cli import invoke

import autopar
from autopar.errors import CheckpointError, UsageError
from autopar.ir.status import CURRENT
from autopar.tools.cli.command import ReportedInterrupt
from autopar.tools.cli.early_checks import DATASETS, LIBRARIES, WITHOUT_FILES, check_data
from autopar.tools.cli.train_run import fit
from autopar.train import Wanted, load_data
from autopar.train.data import datasets

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(autopar.__file__).parents[1])}
TORCH_AFTER = "import sys; from autopar.tools.cli.app import main\ntry: main()\nfinally: print('torch' in sys.modules)"
VIT = ("plan", "vit_tiny_patch16_224", "--devices", "4")
TRAIN = ("train", "vit_tiny_patch16_224", "--data")


def run(script: str, *args: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *args]
    return subprocess.run(command, env=ENVIRONMENT, cwd=folder, capture_output=True, text=True)


IMPORTED = """
import sys
before = set(sys.modules)
import autopar
print(*sorted(name for name in set(sys.modules) - before if name.partition(".")[0] not in sys.stdlib_module_names))
"""


def test_import_autopar_imports_no_other_library() -> None:
    assert run(IMPORTED).stdout == "autopar autopar.errors\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((*TRAIN, "digits", "--devices", "3", "--dp", "3", "-b", "32"), "3 replicas cannot share a batch of 32"),
        ((*TRAIN, "digits", "--devices", "2", "-b", "8", "--grad-accum-steps", "8", "--dp", "2"), "batch of 1 sample"),
        ((*TRAIN, "digit"), "No data set is named 'digit'. Did you mean digits?"),
        ((*TRAIN, "imagefolder"), "Data set 'imagefolder' needs --data-dir FOLDER"),
        ((*TRAIN, "cifar10", "--data-dir", "none"), "--data-dir none: there is no such folder."),
        (("verify", "none"), "none is not a checkpoint: it does not exist."),
        (("export", "none", "-o", "out.safetensors"), "none is not a checkpoint: it does not exist."),
        (("plan", "vit_tyny_patch16_224", "--devices", "4"), "Did you mean vit_tiny_patch16_224"),
        (("train", "vit_tyny_patch16_224", "--data", "digits"), "Did you mean vit_tiny_patch16_224"),
        (("bench", "torchvision:resnet51", "--devices", "2"), "Did you mean resnet50"),
        (("check", "vit_tiny_patch16_224", "--devices", "2", "--pp", "3"), "pp=3 needs a multiple of 3 devices"),
        ((*VIT, "--hardware", "h200-nvlnk"), "Did you mean h200-nvlink"),
        ((*VIT, "--schedule", "1f2b"), "schedule='1f2b' is unknown"),
        ((*VIT, "--memory", "lots"), "Cannot read 'lots' as a memory size"),
        ((*VIT, "--input", "6,3,x"), "Cannot read --input '6,3,x'"),
        ((*VIT, "--input", "6,3,224,224", "--dp", "4"), "4 replicas cannot share a batch of 6 samples"),
        ((*VIT, "-o", "/nowhere/plan.json"), "Cannot write to /nowhere/plan.json"),
    ],
    ids=" ".join,
)
def test_wrong_arguments_are_refused_without_torch(args: tuple[str, ...], message: str, tmp_path: Path) -> None:
    code = 2 if args[0] not in ("verify", "export") else CheckpointError.exit_code
    done = run(TORCH_AFTER, *args, folder=tmp_path)
    assert (done.returncode, done.stdout) == (code, "False\n") and message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_early_checks_know_the_data_sets() -> None:
    assert list(datasets.DATASETS) == list(DATASETS) and list(datasets.LIBRARIES) == list(LIBRARIES)
    for name in WITHOUT_FILES:
        with pytest.raises(UsageError, match="needs no files"):
            load_data(name, Wanted(8, folder=Path("none")))
    for name in ("digit", "hf", "hf:", "imagefolder"):
        said = []
        for check in (lambda n: load_data(n, Wanted(8)), lambda n: check_data(n, None, False)):
            with pytest.raises(UsageError) as error:
                check(name)
            said.append(str(error.value))
        assert said[0] == said[1]


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "where", "message"),
    [
        (VIT, "autopar.plan", "Interrupted."),
        ((*TRAIN, "digits", "--devices", "1"), "autopar.tools.cli.train_run.parallelize", "Interrupted."),
        (
            ("bench", "vit_tiny_patch16_224", "--devices", "1"),
            "autopar.tools.bench.run.run_bench",
            "Interrupted before the first baseline; nothing was written.",
        ),
    ],
    ids=["plan", "train", "bench"],
)
def test_ctrl_c_is_one_line_and_leaves_no_folder(args, where, message, tmp_path, monkeypatch) -> None:
    def press(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(where, press)
    code, _, error = invoke("--quiet", *args)
    assert (code, error.strip()) == (130, message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("error", "raised"), [(KeyboardInterrupt, ReportedInterrupt), (SystemExit, SystemExit)])
def test_an_interrupted_training_loop_says_it_once(error, raised, monkeypatch, capsys) -> None:
    class Interrupted:
        def fit(self) -> None:
            raise error

    monkeypatch.setattr("autopar.tools.cli.train_run.farewell", lambda _: "Interrupted in epoch 1.")
    with pytest.raises(raised):
        fit(Interrupted())  # type: ignore[arg-type]
    assert capsys.readouterr().err == "\nInterrupted in epoch 1.\n"


# -- the end -----------------------------------------------------------------------------------------------------------


ENDING = """
import atexit, sys
from autopar.tools.cli.process_end import ProcessEnd

class Freed:
    def __del__(self):
        sys.__stdout__.write("freed ")

end = ProcessEnd(is_brief=sys.argv[1] == "brief", exit_code=3)
atexit.register(end.skip_teardown)
atexit.register(print, "closed", end=" ")
kept = Freed()
print("result", end=" ")
sys.exit(3)
"""


@pytest.mark.parametrize(("kind", "out"), [("brief", "result closed "), ("long", "result closed freed ")])
def test_a_brief_command_skips_teardown_alone(kind: str, out: str) -> None:
    done = run(ENDING, kind)
    assert (done.returncode, done.stdout, done.stderr) == (3, out, "")


def test_planning_says_what_it_does() -> None:
    class Texts:
        def __init__(self) -> None:
            self.found: list[str] = []

        def update(self, text: str) -> None:
            self.found.append(text)

    texts = Texts()
    token = CURRENT.set(texts)  # type: ignore[arg-type]
    try:
        autopar.plan("vit_tiny_patch16_224", 2, hardware="cpu-generic", cost="analytic")
    finally:
        CURRENT.reset(token)
    name = "vit_tiny_patch16_224"
    assert texts.found[:3] == ["building the model", f"tracing {name}", f"pricing the operations of {name}"]
    assert texts.found[3] == "searching meshes: 0 of 3 done, now pp 1 × tp 1 × dp 2"
    assert texts.found[-1].startswith("choosing the final cuts of pp ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="plans for the GPU")
def test_a_plan_without_hardware_says_whose_it_is() -> None:
    tiny = ("vit_tiny_patch16_224", "--model-kwargs", "depth=2", "patch_size=8", "--img-size", "32", "--devices", "2")
    code, out, _ = invoke("plan", *tiny)
    assert code == 0 and "(cost model cpu-generic)" in out
    assert "There is no GPU here: this plan is for processors. For GPUs: --hardware a100-nvlink or " in out
    assert "There is no GPU" not in invoke("--quiet", "plan", *tiny)[1]
