"""Picture of docs/concepts/rules.md: the tensors of a block on two ranks, sharded as the planner chooses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from matplotlib.patches import Rectangle
from torch import Tensor, nn

import autopar
from autopar.ir.layout import REPLICATED, Layout, split_layout
from autopar.ir.tensor_axes import TensorAxis
from autopar.ir.units import BYTES, TIME, text
from autopar.sharding.propagate import assign
from autopar.sharding.shard_graph import labels_on, shard_graph, storage
from autopar.tools.report.figure import save_figure
from autopar.tools.report.html.palette import INK, MUTED
from autopar.trace.call import as_call
from autopar.trace.lower import lower_model
from support.concept_style import HARDWARE, NORMAL, ORANGE, PALE, RED, SMALL, new_figure

AXIS = TensorAxis("tp", 2)
ACTIVATION, WEIGHT = "#5b9bd5", "#4f9d69"
ROWS = (2.3, 0.75)  # heights of the ranks in the picture
NUM_BLOCKS = 3  # the middle one is drawn: the others are the model's begin and end
DRAWN = [["1", name] for name in ("norm", "fc1", "act", "fc2")]  # modules


class PerceptronBlock(nn.Module):
    """The second half of a transformer's block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.fc1, self.act, self.fc2 = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return x + self.fc2(self.act(self.fc1(self.norm(x))))


@dataclass(frozen=True)
class Box:
    """A tensor of the picture: what made it, the letter that is split, its whole shape, and how it lies on the ranks.

    Args:
        rule: of the operation; empty for weights and collectives.
        seconds: of the collective; 0 for others.
    """

    title: str
    shape: tuple[int, ...]
    layout: Layout
    rule: str = ""
    label: str = ""
    is_weight: bool = False
    seconds: float = 0.0


def sharded_block(width: int, tokens: int, samples: int) -> list[Box]:
    """Tensors of a perceptron block, in the order in which a rank of two reads and makes them as the planner chose."""
    with torch.device("meta"):
        model = nn.Sequential(*(PerceptronBlock(width) for _ in range(NUM_BLOCKS)))
        inputs = torch.empty(samples, tokens, width)
    plan = autopar.plan(
        model, 2, inputs, tp=2, microbatches=1, hardware=HARDWARE, precision="bf16-params", cost="analytic"
    )
    graph = lower_model(model, as_call(model, inputs), "train", "block", "bf16-params")
    stored = storage(graph, plan.strategies, {AXIS.name: AXIS.ranks})
    sharding = assign(graph, labels_on(AXIS, plan.strategies, graph), stored, AXIS)
    local = shard_graph(graph, plan.strategies, stored, {AXIS.name: AXIS.ranks}, {op.name: 0 for op in graph.ops})
    prices = {(c.op.removeprefix("*."), c.kind): c.seconds for block in plan.blocks for c in block.collectives}
    boxes: list[Box] = []
    for op in local.ops:
        module, kind = op.name.split(".")[:2], op.target.split(".")[1].replace("_", "-")
        if module not in DRAWN or kind == "first-rank":
            continue
        if op.home:
            layout = split_layout(*op.args[1:3]) if kind == "reduce-scatter" else REPLICATED
            price = prices[op.home.removeprefix(f"{DRAWN[0][0]}."), kind]
            boxes.append(Box(kind, graph.values[op.reads[0].removesuffix(f".{kind}")].shape, layout, seconds=price))
            continue
        if kind == "linear":
            weight = graph.weight[op.reads[1]]
            boxes.append(Box(f"{module[1]}.weight", weight.shape, sharding.layouts[weight.name], is_weight=True))
        rule, strategy = str(sharding.rules[op.name]), sharding.strategies[op.name]
        boxes.append(Box(kind, graph.values[op.name].shape, sharding.layouts[op.name], rule, strategy.label))
    return boxes


def draw_rules(path: Path, width: int = 1024, tokens: int = 197, samples: int = 64) -> None:
    """Tensors of a perceptron block on two ranks, from the norm to the collective after it."""
    boxes = sharded_block(width, tokens, samples)
    widest = max(box.shape[-1] for box in boxes)
    figure = new_figure(3.6)
    axes = figure.add_subplot()
    axes.set(xlim=(-0.68, len(boxes) - 0.4), ylim=(-0.5, 4.0))
    axes.axis("off")
    for column, box in enumerate(boxes):
        write = partial(axes.text, column, ha="center")
        write(3.8, s=box.title, fontsize=NORMAL, color=RED if box.seconds else INK, weight="bold")
        if box.seconds:
            write(3.57, s=text(box.seconds, TIME), fontsize=SMALL, color=MUTED)
            write(3.37, s=text(2 * prod(box.shape), BYTES), fontsize=SMALL, color=MUTED)  # of bfloat16
            arrow = {"arrowstyle": "<->", "color": RED, "linewidth": 1.2}
            axes.annotate("", (column, ROWS[1] + 0.6), (column, ROWS[0] - 0.6), arrowprops=arrow)
        for row, word in enumerate(box.rule.replace(" -> ", "\n→ ").splitlines()):
            write(3.57 - 0.2 * row, s=word, fontsize=6.2, color=MUTED, family="monospace")
        if box.label:
            write(3.1, s=f"splits {box.label}", fontsize=SMALL, color=ORANGE)
        for rank, row in enumerate(ROWS):
            draw_box(axes, box, column, row, rank, widest)
        write(-0.22, s=layout_words(box.layout), fontsize=SMALL, color=INK)
        write(-0.43, s=" × ".join(map(str, box.shape)), fontsize=6.5, color=MUTED)
    for rank, row in enumerate(ROWS):
        axes.text(-0.62, row, f"rank {rank}", rotation=90, va="center", fontsize=NORMAL, color=INK)
    save_figure(figure, path)


def layout_words(layout: Layout) -> str:
    """A layout in a word or two."""
    if layout.partial:
        return "partial sums"
    return f"dim {layout.splits[0].dim} split" if layout.splits else "replicated"


def draw_box(axes: Any, box: Box, x: float, y: float, rank: int, widest: int) -> None:
    """Draw a rank's part of a tensor inside of the whole one: its columns are the last dim, its rows all others.

    Args:
        widest: features of the widest tensor.
    """
    *rows, columns = box.shape
    width, height = 0.83 * math.sqrt(columns / widest), 1.2 * (math.sqrt(rows[0] / widest) if box.is_weight else 0.92)
    left, bottom = x - width / 2, y - height / 2
    dashed = {"fill": False, "edgecolor": PALE, "linewidth": 0.8, "linestyle": (0, (2, 2))}
    axes.add_patch(Rectangle((left, bottom), width, height, **dashed))
    for split in box.layout.splits:
        if split.dim == len(rows):
            width /= AXIS.ranks
            left += width * rank
        else:
            height /= AXIS.ranks
            bottom += height * (AXIS.ranks - 1 - rank)
    colour = WEIGHT if box.is_weight else ACTIVATION
    face, hatch = ("white", "/////") if box.layout.partial else (colour, None)
    axes.add_patch(
        Rectangle((left, bottom), width, height, facecolor=face, edgecolor=colour, hatch=hatch, linewidth=0.8)
    )
