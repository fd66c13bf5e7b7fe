"""Whole runs of ``autopar train``: what is printed and written, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file
from support.cli import invoke
from support.train_cli import TINY, ended, losses, records, start
from torchvision import models

import autopar
from autopar.api.model_source import ModelSource
from autopar.ir.units import percent
from autopar.tools.bench.request import num_classes
from autopar.tools.cli.initial_weights import pretrained, pretrained_arguments
from autopar.tools.cli.models import sized, with_classes
from autopar.tools.cli.unused_flags import RULES
from autopar.train import Wanted, evaluate_alone, evaluation_loader, load_data


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of a short run on two processes."""
    folder = tmp_path_factory.mktemp("run")
    process = start(
        folder, "train", *TINY, "--data", "digits", "--devices", "2", "--epochs", "3", "--microbatches", "2",
        "--train-num-samples", "512", "--val-num-samples", "200", "--lr", "5e-3", "--sched", "onecycle",
        "--shift", "1", "--clip-grad", "1", "-o", "out",
    )  # fmt: skip
    printed, error = ended(process, 200)
    assert process.returncode == 0, error
    return folder / "out", printed


# -- what is printed and written ---------------------------------------------------------------------------------------


def test_train_learns_and_reports(trained):
    folder, printed = trained
    history = records(folder / "history.jsonl")
    assert [h["epoch"] for h in history] == [1, 2, 3] and len(losses(folder)) == 24
    assert history[2]["loss"] < history[0]["loss"]
    line = r"^epoch [123]/3  loss .*  accuracy .* %  lr .* samples/s  data \d+ %  process \+[\d.]+ MiB$"
    assert len(re.findall(line, printed, re.M)) == 3
    assert all(0 < h["data_share"] < 1 for h in history)
    assert printed.startswith(
        "images      3×32×32, mean 0.305 0.305 0.305, std 0.376 0.376 0.376, bilinear, center crop"
    )
    assert "digits: 512 training and 200 test images of 3×32×32, 10 classes; 3 epochs of 8 updates" in printed
    figures = re.findall(r"(\d+\.\d+) %  (?:on 2 devices|with model.safetensors in the unmodified)", printed)
    assert len(figures) == 2 and figures[0] == figures[1]
    assert float(figures[0]) == pytest.approx(100 * history[2]["accuracy"], abs=0.01)
    assert {p.name for p in folder.iterdir()} >= {"last", "best", "tensorboard", "plan.json", "model.safetensors"}


def test_the_weights_load_into_the_unmodified_model(trained):
    folder, _ = trained
    plan = autopar.Plan.load(folder / "plan.json")
    model = timm.create_model(plan.model.name, **plan.model.kwargs)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    scored = evaluate_alone(model.eval(), evaluation_loader(load_data("digits", Wanted(32, num_test=200)), 64).epoch(1))
    assert scored.accuracy == records(folder / "history.jsonl")[-1]["accuracy"]


def test_weights_of_a_file_are_evaluated_on_every_mesh(trained, tmp_path, monkeypatch):
    folder, _ = trained
    monkeypatch.chdir(tmp_path)
    few = [*TINY, "--data", "digits", "--val-num-samples", "200", "--val-only"]
    last = records(folder / "history.jsonl")[-1]
    metrics = f"loss {last['test_loss']:.4f}  top-1 {percent(last['accuracy'], 2)}  top-5 {percent(last['top5'], 2)}"
    torch.save({"state_dict": load_file(folder / "model.safetensors")}, tmp_path / "weights.pth")
    for path, mesh in ((folder, ["--devices", "2", "--tp", "2"]), (tmp_path / "weights.pth", ["--devices", "1"])):
        code, printed, error = invoke("train", *few, "--initial-checkpoint", str(path), *mesh)
        assert code == 0, error
        assert f"{metrics}  on 200 test images, with {mesh[1]} device" in printed
    assert not (tmp_path / "runs").exists()


def test_training_starts_from_weights_and_a_new_head(trained, tmp_path):
    weights = trained[0] / "model.safetensors"
    few = [*TINY, "--data", "synthetic", "--model-kwargs", "num_classes=12", "--devices", "1", "--epochs", "1"]
    few += ["-b", "8", "--train-num-samples", "8", "--val-num-samples", "2", "--lr", "0", "--img-size", "32"]
    code, _, error = invoke("train", *few, "--initial-checkpoint", str(weights), "-o", str(tmp_path / "refused"))
    assert code == 2
    assert "2 tensors are of another shape: head.weight (10×48, the model's is 12×48), head.bias (10, the" in error, (
        error
    )
    code, _, error = invoke("train", *few, "--pretrained-path", str(weights), "-o", str(tmp_path / "out"))
    assert code == 0, error
    before, after = load_file(weights), load_file(tmp_path / "out" / "model.safetensors")
    assert after["head.weight"].shape == (12, 48)
    assert all(torch.equal(after[name], before[name]) for name in before if not name.startswith("head"))


def test_pretrained_weights_of_libraries(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few = ["--data", "synthetic", "--val-num-samples", "2", "--val-only", "--devices", "1", "-b", "2", "--pretrained"]

    create = timm.create_model

    def offline(name: str, pretrained: bool, **kwargs: Any) -> object:
        if pretrained:
            raise ConnectionError("no route to host.")
        return create(name, **kwargs)

    monkeypatch.setattr(timm, "create_model", offline)
    monkeypatch.setattr("autopar.tools.cli.train_run.parallelize", None)
    code, _, error = invoke("train", TINY[0], "--img-size", "32", *few)
    assert code == 2
    assert "ConnectionError: no route to host. " in error and "by --pretrained-path (timm) or --initial-ch" in error, (
        error
    )
    state = models.get_model("squeezenet1_1").state_dict()
    state = {name: torch.ones_like(tensor) for name, tensor in state.items()}
    monkeypatch.setattr("torchvision.models.WeightsEnum.get_state_dict", lambda *_, **__: state)
    model = pretrained(ModelSource("torchvision:squeezenet1_1", {"num_classes": 7}), None).state_dict()
    assert model["classifier.1.weight"].shape[0] == 7 and not model["classifier.1.weight"].eq(1).any()
    assert all(tensor.eq(1).all() for name, tensor in model.items() if not name.startswith("classifier"))


def test_pretrained_weights_of_torchvision_compute_as_in_torchvision(monkeypatch):
    state = models.get_model("googlenet", init_weights=False).state_dict()
    monkeypatch.setattr("torchvision.models.WeightsEnum.get_state_dict", lambda *_, **__: dict(state))
    arguments = pretrained_arguments("torchvision:googlenet", None) | {"aux_logits": False}
    ours = pretrained(ModelSource("torchvision:googlenet", arguments), None).eval()
    theirs = models.get_model("googlenet", weights="DEFAULT").eval()
    x = torch.rand(1, 3, 64, 64)
    assert ours(x).equal(theirs(x))
    assert pretrained_arguments("torchvision:vit_h_14", None) == {"image_size": 518}
    assert pretrained_arguments("torchvision:vit_h_14", 224) == pretrained_arguments("vit_tiny_patch16_224", None) == {}


def test_the_model_decides_the_size_of_images_unless_the_data_does(tmp_path, monkeypatch):
    monkeypatch.setattr("autopar.tools.cli.train_run.steps_per_epoch", None)  # ends the command
    for flags, expected in (
        ((), "3×160×160, mean 0.5 0.5 0.5, std 0.5 0.5 0.5, bicubic, center crop of 0.95"),
        (
            ("--img-size", "64", "--crop-pct", "1", "--mean", "0", "0", "0"),
            "3×64×64, mean 0 0 0, std 0.5 0.5 0.5, bicu",
        ),
        (
            ("--interpolation", "bilinear", "--model-kwargs", "img_size=96"),
            "3×96×96, mean 0.5 0.5 0.5, std 0.5 0.5 0.5, b",
        ),
        (("--data", "digits"), "3×32×32, mean 0.305 0.305 0.305, std 0.376 0.376 0.376, bilinear, center crop of 1\n"),
    ):
        _, printed, _ = invoke(
            "train", "test_vit", "--data", "synthetic", "--devices", "1", *flags, "-o", str(tmp_path)
        )
        assert printed.startswith(f"images      {expected}"), printed
    code, planned, _ = invoke("plan", "test_vit", "--devices", "1", "--hardware", "cpu-generic", "--cost", "analytic")
    assert code == 0 and "float32[64, 3, 160, 160]" in planned


@pytest.mark.full
def test_the_saved_plan_can_be_used_again(trained, tmp_path):
    folder, _ = trained
    code, out, error = invoke(
        "train", *TINY, "--data", "digits", "--plan", str(folder / "plan.json"), "--epochs", "1",
        "--batch-size", "1024", "--grad-accum-steps", "2", "-o", str(tmp_path),
    )  # fmt: skip
    assert code == 0, error
    assert "epoch 1/1" in out and "1 epoch of 1 update\n" in out
    code, out, _ = invoke("codegen", str(tmp_path / "plan.json"), "--rank", "0")
    assert code == 0 and re.match(r"# rank 0 .*\n# stage 0, train, microbatch of \d+: ", out), out


def test_a_config_file_and_averaged_weights(tmp_path):
    (tmp_path / "run.toml").write_text(
        'data = "synthetic"\ndevices = 4\nepochs = 1\nbatch-size = 16\ntrain_num_samples = 32\nval-num-samples = 8\n'
        'model-ema = true\nmodel-ema-decay = 0.5\nopt = "lamb"\ndrop-path = 0.1\namp-dtype = "float32"\n'
        "[model-kwargs]\ndepth = 1\npatch_size = 8\nembed_dim = 24\nnum_heads = 3\n"
    )
    out = tmp_path / "out"
    code, printed, error = invoke(
        "train", TINY[0], "--config", str(tmp_path / "run.toml"), "--devices", "1", "-o", str(out),
        "--clip-mode", "value", "--clip-grad", "0.5",
    )  # fmt: skip
    assert code == 0, error
    assert "drop_path_rate=0.1" in printed and "1 epoch of 2 updates\n" in printed
    plain, averaged = (load_file(out / name) for name in ("model.safetensors", "model_ema.safetensors"))
    assert plain.keys() == averaged.keys() and not torch.equal(plain["head.weight"], averaged["head.weight"])
    record = records(out / "history.jsonl")[0]
    assert f"accuracy {percent(record['accuracy']):>7} (EMA {percent(record['ema_accuracy'])})  lr" in printed
    for title, name, score in (("test accuracy", "accuracy", "model"), ("of averages", "ema_accuracy", "model_ema")):
        figure = percent(record[name], 2)
        assert re.search(rf"{title} +{figure}  on 1 device\n +{figure}  with {score}\.safetensors in the unm", printed)


def test_one_cpu_process_without_devices(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    code, printed, error = invoke(
        "train", *TINY, "--data", "synthetic", "--epochs", "1", "--batch-size", "8", "--train-num-samples", "8",
        "--val-num-samples", "1", "-o", str(tmp_path),
    )  # fmt: skip
    assert code == 0, error
    assert printed.startswith("Training on one CPU process of this machine; --devices N chooses another number.\n")
    assert "8 training and 1 test image of" in printed and "on 1 device\n" in printed and "of 1 image)" in printed
    assert not re.search(r"\b1 (epochs|updates|devices|images|microbatches|stages)\b", printed), printed


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--data", "cifar", "--devices", "2"], "No data set is named 'cifar'. Did you mean cifar10 or cifar100?"),
        (["--data", "cifar10", "--devices", "2"], "there is no folder data/cifar-10-batches-py. Put the unpacked"),
        (["--data", "digits", "--devices", "2", "--batch-size", "2000"], "A batch of 2000 is more than the 1,438"),
        (
            ["--data", "digits", "--devices", "2", "--batch-size", "2000", "--grad-accum-steps", "4"],
            "A batch of 2000 in 4 accumulation steps of 500 is more than the 1,438 training images. Use a batch "
            "(--batch-size) of 1438 or less and fewer accumulation steps (--grad-accum-steps), which must divide it.",
        ),
        (
            ["--data", "digits", "--devices", "2", "--batch-size", "4", "--microbatches", "5"],
            "microbatches=5 of a batch",
        ),
        (["--data", "digits", "--devices", "2", "--model-kwargs", "num_classes=5"], "num_classes=5: the data has 10"),
        (["--data", "digits", "--plan", "none.json"], "Cannot read plan file none.json"),
        (["--data", "digits", "--devices", "2", "-o", "/dev/null/x"], "Cannot make the folder /dev/null/x"),
        (["--data", "digits", "--devices", "1", "--opt", "adamv"], "adamv"),
        (["--data", "digits", "--devices", "1", "--sched", "cosin"], "Did you mean cosine?"),
        (
            ["--data", "digits", "--devices", "1", "--epochs", "3", "--warmup-epochs", "3"],
            "'cosine' over 3 epochs with warmup_epochs=3: the learning rate would never reach its peak. Use 2 or less",
        ),
        (["--data", "digits", "--devices", "1", "--momentum", "0.5"], "timm's adamw has no option 'momentum'"),
        (
            ["--data", "digits", "--devices", "1", "--opt", "sgd", "--opt-betas", "0.5", "0.9"],
            "timm's sgd has no option 'betas'",
        ),
        (["--data", "digits", "--devices", "1", "--mixup", "0.2", "-b", "33"], "a batch of 33 leaves an image alone"),
        (
            ["--data", "digits", "--devices", "1", "-b", "30", "--grad-accum-steps", "4"],
            "A batch of 30 cannot be accumulated in 4 equal steps. Use a multiple of 4.",
        ),
        (
            ["--data", "digits", "--devices", "1", "--clip-grad", "1", "--clip-mode", "agc"],
            "--clip-mode agc is unknown",
        ),
        (["--data", "digits", "--devices", "1", "--amp-dtype", "half"], "--amp-dtype half is unknown"),
        (
            ["--data", "digits", "--devices", "1", "--amp-dtype", "float16", "--precision", "bf16"],
            "--amp-dtype float16 and --precision bf16 disagree",
        ),
        (
            ["--data", "digits", "--devices", "1", "--drop", "0.1", "--model-kwargs", "drop_rate=0.2"],
            "--drop 0.1 and --model-kwargs drop_rate=0.2 are both given",
        ),
        (["--data", "digits", "--devices", "1", "--resume", "none"], "--resume none: there is no such folder."),
        (["--data", "digits", "--val-only"], "--val-only would evaluate random weights."),
        (["--data", "digits", "--val-only", "--lr", "1"], "--lr does nothing here: --val-only trains nothing."),
        (["--data", "digits", "--val-only", "-o", "x"], "--output does nothing here: --val-only trains nothing."),
        (
            ["--data", "digits", "--val-only", "--resume", "x"],
            "--val-only resumes no training. Give the weights by --init",
        ),
        (
            ["--data", "digits", "--initial-checkpoint", "x", "--devices", "1"],
            "--initial-checkpoint x: there is no such",
        ),
        (
            ["--data", "synthetic", "--std", "1", "0", "1"],
            "deviation of pixels is 1 0 1; pixels are divided",
        ),
        (
            ["--data", "digits", "--pretrained-path", "x", "--devices", "1"],
            "--pretrained-path x: there is no such file.",
        ),
        (
            ["--data", "digits", "--pretrained", "--initial-checkpoint", "x"],
            "--pretrained and --initial-checkpoint are b",
        ),
        (
            ["--data", "digits", "--input-key", "x", "--devices", "1"],
            "--input-key is for data sets hf:NAME and wds:SHA",
        ),
        (["--data", "digits", "--devices", "1", "--aa", "x"], "timm does not understand these settings"),
        (["--data", "digits", "--config", "none.toml"], "Cannot read --config none.toml: No such file"),
    ],
)
def test_bad_arguments_of_train(args, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, error = invoke("train", *TINY, *args)
    assert code == 2
    assert message in error, error


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--data", "digit"], "No data set is named 'digit'."),
        (["--data", "imagefolder"], "Data set 'imagefolder' needs --data-dir"),
        (["--data", "digits", "--dp", "3"], "dp=3 needs a multiple of 3 devices, not 1."),
        (["--data", "digits", "--devices", "3", "--dp", "3", "-b", "32"], "dp=3: 3 replicas cannot share"),
        (["--data", "digits"], f"runs/{TINY[0]} holds a run already: "),
    ],
)
def test_cheap_mistakes_come_before_an_earlier_run(args, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    (tmp_path / "runs" / TINY[0]).mkdir(parents=True)
    (tmp_path / "runs" / TINY[0] / "history.jsonl").write_text("{}\n")
    code, printed, error = invoke("train", *TINY, *args)
    assert (code, printed) == (2, "") and error.startswith(f"error: {message}"), error


def test_no_new_folder_stays_without_results(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for folder in ("runs/x", "mine"):
        code, _, error = invoke("train", *TINY, "--data", "digits", "--devices", "1", "--memory", "1MiB", "-o", folder)
        assert code == 3 and "No plan fits" in error, error
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


FACTORIES = """
import torch
from torch import nn
MEAN = torch.ones(3, 1, 1)
def head(outputs): return nn.Sequential(nn.Flatten(), nn.Linear(3072, outputs))
def two(): return head(2)
def image(): return nn.Conv2d(3, 10, 32)
def twelve(): return head(12)
class OnCpu(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = head(10)
    def forward(self, x): return self.head(x * MEAN)
"""


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("factories:two", "factories:two returns 2 logits for an image, and data set digits has 10 classes."),
        ("factories:image", "Conv2d is no classifier: it does not return one row of logits for each image."),
        ("factories:twelve", ""),
        ("factories:OnCpu", ""),
    ],
)
def test_outputs_that_are_not_the_classes(model: str, message: str, tmp_path: Path, monkeypatch) -> None:
    """Mixed targets have as many classes as the model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "factories.py").write_text(FACTORIES)
    few = ["--data", "digits", "--train-num-samples", "32", "--val-num-samples", "16", "-b", "16", "--epochs", "1"]
    code, _, error = invoke("train", model, *few, "--devices", "1", "--mixup", "0.5", "-o", "out")
    assert (code, message in error) == (2 if message else 0, True), error


@pytest.mark.parametrize("name", ["deit_tiny_distilled_patch16_224", "levit_128s"])
def test_classes_and_size_reach_models_that_pass_arguments_on(name: str) -> None:
    source = sized(with_classes(ModelSource(name), 3), 64)
    assert source.kwargs["num_classes"] == 3 and source.kwargs["img_size"] == 64
    assert num_classes(source.build("meta"), (1, 3, 64, 64)) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch = 3", "there is no flag --epoch. Did you mean epochs?"),
        ("warmup-epoch = 3", "Did you mean warmup-epochs"),
        ("epochs = 3.5", "(key epochs of --config run.toml)"),
        ('val-num-samples = "all"', "(key val-num-samples of --config run.toml)"),
        ("epochs = [3]", "epochs must be one value; it is [3]."),
        ("scale = 0.5", "scale must be a list, such as [1, 2]; it is 0.5."),
        ("epochs 3", "is not a TOML file"),
        ('data = "wds:pipe:rm x"', "opens the address wds:pipe:rm x by a command of the shell, which a file must not"),
        ("log-wandb = true", "a file must not decide where to write. Give --log-wandb on the command line."),
        ('val-split = "https://x/1.tar"', "which a file must not choose. Give --val-split on the command line."),
    ],
)
def test_bad_config_files(text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(text)
    code, _, error = invoke("train", *TINY, "--data", "digits", "--config", "run.toml")
    assert code == 2
    assert message in re.sub(r"( [│┃])+ ", " ", error), error


def test_a_flag_wins_over_the_file_and_its_errors_do_not_name_it(tmp_path):
    (tmp_path / "run.toml").write_text("epochs = 3")
    _, _, error = invoke("train", *TINY, "--data", "digits", "--epochs", "2.5", "--config", str(tmp_path / "run.toml"))
    assert "--epochs" in error and "--config" not in error


IDLE = {
    "--clip-mode norm": "--clip-grad",
    "--model-ema-decay 0.9": "--model-ema",
    "--mixup-prob 0.5": "--mixup or --cutmix",
    "--mixup-switch-prob 0.5 --mixup 0.2": "--mixup and --cutmix",
    "--color-jitter 0.2 --aa rand-m9": "no --aa",
    "--warmup-epochs 1 --sched none": "--sched cosine, tanh",
    "--warmup-lr 0.1 --sched onecycle": "--sched cosine, tanh",
    "--warmup-lr 0.1 --warmup-epochs 0": "--warmup-epochs of at least 1",
    "--min-lr 0.1 --sched step": "--sched cosine, tanh, plateau",
    "--decay-epochs 2": "--sched step, wsd, rsqrt",
    "--decay-milestones 2 --sched poly": "--sched multistep",
    "--decay-rate 0.5": "--sched step, multistep, plateau, poly",
    "--sched-on-updates --sched onecycle": "--sched cosine, tanh",
    "--wandb-project vit": "--log-wandb",
    "--wandb-tags a b": "--log-wandb",
    "--wandb-resume-id abc": "--log-wandb",
    "--mlflow-experiment vit": "--log-mlflow",
    "--upload-checkpoints": "--log-wandb or --log-mlflow",
}


@pytest.mark.parametrize("flags", IDLE)
def test_flags_that_would_do_nothing(flags):
    code, _, error = invoke("train", *TINY, "--data", "digits", *flags.split())
    assert code == 2
    assert f"{flags.split()[0]} does nothing here: it takes {IDLE[flags]}" in error, error


def test_every_rule_of_idle_flags_is_tested():
    assert {rule.flag for rule in RULES} == {flags.split()[0].strip("-").replace("-", "_") for flags in IDLE}


@pytest.mark.parametrize(
    "flags",
    [
        "--mixup-prob 0.5 --cutmix 1", "--color-jitter 0 --aa rand-m9", "--color-jitter 0.1 --aa 3a",
        "--sched multistep --decay-milestones 3", "--sched cosin --min-lr 0.1",
        "--sched-on-updates --warmup-lr 0.1 --warmup-epochs 1",
    ],
)  # fmt: skip
def test_flags_that_do_something(flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, _, error = invoke("train", *TINY, "--data", "none", "--devices", "1", *flags.split())
    assert "No data set is named 'none'" in error, error


def test_a_plan_and_constraints_exclude_each_other(trained):
    code, _, error = invoke(
        "train", *TINY, "--data", "digits", "--plan", str(trained[0] / "plan.json"), "--memory", "1GiB"
    )
    assert (code, error) == (2, "error: --plan decides already; leave out memory. ")


def test_a_plan_of_another_model_is_refused(trained, tmp_path):
    code, _, error = invoke(
        "train", "vit_tiny_patch16_224", "--model-kwargs", "depth=3", "patch_size=8", "--data", "digits",
        "--plan", str(trained[0] / "plan.json"), "-o", str(tmp_path),
    )  # fmt: skip
    assert code == 2
    assert "The plan is for another model" in error
