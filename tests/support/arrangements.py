"""The textbook's 1d, 2d, 2.5d and 3d products as plans: bytes that each device sends, beside the published formulas.

``python -m support.arrangements`` (with tests/ on the path) prints the table of docs/tensor_meshes.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, nn

from autopar.cost.ops.collective_cost import full_tensor_bytes
from autopar.ir.graph import Graph
from autopar.ir.hardware import ring_share
from autopar.ir.layout import Layout
from autopar.ir.tensor_axes import axis_sizes
from autopar.sharding.reshard import reshard_step
from autopar.sharding.rule import label_text
from autopar.sharding.shard_graph import shard_graph, storage
from autopar.trace.trace import trace

SAMPLES, TOKENS, WIDTH, HEADS = 8, 256, 1024, 16  # ViT-L's width
T = SAMPLES * TOKENS
FLOAT = 4  # bytes


class Products(nn.Module):
    """The products of a ViT block. Norms and residual sums are left out, as they are in the formulas."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        x = self.proj(attended.transpose(1, 2).reshape(batch, tokens, width))
        return self.fc2(nn.functional.gelu(self.fc1(x)))


COLUMNS = {"qkv.linear": "nx3", "proj.linear": "n", "fc1.linear": "n", "fc2.linear": "n"}
ROWS = dict.fromkeys(COLUMNS, "d0") | {"scaled_dot_product_attention": "d0", "gelu": "d0"}
MEGATRON = COLUMNS | {"proj.linear": "k", "fc2.linear": "k"}
OTHER = {"qkv.linear": "k", "proj.linear": "n", "fc1.linear": "k", "fc2.linear": "n"}
OTHER |= {"reshape": "a", "gelu": "d0"}  # sums over the axis are scattered to its ranks by samples


@dataclass(frozen=True)
class Arrangement:
    """A textbook's arrangement.

    Args:
        name: in the textbook, and its source.
        sizes: of the tensor axes.
        labels: letters of the operations on each axis.
        rows: axis of ranks that share one part of the weights' columns, over which weights are stored split; None.
    """

    name: str
    sizes: tuple[int, ...]
    labels: tuple[Mapping[str, str], ...]
    rows: str | None = None

    @property
    def strategies(self) -> dict[str, str]:
        """Strategies of the operations, as in a plan."""
        names = self.labels[0].keys() if len(self.labels) == 1 else dict.fromkeys(n for own in self.labels for n in own)
        axes = [*axis_sizes(self.sizes)]
        return {f"*.{n}": label_text({a: own[n] for a, own in zip(axes, self.labels) if n in own}) for n in names}

    @property
    def letters(self) -> str:
        """Letters of the four products on each axis, as the table has them."""
        axes = ("".join(f"{own[name]:<4}" for name in COLUMNS).strip() for own in self.labels)
        return ", ".join(f"`{own}`" for own in axes)

    def storage(self, graph: Graph) -> dict[str, Layout]:
        """Layouts of the weights."""
        sizes = axis_sizes(self.sizes)
        stored = dict(storage(graph, self.strategies, sizes))
        return {name: self.divided(layout) for name, layout in stored.items()} if self.rows else stored

    def divided(self, layout: Layout) -> Layout:
        """The layout of a weight that ranks of the row axis store in parts."""
        sizes, taken = axis_sizes(self.sizes), {split.dim for split in layout.splits}
        dim = 0 if 0 not in taken else 1
        outer = prod(sizes[split.axis] * split.outer for split in layout.splits if split.dim == dim)
        whole = Layout()
        for axis in axis_sizes(self.sizes):
            whole = whole.then(Layout.parse(f"{axis}:{dim}x{outer}") if axis == self.rows else layout.on(axis))
        return whole


ARRANGEMENTS = (
    Arrangement("1d, Megatron-LM", (4,), (MEGATRON,)),
    Arrangement("1d, Megatron-LM", (8,), (MEGATRON,)),
    Arrangement("2d, Optimus", (2, 2), (ROWS, COLUMNS), "tp0"),
    Arrangement("2.5d, Tesseract", (2, 2, 2), (ROWS, ROWS, COLUMNS), "tp1"),
    Arrangement("3d, Agarwal", (2, 2, 2), (ROWS, MEGATRON, OTHER), "tp0"),
)


@dataclass(frozen=True)
class Moved:
    """Bytes that a device sends for one microbatch, forward and backward, and once a step."""

    forward: float
    backward: float
    step: float

    @property
    def parts(self) -> tuple[float, float, float]:
        return self.forward, self.backward, self.step


def moved(of: Arrangement, graph: Graph) -> Moved:
    """Bytes by the collectives of the graph that a rank runs, as rings."""
    sizes, stored = axis_sizes(of.sizes), of.storage(graph)
    local = shard_graph(graph, of.strategies, stored, sizes, dict.fromkeys((op.name for op in graph.ops), 0))
    forward = backward = 0.0
    for op in local.ops:
        step = reshard_step(op)
        axis = next((a for a in sizes if step is not None and a in step.args), None)
        if step is None or axis is None:
            continue
        (source,), (made,) = [local.readable[name] for name in op.reads], op.outputs
        num_bytes = full_tensor_bytes(step, source.num_bytes, made.num_bytes, sizes[axis])
        if step.forward:
            forward += ring_share(step.forward, sizes[axis]) * num_bytes
        if step.backward and made.requires_grad:
            backward += ring_share(step.backward, sizes[axis]) * num_bytes
    once = (
        ring_share("all-reduce", sizes[axis]) * weight.num_bytes
        for weight in local.weights
        for axis in stored[weight.name].partial_gradient
    )
    return Moved(forward, backward, sum(once))


def published(of: Arrangement) -> Moved:
    """Bytes by the published formulas; d is the width, T the tokens of all samples."""
    weights, read, made, d = 12 * WIDTH**2, 7 * T * WIDTH, 9 * T * WIDTH, WIDTH
    kind, q = of.name.split(",")[0], of.sizes[-1]
    share = (q - 1) / q * FLOAT
    if kind == "1d":  # an all-reduce of [T, d] for attention and one for the MLP, in each direction
        return Moved(4 * share * T * d, 4 * share * T * d, 0.0)
    if kind == "2d":  # SUMMA: a block of x along rows, and of W along columns; backward both for each of two products
        forward = share * (read / q + weights / q)
        return Moved(forward, 2 * forward, 0.0)
    if kind == "2.5d":  # as 2d on 1/depth of the rows; the gradients of W are summed over the depth
        depth = of.sizes[0]
        forward = share * (read / q / depth + weights / q)
        return Moved(forward, 2 * forward, 2 * (depth - 1) / depth * FLOAT * weights / q**2)
    forward = share * (read + weights + made) / q**2  # x and W are gathered, y is reduce-scattered
    return Moved(forward, 2 * forward, 0.0)


def blocks_graph(count: int) -> Graph:
    """Training graph of some blocks, with a gradient for their input."""
    model = nn.Sequential(*(Products() for _ in range(count)))
    graph = trace(model, (torch.randn(SAMPLES, TOKENS, WIDTH),), mode="train")
    return replace(graph, inputs=tuple(replace(v, requires_grad=True) for v in graph.inputs))


def table() -> list[str]:
    """The rows of the table in docs/tensor_meshes.md: a block between others, as two blocks less one."""
    one, two = blocks_graph(1), blocks_graph(2)
    rows = []
    for own in ARRANGEMENTS:
        alone, both, formula = moved(own, one), moved(own, two), published(own)
        ours = Moved(both.forward - alone.forward, both.backward - alone.backward, both.step - alone.step)
        cells = (f"{x / 2**20:.1f} | {y / 2**20:.1f}" for x, y in zip(ours.parts, formula.parts, strict=True))
        axes = " × ".join(map(str, own.sizes))
        rows.append(f"| {own.name} | {axes} | {own.letters} | {' | '.join(cells)} |")
    return rows


if __name__ == "__main__":
    print("\n".join(table()))
