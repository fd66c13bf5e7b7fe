"""In place of the other ranks of a tensor-parallel axis: nothing travels, since cost models price that."""

from __future__ import annotations

from torch import Tensor


class NullCommunicator:
    """A `autopar.ops.collectives.Communicator` of the first of several ranks. What others would send has any values."""

    def __init__(self, ranks: int) -> None:
        self.rank, self.ranks = 0, ranks

    def reserve(self, num_bytes: int) -> None:
        """There is nothing to reserve."""

    def all_reduce(self, tensor: Tensor, overlapped: bool = False) -> None:
        """The sum of one summand."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.new_empty((self.ranks, *tensor.shape))

    def reduce_scatter(self, stacked: Tensor, overlapped: bool = False) -> Tensor:
        return stacked.new_empty(stacked.shape[1:])

    def all_to_all(self, stacked: Tensor) -> Tensor:
        return stacked.new_empty(stacked.shape)

    def peer_order(self) -> list[int]:
        return list(range(1, self.ranks))

    def publish(self, tensor: Tensor) -> Tensor:
        return tensor.new_empty((self.ranks, *tensor.shape))

    def unpublish(self) -> None:
        """Nobody reads."""

    def push_shard(self, rank: int, stacked: Tensor) -> None:
        """Nobody is sent anything."""

    def reduce_pushed(self, stacked: Tensor) -> Tensor:
        return stacked.new_empty(stacked.shape[1:])
