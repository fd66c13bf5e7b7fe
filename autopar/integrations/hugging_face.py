"""`AutoparTrainer`: the Trainer of Hugging Face's transformers on the ranks of a plan."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from autopar.api.checkpoint import read_weights
from autopar.api.prepare import PreparedModule, PreparedOptimizer
from autopar.errors import UsageError
from autopar.integrations.accelerate import AutoparAccelerator
from autopar.integrations.accelerate_wrappers import RanksOptimizer
from autopar.ir.plan import Plan
from autopar.ir.pytree import tree_map
from autopar.train.timm_optional import needed

TRANSFORMERS = needed("transformers", "AutoparTrainer", "transformers", "accelerate")
NAMES = needed("transformers.trainer", "AutoparTrainer", "transformers", "accelerate")  # of files in a checkpoint
FOLDER = "autopar"  # of a checkpoint, where the ranks write
# Arguments of the Trainer that would change the model or its memory in this process, and what ranks have instead.
REFUSED = {
    "activation_checkpointing": 'autopar={"recompute": "all"}, or nothing: plans recompute where memory is short',
    "gradient_checkpointing": 'autopar={"recompute": "all"}, or nothing: plans recompute where memory is short',
    "auto_find_batch_size": 'a per_device_train_batch_size, and autopar={"microbatches": …} where memory is short',
    "bf16_full_eval": "bf16=True, which ranks evaluate in too",
    "fp16_full_eval": "fp16=True, which ranks evaluate in too",
}


class AutoparTrainer(TRANSFORMERS.Trainer):
    """Trainer whose model runs on ranks: ``AutoparTrainer(model, args, autopar={"devices": 4, "pp": 2}, …)``.

    In a plain script ``per_device_train_batch_size`` is the batch of all devices together, before accumulation. Under
    torchrun each process is a rank, and it is the batch of a data-parallel replica. The ranks start with the first
    training or evaluation and stay; ``trainer.model_wrapped.pm.close()`` ends them. ``trainer.model`` stays on the CPU
    and has the trained weights after ``train`` and at each save.

    Checkpoints have the weights for ``from_pretrained``, and a folder ``autopar`` with the state of the training, which
    all ranks write and ``resume_from_checkpoint`` reads under any mesh. Those of an unmodified Trainer resume too.
    Callbacks get the model on ranks.
    """

    def __init__(self, *arguments: Any, autopar: Mapping[str, Any], **named: Any) -> None:
        """Take the options of the ranks.

        Args:
            arguments, named: those of the Trainer.
            autopar: arguments of `autopar.prepare`, such as ``devices``, ``pp`` or ``plan``. By default the example
                inputs are those of the first sample, and the seed is that of the TrainingArguments.

        Raises:
            UsageError: as `AutoparAccelerator`, or the TrainingArguments ask for what ranks do otherwise.
        """
        self.autopar = dict(autopar)
        self.example: Mapping[str, Any] = {}  # a collated batch
        super().__init__(*arguments, **named)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        self.accelerator_arguments = super()._build_accelerator_args(**kwargs)
        return self.accelerator_arguments

    def create_accelerator_and_postprocess(self) -> None:
        for name, instead in REFUSED.items():
            if getattr(self.args, name, False):
                raise UsageError(f"TrainingArguments({name}=True) is for models of one process. Give {instead}.")
        super().create_accelerator_and_postprocess()
        self.accelerator = TrainerAccelerator({"seed": self.args.seed, **self.autopar}, **self.accelerator_arguments)
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )
        if self.args.n_gpu > 1:
            self.args._n_gpu = 1  # so that the Trainer does not replicate the model itself

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model on the CPU: the ranks get its weights, and one device may not have room for them."""

    # -- the model ---------------------------------------------------------------------------------------------

    @property
    def is_on_ranks(self) -> bool:
        """Whether ranks run the present model."""
        module = self.model_wrapped
        return isinstance(module, PreparedModule) and module.unmodified is self.model and module.pm.is_open

    def put_on_ranks(self) -> PreparedModule:
        """The model on ranks, which start if they do not run."""
        if not self.is_on_ranks:
            optimizer = self.create_optimizer()
            while isinstance(optimizer, RanksOptimizer | PreparedOptimizer):  # of ranks that were closed
                optimizer = optimizer.optimizer
            with random_states_kept():
                self.model_wrapped, self.optimizer = self.accelerator.prepare(self.model, optimizer)
        return self.accelerator.prepare_model(self.model_wrapped)  # notes it again after `free_memory`

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return self.put_on_ranks() if model is self.model or model is self.model_wrapped else model

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_for_training(*args, **kwargs)
        self.callback_handler.model = self.model_wrapped
        return result

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        return False

    def take_weights(self) -> None:
        """Give the unmodified model the weights of the ranks; all ranks of a launcher call this."""
        if self.is_on_ranks:
            self.model.load_state_dict(self.model_wrapped.state_dict())

    def give_weights(self) -> None:
        """Give the ranks the weights of the unmodified model; all ranks of a launcher call this."""
        if self.is_on_ranks:
            self.model_wrapped.load_state_dict(self.model.state_dict())

    def train(self, *args: Any, **kwargs: Any) -> Any:
        result = super().train(*args, **kwargs)
        self.take_weights()
        return result

    # -- data --------------------------------------------------------------------------------------------------

    def _get_dataloader(self, dataset: Any, description: str, batch_size: int, *args: Any, **kwargs: Any) -> Any:
        if not self.is_on_ranks and "example_inputs" not in self.accelerator.options:
            with random_states_kept():
                source = dataset if self.train_dataset is None else self.train_dataset
                self.accelerator.options["example_inputs"] = self.example_inputs(source)
        self.put_on_ranks()
        if kwargs.get("is_training") and not isinstance(dataset, torch.utils.data.IterableDataset):
            self.check_last_batch(dataset, batch_size)
        return super()._get_dataloader(dataset, description, batch_size, *args, **kwargs)

    def example_inputs(self, dataset: Any) -> Any:
        """Arguments with which `compute_loss` calls the model, for a global batch of the first sample."""
        sample = next(iter(dataset)) if isinstance(dataset, torch.utils.data.IterableDataset) else dataset[0]
        collate = self._get_collator_with_removed_columns(self.data_collator, "example")
        self.example = collate([sample] * (self._train_batch_size * self.num_replicas))
        batches, num_items = self.get_batch_samples(iter([self.example]), 1, self.args.device)
        calls: list[Any] = []

        def record(*args: Any, **kwargs: Any) -> None:
            calls.append(args or kwargs)
            raise Recorded

        try:
            self.compute_loss(record, self._prepare_inputs(batches[0]), num_items_in_batch=num_items)
        except Recorded:
            return tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, calls[0])
        raise UsageError('compute_loss did not call the model. Give autopar={"example_inputs": …}.')

    @property
    def num_replicas(self) -> int:
        """Data-parallel replicas that get a batch of their own from a process; 1 in a plain script.

        Raises:
            UsageError: the options do not tell.
        """
        launch, options = self.accelerator.launch, self.accelerator.options
        if launch is None:
            return 1
        plan = options.get("plan")
        if plan is not None:
            return (plan if isinstance(plan, Plan) else Plan.load(plan)).mesh.dp
        if options.get("dp") is None:
            raise UsageError(
                "Under a launcher per_device_train_batch_size is that of a data-parallel replica, so the number of "
                'replicas has to be known before planning. Give autopar={"dp": …} or a plan.'
            )
        return options["dp"]

    def check_last_batch(self, dataset: Any, batch_size: int) -> None:
        """Raise a UsageError if replicas cannot share the last batch of an epoch, which would end the training."""
        dp, num_samples = self.model_wrapped.pm.plan.mesh.dp, len(dataset)
        last = num_samples % batch_size
        if self.accelerator.launch is None and not self.args.dataloader_drop_last and last % dp:
            raise UsageError(
                f"An epoch of {num_samples:,} samples ends with a batch of {last}, which {dp} data-parallel replicas "
                "cannot share. Set dataloader_drop_last=True."
            )

    def get_total_train_batch_size(self, args: Any) -> int:
        return self._train_batch_size * args.gradient_accumulation_steps * self.accelerator.num_processes

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        """As the Trainer's. Samples without labels get those of the example: ranks run calls of one structure."""
        labels = {name: self.example[name] for name in self.label_names if name in self.example}
        if not labels or any(inputs.get(name) is not None for name in labels):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        samples = NAMES.find_batch_size(inputs)
        some = {name: label[:1].repeat_interleave(samples, 0) for name, label in labels.items()}
        _, logits, _ = super().prediction_step(model, {**inputs, **some}, prediction_loss_only, ignore_keys)
        return None, logits, None

    # -- checkpoints -------------------------------------------------------------------------------------------

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        self.take_weights()
        super().save_model(*args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self.load_weights(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            self.give_weights()

    def _load_best_model(self) -> None:
        if not self.load_weights(self.state.best_model_checkpoint):
            super()._load_best_model()
            self.give_weights()

    def load_weights(self, checkpoint: str) -> bool:
        """Load the weights of a checkpoint; returns whether it was one of ranks or of ``save_pretrained``.

        The Trainer (transformers 5.24) loads the names of the file, which ``save_pretrained`` has changed for models
        such as ViT, and leaves the weights of all others as they are.
        """
        folder, kind = Path(checkpoint) / FOLDER, type(self.model)
        if folder.is_dir():
            state = read_weights(folder)
        elif isinstance(self.model, TRANSFORMERS.PreTrainedModel):
            state = kind.from_pretrained(checkpoint).state_dict()
        else:
            return False
        self.model.load_state_dict(state)
        self.give_weights()
        return True

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.model_wrapped.pm.save_checkpoint(Path(output_dir) / FOLDER)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / NAMES.SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (Path(checkpoint) / FOLDER).is_dir():
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        self.model_wrapped.pm.load_checkpoint(Path(checkpoint) / FOLDER)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / NAMES.SCHEDULER_NAME, weights_only=True))


class TrainerAccelerator(AutoparAccelerator):
    """Accelerator of the Trainer, which asks for the unmodified model in each step, but not for its weights."""

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return model.unmodified if isinstance(model, PreparedModule) else super().unwrap_model(model, *args, **kwargs)


class Recorded(Exception):
    """A call of the model has been recorded, and nothing is computed."""


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Context that leaves no trace in the random generators, from which samplers and augmentations draw."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
