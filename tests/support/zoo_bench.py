"""Steps of families of the zoo on one GPU, against torch.compile; docs/zoo.md shows them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchvision import models

from support.zoo_models import ROWS

# Model and batch of each measured family, by the name of its file; convolutional ones with channels_last.
MEASURED: Mapping[str, tuple[str, int, bool]] = {
    "vision_transformer": ("vit_base_patch16_224", 128, False),
    "dinov3": ("vit_base_patch16_dinov3", 128, False),
    "siglip": ("vit_so400m_patch14_siglip_224", 64, False),
    "deit": ("deit3_base_patch16_224", 128, False),
    "eva": ("eva02_base_patch14_224", 128, False),
    "swin_transformer": ("swin_tiny_patch4_window7_224", 128, False),
    "swin_transformer_v2": ("swinv2_tiny_window8_256", 64, False),
    "convnext": ("convnext_tiny", 128, True),
    "mlp_mixer": ("mixer_b16_224", 256, False),
    "efficientnet": ("efficientnet_b0", 256, True),
    "regnet": ("regnety_016", 256, True),
    "resnet": ("resnet50", 256, True),
    "coatnet": ("coatnet_0_rw_224", 64, False),
    "maxvit": ("maxvit_tiny_tf_224", 64, False),
    "segformer": (f"{__name__}:segformer", 64, False),
    "beit": ("beit_base_patch16_224", 64, False),
}
OTHER_BATCH = 64


class Segformer(nn.Module):
    """Logits [batch, 1000] of Hugging Face's SegFormer-B2 for classification, with random weights."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import SegformerConfig, SegformerForImageClassification

        sizes: dict[str, Any] = {"hidden_sizes": [64, 128, 320, 512], "depths": [3, 4, 6, 3]}
        sizes |= {"decoder_hidden_size": 768, "num_labels": 1000}
        self.model = SegformerForImageClassification(SegformerConfig(**sizes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model(images).logits


def segformer() -> nn.Module:
    return Segformer()


def others() -> Iterator[tuple[str, str]]:
    """Files and models of the other rows of timm and torchvision that `autopar bench` can train."""
    for row in ROWS:
        is_classifier = row.source == "timm" or row.name in {
            f"torchvision:{name}" for name in models.list_models(models)
        }
        if is_classifier and not row.blocked and not row.part and row.name not in {m for m, _, _ in MEASURED.values()}:
            yield row.key.replace("/", "-").replace(" ", "-"), row.name


def measure(families: Collection[str], folder: Path, limit: float, rest: bool) -> None:
    """Run ``autopar bench`` for some families, or for all that have no file in a folder yet; a file for each.

    Args:
        rest: measure other rows, against the whole model under torch.compile.
    """
    folder.mkdir(parents=True, exist_ok=True)
    only = f"plain{':whole' if rest else ''},autopar"
    asked = {name: (model, OTHER_BATCH, False) for name, model in others()} if rest else MEASURED
    for family, (model, batch, channels_last) in asked.items():
        file = folder / f"{family}.json"
        if family not in families if families else file.exists():
            continue
        command = [
            sys.executable, "-m", "autopar", "bench", model, "--devices", "1", "--batch", str(batch),
            "--precision", "bf16", "--microbatches", "1", "--recompute", "none", "--only", only,
            "--limit", str(limit), "--output", str(file), *(["--channels-last"] if channels_last else []),
            *(["--img-size", "224"] if model.startswith(__name__) else []),
        ]  # fmt: skip
        print(family, "ended with code", subprocess.run(command, check=False).returncode, flush=True)


WAYS = "blocks under torch.compile, the whole model, the whole model with CUDA graphs"


def tables(folder: Path) -> Iterator[str]:
    """Measured families, then measured models of other rows."""
    first = [file for family in MEASURED if (file := folder / f"{family}.json").exists()]
    yield from table(first, f"the fastest of: {WAYS}")
    if rest := sorted({*folder.glob("*.json")} - {*first}):
        yield ""
        yield from table(rest, "the whole model under torch.compile")


def table(files: Sequence[Path], against: str) -> Iterator[str]:
    """A sentence that names the machines, and a row for each file."""
    if not files:
        return
    results = [json.loads(file.read_text()) for file in files]
    machines = " and ".join(sorted({result["machine"] for result in results}))
    yield (f"Training steps in bf16 on {machines}, against {against}. Below 0 %, less was predicted than measured:")
    yield ""
    yield "| model, images | autopar | torch.compile | predicted step | predicted peak |"
    yield "|---|---|---|---|---|"
    for result in results:
        ours, plain = (fastest(result, name) for name in ("autopar", "plain"))
        name = f"{result['model'].rpartition(':')[2]}, {result['shape'][0]}"
        if ours is None:
            yield f"| {name} | {reasons(result)} | | | |"
            continue
        seconds, plan = ours["median_seconds"], ours["pipeline"]
        others = reasons(result) if plain is None else f"{1e3 * plain['median_seconds']:.1f} ms ({plain['label']})"
        mark = "✗" if plain is not None and seconds > plain["median_seconds"] else "✓"
        peak = max(plan["predicted_bytes"]) / max(ours["peak_bytes"]) - 1
        yield (
            f"| {name} | {1e3 * seconds:.1f} ms {mark} | {others} "
            f"| {plan['predicted_seconds'] / seconds - 1:+.1%} | {peak:+.1%} |"
        )


def reasons(result: Mapping[str, Any]) -> str:
    """Why contestants have no figures, each reason once."""
    return "; ".join(dict.fromkeys(row["reason"] for row in result["rows"] if row["reason"]))


def fastest(result: Mapping[str, Any], contestant: str) -> Mapping[str, Any] | None:
    """The fastest row of a contestant; None if none ended."""
    rows = [row for row in result["rows"] if row["contestant"] == contestant and row["median_seconds"]]
    return min(rows, key=lambda row: row["median_seconds"], default=None)
