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
from autopar.ir.status import CURRENT

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(autopar.__file__).parents[1])}
TORCH_AFTER = "import sys; from autopar.tools.cli.app import main\ntry: main()\nfinally: print('torch' in sys.modules)"
VIT = ("plan", "vit_tiny_patch16_224", "--devices", "4")


def run(script: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script, *args], env=ENVIRONMENT, capture_output=True, text=True)


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
def test_wrong_arguments_are_refused_without_torch(args: tuple[str, ...], message: str) -> None:
    done = run(TORCH_AFTER, *args)
    assert (done.returncode, done.stdout) == (2, "False\n") and message in done.stderr


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
