"""The order of collectives in compiled code, where ranks compile operations of other shapes.

torch.compile orders operations that do not depend on each other by their sizes. Ranks whose sizes differ would sum an
activation's gradient and gather a weight's gradient in different orders, say, and wait for each other forever.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import fx

# Not public in torch 2.11 to 2.15: a pass over compiled graphs, and dependencies that are not of data. Nothing else
# keeps the order of operators that the compiler does not know.
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch.utils._ordered_set import OrderedSet

CUSTOM_PASS = "post_grad_custom_post_pass"  # one of torch._inductor.list_options()
# Operators with an axis that only ask for this process's rank on it, or name it for their backward.
WITHOUT_MESSAGES = (
    "autopar::shard", "autopar::pad", "autopar::first_rank", "autopar::uniform", "autopar::interpolated_rows",
    "autopar::normalise",
)  # fmt: skip


class CollectivesInOrder(CustomGraphPass):
    """Lets each collective of a graph wait for the one before it."""

    def __call__(self, graph: fx.Graph) -> None:
        calls = [node for node in graph.nodes if is_collective(node.target)]
        preserve_node_ordering(graph, {later: OrderedSet([node]) for node, later in pairwise(calls)})

    def __repr__(self) -> str:  # the same in all processes
        return f"CollectivesInOrder({self.uuid()!r})"

    def uuid(self) -> object:
        return get_hash_for_files((__file__,))


def is_collective(target: Any) -> bool:
    """Whether an operator calls the communicator of an axis."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "autopar":
        return False
    return target._schema.name not in WITHOUT_MESSAGES and any(a.name == "axis" for a in target._schema.arguments)
