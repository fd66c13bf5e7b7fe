"""Start of ranks, their commands and their failures: in worker processes, under torchrun or srun, or in this process.

Question: which processes run the ranks, and how do commands, tensors and errors travel between processes?
Input: a `RankSpec` and the weights by name for each rank, a backend (NCCL or Gloo) and a timeout.
Output: a `WorkerPool`, `SpmdBackend` or `InProcessBackend`. Its ``call(name, arguments)`` runs one method of the ranks
and returns the results by rank; one error ends all ranks.

Files in reading order:
- environment (variables and store of a launcher), attempt (ranks that are started again), start_exchange (errors and
  decisions of all ranks before they have process groups), devices (GPUs or CPU processes), torch_settings;
- worker processes: loopback (where they meet), fork_server with __main__ and preload, shared_memory and ipc (messages),
  worker (one rank's process), replies (waits for workers), interrupt (Ctrl-C), pool (all workers);
- ranks without workers: spmd (this process is a rank), model_groups (process groups of several models), failure_watch
  (failures on other nodes);
- both: machine_fault (exceptions whose cause may be the machine).
"""
