"""Steps of families of the zoo on one GPU, against torch.compile; docs/zoo.md shows them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

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


def measure(families: Collection[str], folder: Path, limit: float) -> None:
    """Run ``autopar bench`` for some families, or for all that have no file in a folder yet; a file for each."""
    folder.mkdir(parents=True, exist_ok=True)
    for family, (model, batch, channels_last) in MEASURED.items():
        file = folder / f"{family}.json"
        if family not in families if families else file.exists():
            continue
        command = [
            sys.executable, "-m", "autopar", "bench", model, "--devices", "1", "--batch", str(batch),
            "--precision", "bf16", "--microbatches", "1", "--recompute", "none", "--only", "plain,autopar",
            "--limit", str(limit), "--output", str(file), *(["--channels-last"] if channels_last else []),
            *(["--img-size", "224"] if ":" in model else []),
        ]  # fmt: skip
        print(family, "ended with code", subprocess.run(command, check=False).returncode, flush=True)


def table(folder: Path) -> Iterator[str]:
    """A sentence that names the machines, and a row for each measured family."""
    files = [file for family in MEASURED if (file := folder / f"{family}.json").exists()]
    if not files:
        return
    results = [json.loads(file.read_text()) for file in files]
    machines = " and ".join(sorted({result["machine"] for result in results}))
    yield (
        f"Training steps in bf16 on {machines}, against the fastest of: blocks under torch.compile, the whole model, "
        "the whole model with CUDA graphs. Below 0 %, less was predicted than measured:"
    )
    yield ""
    yield "| model, images | autopar | torch.compile | predicted step | predicted peak |"
    yield "|---|---|---|---|---|"
    for result in results:
        ours, plain = (fastest(result, name) for name in ("autopar", "plain"))
        name = f"{result['model']}, {result['shape'][0]}"
        if ours is None:
            yield f"| {name} | {reasons(result)} | | | |"
            continue
        seconds, plan = ours["median_seconds"], ours["pipeline"]
        mark, others = "", reasons(result)
        if plain is not None:
            mark = " ✓" if seconds <= plain["median_seconds"] else " ✗"
            others = f"{1e3 * plain['median_seconds']:.1f} ms ({plain['label']})"
        peak = max(plan["predicted_bytes"]) / max(ours["peak_bytes"]) - 1
        yield (
            f"| {name} | {1e3 * seconds:.1f} ms{mark} | {others} "
            f"| {plan['predicted_seconds'] / seconds - 1:+.1%} | {peak:+.1%} |"
        )


def reasons(result: Mapping[str, Any]) -> str:
    """Why contestants have no figures."""
    return "; ".join(f"{row['label']}: {row['reason']}" for row in result["rows"] if row["reason"])


def fastest(result: Mapping[str, Any], contestant: str) -> Mapping[str, Any] | None:
    """The fastest row of a contestant; None if none ended."""
    rows = [row for row in result["rows"] if row["contestant"] == contestant and row["median_seconds"]]
    return min(rows, key=lambda row: row["median_seconds"], default=None)
