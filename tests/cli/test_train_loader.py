"""``autopar train --loader``: what is chosen, kept and refused. Here the CPU decodes in place of a GPU."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchvision
from support.cli import invoke
from support.image_reference import replace_kernels
from support.pictures import write_jpegs
from support.train_cli import TINY, losses

from autopar.errors import UsageError
from autopar.tools.cli import train_loader
from autopar.tools.cli.train_loader import faster_loader, images_per_second
from autopar.train import read_run

FEW = [*TINY, "--img-size", "32", "-b", "8", "--sched", "constant", "--mixup", "0.4", "--workers", "0"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of a data set of JPEGs."""
    root = tmp_path_factory.mktemp("photos")
    write_jpegs(root, 16, 4, sizes=((40, 30), (30, 44)))
    return ["--data", "imagefolder", "--data-dir", str(root)]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command believes that there is a GPU; ranks and decoder stay on the CPU, and the decoder is a level off."""

    def decoded(jpegs: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
        return [image ^ 1 for image in real(jpegs, **options)]

    replace_kernels(monkeypatch)
    real = torchvision.io.decode_jpeg
    monkeypatch.setattr("torchvision.io.decode_jpeg", decoded)
    monkeypatch.setattr(train_loader, "this_machine", lambda **_: SimpleNamespace(device_type="cuda"))


@pytest.mark.usefixtures("gpu")
def test_a_resumed_run_keeps_the_loader_that_was_chosen(
    photos: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = [*FEW, *photos, "--devices", "1"]
    code, printed, error = invoke("train", *few, "--loader", "gpu", "--epochs", "2", "-o", str(tmp_path / "whole"))
    assert code == 0 and "loader" not in printed, error
    code, _, error = invoke("train", *few, "--epochs", "1", "-o", str(tmp_path / "cpu"))
    assert code == 0, error
    expected, on_cpu = losses(tmp_path / "whole"), losses(tmp_path / "cpu")
    assert on_cpu == pytest.approx(expected[:2], rel=2e-3) and on_cpu != expected[:2]

    auto = [*few, "--loader", "auto", "-o", str(tmp_path / "auto")]
    monkeypatch.setattr(train_loader, "images_per_second", lambda loader, _: 20.0 if loader.device_batches else 10.0)
    code, printed, error = invoke("train", *auto, "--epochs", "1")
    assert code == 0 and "loader      gpu: 20 images/s against 10 on CPU with 0 workers\n" in printed, printed + error
    assert read_run(tmp_path / "auto" / "last").settings["--loader"] == "gpu"
    monkeypatch.setattr(train_loader, "images_per_second", None)
    resumed = [*few, "--epochs", "2", "-o", str(tmp_path / "auto"), "--resume", str(tmp_path / "auto")]
    code, _, error = invoke("train", *resumed)
    assert code == 2 and "is of a run with --loader gpu, and pixels differ slightly between decoders. Give" in error
    code, _, error = invoke("train", *resumed, "--aa", "rand-m9", "--loader", "auto")
    assert code == 2 and "which is impossible here: this run has no GPU, or its augmentation has changed" in error
    code, printed, error = invoke("train", *resumed, "--loader", "auto")
    assert code == 0 and "images/s against" not in printed, error
    assert losses(tmp_path / "auto") == expected


@pytest.mark.usefixtures("gpu")
def test_ranks_in_workers_and_evaluation_alone(photos: list[str], tmp_path: Path) -> None:
    few = [*FEW, *photos, "--epochs", "1", "--loader", "gpu"]
    for mesh in (["--devices", "1"], ["--devices", "2", "--dp", "2"]):
        code, _, error = invoke("train", *few, *mesh, "-o", str(tmp_path / mesh[1]))
        assert code == 0, error
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-4)
    only = [*TINY, "--img-size", "32", "-b", "8", "--workers", "0", *photos, "--devices", "1", "--val-only"]
    only += ["--initial-checkpoint", str(tmp_path / "1")]
    code, printed, error = invoke("train", *only, "--loader", "auto")
    assert code == 0 and re.search(r"\nloader      (gpu|cpu): [\d,]+ ", printed) and "top-1" in printed, error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--loader", "gpu"], "--loader gpu needs a GPU, and this run has none. Leave it out."),
        (["--loader", "dali"], "--loader dali is unknown. It is one of cpu, gpu, auto."),
        (["--loader", "gpu", "--data", "synthetic"], "--loader gpu decodes images, and this data set is in memory."),
        (["--loader", "gpu", "--aa", "3a"], "--loader gpu cannot do --aa 3a, which changes images of Pillow alone."),
    ],
)
def test_loaders_that_are_refused(flags: list[str], message: str, photos: list[str]) -> None:
    data = photos if "--data" not in flags else []
    code, _, error = invoke("train", *FEW, *data, "--devices", "1", *flags)
    assert code == 2 and message in error, error


def test_auto_is_the_cpu_without_a_gpu_or_for_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch, photos: Any) -> None:
    chosen: list[str] = []

    def noted(asked: Any, data: Any) -> str:
        chosen.append(train_loader.possible_loader(asked, data))
        raise UsageError("enough")

    monkeypatch.setattr("autopar.tools.cli.train_run.possible_loader", noted)
    invoke("train", *FEW, *photos, "--devices", "1", "--loader", "auto")
    monkeypatch.setattr(train_loader, "this_machine", lambda **_: SimpleNamespace(device_type="cuda"))
    for flags in ([], ["--aa", "3a"]):
        invoke("train", *FEW, *photos, "--devices", "1", "--loader", "auto", *flags)
    invoke("train", *FEW, "--data", "synthetic", "--devices", "1", "--loader", "auto")
    assert chosen == ["cpu", "auto", "cpu", "cpu"]


@pytest.mark.parametrize(
    ("gpu", "cpu", "planned", "printed"),
    [
        (16e3, 1660.0, 3690.0, "gpu: 16,000 images/s against 1,660 on CPU with 4 workers"),
        (
            16e3,
            3700.0,
            3690.0,
            "cpu: 3,700 on CPU with 4 workers, 16,000 images/s on the GPU, and training takes 3,690",
        ),
        (
            5120.0,
            2300.0,
            1500.0,
            "cpu: 2,300 on CPU with 4 workers, 5,120 images/s on the GPU, and training takes 1,500",
        ),
        (2000.0, 2300.0, 3000.0, "cpu: 2,300 on CPU with 4 workers, 2,000 images/s on the GPU"),
        (None, 2300.0, 3000.0, "cpu: no decoder"),
    ],
)
def test_the_faster_loader(
    gpu: float | None, cpu: float, planned: float, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    summed: list[list[float]] = []

    def data_sum(numbers: list[float]) -> list[float]:
        summed.append(numbers)
        return numbers

    def make(decode_on_gpu: bool) -> Any:
        if decode_on_gpu and gpu is None:
            raise UsageError("no decoder")
        return gpu if decode_on_gpu else cpu

    plan = SimpleNamespace(prediction=SimpleNamespace(samples_per_second=planned))
    pm: Any = SimpleNamespace(needs_inputs=True, data_sum=data_sum, plan=plan)
    monkeypatch.setattr(train_loader, "images_per_second", lambda rate, workers: rate)
    assert faster_loader(pm, make, 4) == printed[:3]
    assert capsys.readouterr().out == f"loader      {printed}\n\n" and summed == [[gpu or 0.0, cpu]]


def test_images_per_second_count_after_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, closed = [0.0], []

    def epoch(number: int) -> Any:
        try:
            for _ in range(20):
                clock[0] += 2.0
                yield SimpleNamespace(count=8)
        finally:
            closed.append(number)

    monkeypatch.setattr(train_loader, "perf_counter", lambda: clock[0])
    loader: Any = SimpleNamespace(epoch=epoch)
    assert images_per_second(loader, 1) == 4.0 and clock[0] == 2.0 + 3 * 2.0 and closed == [1]
    clock[0] = 0.0
    assert images_per_second(loader, 9) == 4.0 and clock[0] == 2.0 + 6 * 2.0  # the limit of time
