"""A Hugging Face ViT from a config: outputs keep their type, and tp 2 × pp 2 trains as one device does."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.effort import only
from support.reference import Reference, assert_all_close, assert_close

import autopar
from autopar.cost.hardware.load import cost_model_dir

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
IMAGE = {"image_size": 32, "patch_size": 8, "num_labels": 10}


def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.logits, target)


def slow_machine(folder: Path) -> Path:
    """A cost model on which even small matmuls are worth sharing among ranks."""
    text = (cost_model_dir() / "cpu-generic.toml").read_text()
    assert "value = 96" in text
    path = folder / "slow.toml"
    path.write_text(text.replace("value = 96", "value = 0.01"))
    return path


@pytest.mark.parametrize("attention", only(["sdpa"], ["sdpa", "eager"]))
def test_tensor_and_pipeline_parallelism(attention: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.ViTConfig(**SIZES, **IMAGE, attn_implementation=attention)
    model = transformers.ViTForImageClassification(config)
    x, y = torch.randn(6, 3, 32, 32), torch.randint(0, 10, (6,))
    adamw = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)
    reference = Reference(model, loss_fn, adamw)
    with autopar.parallelize(
        model, 4, {"pixel_values": x}, loss_fn=loss_fn, optimizer=adamw,
        tp=2, pp=2, microbatches=2, hardware=str(slow_machine(tmp_path)),
    ) as pm:  # fmt: skip
        assert "heads / 2" in str(pm.plan) and "rows by head / 2" in str(pm.plan)
        for _ in range(2):
            loss = reference.forward_backward(x, y, 2)
            result = pm.forward_backward(x, y, return_outputs=True)
            assert abs(result.loss - loss) < 1e-5
            assert type(result.outputs) is transformers.modeling_outputs.ImageClassifierOutput
            assert_close(result.outputs.logits, reference.forward(x, 2)[0], "logits of a step")
            assert_all_close(pm.gradients(), reference.gradients(), "gradient")
            reference.step()
            pm.optimizer_step()
        assert_all_close(pm.state_dict(), dict(reference.model.state_dict()), "state")
        output = pm.eval()(x)
        assert type(output) is transformers.modeling_outputs.ImageClassifierOutput and output.hidden_states is None
        assert_close(output["logits"], reference.model.eval()(x).logits.detach(), "logits")


@pytest.mark.full
def test_the_loss_inside_the_model_and_hidden_states() -> None:
    """Labels as an input, and an output with a number, a tensor and a tuple of tensors."""
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES, **IMAGE, output_hidden_states=True))
    inputs = {"pixel_values": torch.randn(6, 3, 32, 32), "labels": torch.randint(0, 10, (6,))}
    with autopar.parallelize(model, 2, inputs, pp=2, microbatches=2) as pm:
        output = pm.eval()(**inputs)
    expected = model.eval()(**inputs)
    assert_close(output.loss, expected.loss.detach(), "loss")
    assert len(output.hidden_states) == len(expected.hidden_states) == 4
    for actual, wanted in zip(output.hidden_states, expected.hidden_states):
        assert_close(actual, wanted.detach(), "hidden state")
