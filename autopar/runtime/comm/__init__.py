"""Communication between ranks: process groups, point-to-point, symmetric memory, collectives.

Question: how do tensors and flags get from rank to rank, at the least cost in time and in multiprocessors?
Input: a `RankSpec` (mesh, device, which ranks exchange tensors). Output: a `protocols.Transport` for the rank, and one
communicator per mesh axis, registered in `autopar.ops.collectives`.

Graph operators (`Communicator`) run their collectives synchronously in the current stream's order and return stacked
tensors. Collectives of a `Transport` and of `ReplicaCollectives` are asynchronous, in place and over flat tensors: one
protocol for both would have two methods per collective.

Reading order:
    protocols.py              what a transport, a channel and a symmetric buffer can do
    process_group.py          transport between processes: Gloo, NCCL, symmetric memory
    in_process.py             transport between threads of one process
    symmetric_p2p.py          point-to-point through peers' memory
    symmetric_collectives.py  collectives of a mesh axis through peers' memory
    replica_collectives.py    gradient and weight collectives of the data-parallel replicas
    axis_communicators.py     communicators of the mesh axes
    connect.py                all of these for one rank
"""
