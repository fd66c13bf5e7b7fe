"""A training run on disk.

In: a folder, and what the trainer and its callbacks report. Out: checkpoints, logs and weights that a later run can
resume. ``folder``: names of files, detection and removal of an earlier run. ``reports``: position, step and epoch
reports, `TrainerView`. ``state``: what a checkpoint keeps of a run. ``weights``: safetensors. ``interrupt``: Ctrl-C.
"""
