"""The baselines of `autopar bench`, each a function (`BenchTask`, `WorkerContext`) → `BaselineTrainer`.

registry.py lists them with their variants; autopar.py runs a plan; ddp_fsdp.py has the plain loop, DDP and FSDP2;
pipelining.py torch.distributed.pipelining; dtensor.py tensor parallelism.
"""
