"""Checkpoints of a training run, saved by the ranks of one plan and loaded by the ranks of any other plan.

Question: which boxes of which tensors does each rank write or read, and when does a save become the checkpoint?
Input: a `Rank` (weights, optimizer, scheduler, loss scaler, moving averages), a folder and its `Header`.
Output of a save: the folder with ``checkpoint.json`` and data folders, or a `CheckpointError`. Output of a load: the
rank's state replaced, and the optimizer options that differ from the saved run, or a `CheckpointError`.

A tensor is saved as boxes of the whole tensor, for any mesh, so that a rank reads the boxes that overlap its own part.

Files in reading order: rank_state (contents of a checkpoint on one rank), folder (atomic saves, hashes, older
checkpoints that are kept), reshard_planners (resharding: boxes per rank, for torch.distributed.checkpoint), restore
(reading, then replacing), save_load (the calls that all ranks make), verify (a checkpoint without ranks).
"""
