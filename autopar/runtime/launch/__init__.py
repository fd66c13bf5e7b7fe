"""Worker processes, torchrun and srun, failures, and which devices there are."""
