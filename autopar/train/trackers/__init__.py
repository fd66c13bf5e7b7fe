"""Trackers of experiments: TensorBoard, Weights & Biases, MLflow.

Question: how do the figures of a training run reach a tracker, such that a resumed run goes on in the same charts and a
tracker that fails does not end the training? In: reports of steps and epochs (`autopar.train.run.reports`). Out: a run
of the tracker, with equal names of figures in all of them.

Read in this order: ``scalars`` (names), ``description`` (what is said of a run once), ``tracker`` (when what is logged,
and what happens on errors), ``wandb_run`` and ``mlflow_run`` (the two services), ``wandb_files``, ``tensorboard``.

Example: ``scalars("epoch", report)`` is ``{"epoch/epoch": 1.0, "epoch/update": 8.0, "epoch/loss": 2.31, …}``.
"""
