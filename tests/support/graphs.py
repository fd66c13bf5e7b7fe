"""Graphs written by hand, and a machine with round numbers."""

from typing import Any

import torch

from autopar.ir.graph import Graph, Op, Ref, Value, Weight
from autopar.ir.hardware import COMPUTE_KINDS, Efficiency, Hardware, Launch, Link

MACHINE = Hardware(
    name="toy",
    device="toy",
    device_type="cpu",
    memory_bytes=2**30,
    peak_flops={"float32": 1e6},
    memory_bytes_per_second=1e9,
    launch=Launch(0.0, 0.0, 0.0),
    efficiency={kind: Efficiency(1.0, 0.0) for kind in COMPUTE_KINDS},
    memory_efficiency=1.0,
    memory_half_bytes=0.0,
    optimizer_bytes_per_second=1e9,
    devices_per_node=4,
    link=Link(0.0, 1e9),
    link_name="wire",
    network=None,
    collective=Link(1e-3, 1e6),
)


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def value(name: str, *shape: int, grad: bool = True, dtype: str = "float32") -> Value:
    return Value(name, shape, dtype, strides(shape), grad)


def parameter(name: str, *shape: int) -> Weight:
    return Weight(name, "parameter", shape, "float32", True, (name,))


def buffer(name: str, *shape: int, dtype: str = "float32") -> Weight:
    return Weight(name, "buffer", shape, dtype, False, (name,))


def op(
    target: str, args: tuple[Any, ...], *outputs: Value, module: str = "", mutates: tuple[str, ...] = (), **kw: Any
) -> Op:
    """Operation named after its first output; an argument ``%x`` refers to value x."""

    def convert(tree: Any) -> Any:
        if isinstance(tree, str) and tree.startswith("%"):
            return Ref(tree[1:])
        return tuple(map(convert, tree)) if isinstance(tree, tuple) else tree

    kwargs = tuple((k, convert(v)) for k, v in kw.items())
    name = outputs[0].name.removesuffix(":0") if outputs else f"{module}.update"
    return Op(name, target, convert(args), kwargs, outputs, module, "model.py:7: forward", mutates)


def graph(inputs: tuple[Value, ...], weights: tuple[Weight, ...], *ops: Op, outputs: str = "", **more: Any) -> Graph:
    results = tuple(map(Ref, outputs.split())) or (Ref(ops[-1].outputs[0].name),)
    leaves = tuple(Ref(v.name) for v in inputs)
    return Graph("toy", "train", inputs[0].shape[0], inputs, weights, ops, results, leaves, None, None, **more)


X = value("x", 2, 4, grad=False)
H = value("h", 2, 4)
MLP = graph(
    (X,),
    (parameter("fc1.weight", 8, 4), parameter("fc1.bias", 8), parameter("fc2.weight", 3, 8)),
    op("aten.linear.default", ("%x", "%fc1.weight", "%fc1.bias"), value("fc1", 2, 8), module="fc1"),
    op("aten.gelu.default", ("%fc1",), value("act", 2, 8), module="act"),
    op("aten.linear.default", ("%act", "%fc2.weight"), value("fc2", 2, 3), module="fc2"),
)
