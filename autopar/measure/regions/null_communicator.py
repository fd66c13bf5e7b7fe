"""A communicator without peers: collectives of a timed region take no time, since the cost model prices them."""

from __future__ import annotations

from torch import Tensor


class NullCommunicator:
    """An `autopar.ops.collectives.Communicator` of rank 0 of several ranks; received tensors are uninitialised."""

    def __init__(self, ranks: int) -> None:
        self.rank, self.ranks = 0, ranks

    def reserve(self, num_bytes: int) -> None:
        """Do nothing: there is no buffer."""

    def all_reduce(self, tensor: Tensor, overlapped: bool = False) -> None:
        """Leave the tensor as it is."""

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
        """Do nothing: no peer reads the shard."""

    def push_shard(self, rank: int, stacked: Tensor) -> None:
        """Do nothing: there is no peer."""

    def reduce_pushed(self, stacked: Tensor) -> Tensor:
        return stacked.new_empty(stacked.shape[1:])
