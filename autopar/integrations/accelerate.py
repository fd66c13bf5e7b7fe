"""`AutoparAccelerator`: loops of Hugging Face Accelerate on the ranks of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.api.checkpoint import read_header
from autopar.api.model import ParallelModel
from autopar.api.prepare import PreparedModule, PreparedOptimizer, prepare
from autopar.errors import UsageError
from autopar.integrations.accelerate_wrappers import OPTIMIZERS, RanksOptimizer, RanksScheduler, part_of_accelerate
from autopar.ir.mesh import Place
from autopar.ir.units import plural
from autopar.runtime.launch.environment import launched

ACCELERATE, OPERATIONS = part_of_accelerate("accelerate"), part_of_accelerate("accelerate.utils.operations")

PRECISIONS: Mapping[str, str | None] = {"no": None, "bf16": "bf16", "fp16": "fp16"}  # Accelerate's, and the ranks'
KINDS = ("NO", "MULTI_CPU", "MULTI_GPU")  # Accelerate's distributed types without an engine that splits models


class AutoparAccelerator(ACCELERATE.Accelerator):
    """Accelerator of a loop whose model runs on ranks: ``AutoparAccelerator({"devices": 4, "pp": 2})``.

    ``prepare(model, optimizer, loader, scheduler)`` plans the split and starts the ranks; the loop stays as it is. In a
    plain script there is one process, and a loader's batches are global ones. Under torchrun each process is a rank.
    ``num_processes`` and ``process_index`` then count the parts of a global batch, one for each data-parallel replica.
    Ranks of a replica get the same part, which ``gather``, ``gather_for_metrics`` and ``reduce`` count once.

    ``save_state`` writes a folder from all ranks that ``load_state`` reads under any mesh. ``unwrap_model`` returns the
    unmodified model with the present weights. ``mixed_precision`` is that of the ranks, which scale losses themselves
    under fp16; outputs are float32, as Accelerate's are.
    """

    def __init__(self, autopar: Mapping[str, Any], **arguments: Any) -> None:
        """Take the options of the ranks.

        Args:
            autopar: arguments of `autopar.prepare`, such as ``devices``, ``example_inputs`` or ``pp``. Under a launcher
                ``devices`` is the number of processes. ``batch_size`` is that of a loader that is prepared together
                with the model, where there is one.
            arguments: those of Accelerate's ``Accelerator``.

        Raises:
            UsageError: Accelerate is to split, compile or use a precision by itself; or options contradict each other.
        """
        self.launch = launched()
        self.options: dict[str, Any] = {**({"devices": self.launch.world} if self.launch else {}), **autopar}
        if "devices" not in self.options:
            raise UsageError('autopar= needs the number of devices, such as AutoparAccelerator({"devices": 2}).')
        self.pm: ParallelModel | None = None  # of the last model, until `free_memory`
        super().__init__(**arguments)
        self.check_engines()
        if self.mixed_precision not in PRECISIONS:
            raise UsageError(f"mixed_precision={self.mixed_precision!r} cannot be that of ranks. Use no, bf16 or fp16.")
        precision = PRECISIONS[self.mixed_precision]
        if precision is not None and "precision" in self.options:
            raise UsageError("Both mixed_precision= and autopar's precision are given. Leave one out.")
        if precision is not None and self.options.get("plan") is None:
            self.options["precision"] = precision
        self.scaler = None  # the ranks scale

    def check_engines(self) -> None:
        """Raise a UsageError if Accelerate is to run a model by an engine of its own."""
        kind, backend = self.distributed_type.value, self.state.dynamo_plugin.backend.value
        if kind not in KINDS:
            raise UsageError(f"Accelerate is configured for {kind}, which splits models itself. Run without it.")
        if backend != "NO":
            raise UsageError(
                f"Accelerate is to compile by {backend}, but ranks compile their own code. Leave dynamo_backend out, "
                'and give autopar={"compile": True}, which is the default on GPUs.'
            )

    # -- the model and its optimizer ---------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As in Accelerate; a model comes together with its optimizer, and at most one in a call.

        Raises:
            UsageError: one comes without the other; or as `autopar.prepare`.
        """
        models = [n for n, thing in enumerate(args) if isinstance(thing, nn.Module) and is_trained_here(thing)]
        optimizers = [n for n, thing in enumerate(args) if isinstance(thing, Optimizer) and not is_prepared(thing)]
        if len(models) != len(optimizers) or len(models) > 1:
            raise UsageError(
                f"accelerator.prepare got {plural(len(models), 'model')} and {plural(len(optimizers), 'optimizer')}. "
                "Prepare each model in one call with its optimizer; a frozen one needs none."
            )
        things = list(args)
        for n, k in zip(models, optimizers):
            sizes = [size for thing in args if (size := batch_size_of(thing))] if self.launch is None else []
            options = {"batch_size": sizes[0]} if sizes and "example_inputs" not in self.options else {}
            things[n], things[k] = self.on_ranks(things[n], things[k], options)
        return super().prepare(*things, device_placement=device_placement)

    def on_ranks(self, model: nn.Module, optimizer: Optimizer, options: Mapping[str, Any]) -> Any:
        """A model and its optimizer on ranks; ``options`` are defaults for `autopar.prepare`."""
        module, prepared = prepare(model, optimizer, **{**options, **self.options})
        try:
            self.check_prepared(module.pm)
        except UsageError:
            module.pm.close()
            raise
        if self.mixed_precision != "no":
            module.register_forward_hook(lambda module, args, output: OPERATIONS.convert_to_fp32(output))
        return module, prepared

    def check_prepared(self, pm: ParallelModel) -> None:
        """Raise a UsageError if a model has another precision, or other parts of the data, than the accelerator."""
        wanted = PRECISIONS[self.mixed_precision]
        if wanted is not None and pm.plan.precision != wanted:
            raise UsageError(
                f"The plan computes in {pm.plan.precision}, and mixed_precision={self.mixed_precision!r} is asked for. "
                f"Leave it out, or plan with precision={wanted!r}."
            )
        if self.pm is not None and self.pm.is_open and self.pm.data_size != pm.data_size:
            raise UsageError(
                f"The models have {self.pm.data_size} and {pm.data_size} data-parallel replicas, so a process has no "
                'single part of the data. Give autopar={"dp": …}.'
            )

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """As in Accelerate; a model on ranks stays as it is."""
        if not isinstance(model, PreparedModule):
            return super().prepare_model(model, *args, **kwargs)
        if model not in self._models:
            self._models.append(model)
        self.pm = model.pm
        return model

    def free_memory(self, *objects: Any) -> Any:
        """As in Accelerate; ranks end once nothing else refers to their model."""
        self.pm = None
        return super().free_memory(*objects)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """As in Accelerate."""
        if not isinstance(optimizer, PreparedOptimizer):
            return super().prepare_optimizer(optimizer, device_placement)
        wrapped = RanksOptimizer(optimizer, device_placement=False)
        self._optimizers.append(wrapped)
        return wrapped

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """As in Accelerate, whose scheduler steps once for each part of a global batch."""
        made = super().prepare_scheduler(scheduler)
        if self.launch is None or isinstance(made, RanksScheduler):
            return made
        times = 1 if made.split_batches else self.num_processes
        own = RanksScheduler(made.scheduler, made.optimizers, made.step_with_optimizer, times)
        self._schedulers[-1] = own
        return own

    def verify_device_map(self, model: nn.Module) -> bool:
        return not isinstance(model, PreparedModule) and super().verify_device_map(model)

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The unmodified model, with the present weights, as in Accelerate. All ranks of a launcher call this."""
        if not isinstance(model, PreparedModule):
            return super().unwrap_model(model, *args, **kwargs)
        model.unmodified.load_state_dict(model.state_dict())
        return model.unmodified

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """As in Accelerate."""
        return model.state_dict() if isinstance(model, PreparedModule) else super().get_state_dict(model, unwrap)

    def save_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        """As in Accelerate."""
        super().save_model(self.unwrap_model(model) if isinstance(model, PreparedModule) else model, *args, **kwargs)

    # -- steps -------------------------------------------------------------------------------------------------

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """As in Accelerate; returns the norm of all ranks' gradients, [].

        Raises:
            UsageError: ``parameters`` are some of those of a model on ranks, or ``norm_type`` is not 2.
        """
        parameters = listed(parameters)
        module = self.module_of(parameters)
        if module is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        return module.clip_grad_norm_(max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """As in Accelerate. Raises as `clip_grad_norm_`."""
        parameters = listed(parameters)
        module = self.module_of(parameters)
        if module is None:
            super().clip_grad_value_(parameters, clip_value)
        else:
            module.clip_grad_value_(clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Do nothing: the ranks divide by their loss scale before they clip."""

    def module_of(self, parameters: list[nn.Parameter]) -> PreparedModule | None:
        """The model on ranks that has these parameters; None if it is no such model."""
        given = {id(p) for p in parameters}
        for module in self.modules_on_ranks:
            own = {id(p) for p in module.parameters() if p.requires_grad}
            if own <= given:
                return module
            if given & own:
                raise UsageError(
                    f"{len(given & own)} of {plural(len(own), 'trained parameter')} are to be clipped. Ranks clip all "
                    "gradients of a model together: pass model.parameters()."
                )
        return None

    @property
    def modules_on_ranks(self) -> list[PreparedModule]:
        return [model for model in self._models if isinstance(model, PreparedModule)]

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Any:
        """Raises a UsageError: ranks train on parts of one size."""
        raise UsageError("Ranks train on parts of one size. Leave join_uneven_inputs out; use drop_last=True.")

    # -- parts of the data -------------------------------------------------------------------------------------

    @property
    def launched_pm(self) -> ParallelModel:
        """A model of this process's rank under a launcher.

        Raises:
            UsageError: no model is prepared.
        """
        if self.pm is None:
            raise UsageError(
                "Which part of the data a process gets depends on the model's plan. Call accelerator.prepare(model, "
                "optimizer) first."
            )
        return self.pm

    @property
    def num_processes(self) -> int:
        """Parts of a global batch; 1 in a plain script."""
        return self.launched_pm.data_size if self.launch else 1

    @property
    def process_index(self) -> int:
        """Number of this process's part; ranks of one replica have the same."""
        return self.launched_pm.data_rank if self.launch else 0

    @property
    def is_last_process(self) -> bool:
        return self.state.process_index == self.state.num_processes - 1

    @property
    def has_copies(self) -> bool:
        """Whether several processes get the same part, which shows once a model is prepared."""
        return self.pm is not None and self.num_processes < self.state.num_processes

    @property
    def firsts(self) -> list[int]:
        """The first process of each part."""
        return [self.launched_pm.plan.mesh.rank(Place(0, part)) for part in range(self.num_processes)]

    @property
    def dispatch_batches(self) -> bool | None:
        """As in Accelerate, but false where several processes get the same part, which rank 0 does not know of."""
        given = super().dispatch_batches
        if given and self.has_copies:
            raise UsageError("dispatch_batches=True, but several ranks need the same part of a batch. Leave it out.")
        return False if self.launch and self.has_copies else given

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """As in Accelerate, with one order of random samples for ranks that get the same part."""
        sampler: Any = getattr(data_loader, "sampler", None)
        if self.has_copies and self.num_processes == 1 and getattr(sampler, "generator", 0) is None:
            seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
            seed = int(self.launched_pm.broadcast_from_rank0(str(seed)))
            sampler.generator = torch.Generator("cpu").manual_seed(seed)
        return super().prepare_data_loader(data_loader, *args, **kwargs)

    def gather(self, tensor: Any) -> Any:
        """As in Accelerate; each part of the batch once."""
        gathered = super().gather(tensor)
        return OPERATIONS.recursively_apply(self.once, gathered) if self.has_copies else gathered

    def once(self, gathered: torch.Tensor) -> torch.Tensor:
        """Rows of the first process of each part, of rows of all processes one after the other."""
        return gathered.unflatten(0, (self.state.num_processes, -1))[self.firsts].flatten(0, 1)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As in Accelerate; each part of the batch once.

        Raises:
            UsageError: several processes have a part, and the data are no tensors.
        """
        if self.has_copies:
            try:
                OPERATIONS.recursively_apply(lambda leaf: leaf, input_data, error_on_other_type=True)
            except TypeError:
                use_gather_object = True
            if use_gather_object:
                raise UsageError("Several ranks have the same part of the data: gather tensors, not other objects.")
        return super().gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """As in Accelerate; a sum counts each part of the batch once."""
        if reduction == "sum" and self.has_copies and self.state.process_index not in self.firsts:
            tensor = OPERATIONS.recursively_apply(torch.zeros_like, tensor)
        return super().reduce(tensor, reduction, scale)

    # -- checkpoints -------------------------------------------------------------------------------------------

    @contextmanager
    def without_ranks(self) -> Iterator[None]:
        """Context in which Accelerate does not know of models and optimizers on ranks."""
        models, optimizers = self._models, self._optimizers
        self._models = [model for model in models if not isinstance(model, PreparedModule)]
        self._optimizers = [optimizer for optimizer in optimizers if not isinstance(optimizer, RanksOptimizer)]
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As in Accelerate; models on ranks, with their optimizers, are saved in folders of their own by all ranks.

        Raises:
            CheckpointError: as `ParallelModel.save_checkpoint`.
        """
        with self.without_ranks():
            folder = super().save_state(output_dir, *args, **kwargs)
        for number, module in enumerate(self.modules_on_ranks):
            module.pm.save_checkpoint(Path(folder) / f"autopar_{number}")
        return folder

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        """As in Accelerate, of a folder that `save_state` wrote under any mesh.

        Raises:
            CheckpointError: as `ParallelModel.load_checkpoint`.
        """
        modules = self.modules_on_ranks
        folders: list[Path] = []

        def find(models: Any, folder: str) -> None:
            folders.extend(Path(folder) / f"autopar_{number}" for number in range(len(modules)))
            for own in folders:
                read_header(own)  # before anything is loaded

        handle = self.register_load_state_pre_hook(find)
        try:
            with self.without_ranks():
                super().load_state(input_dir, *args, **kwargs)
        finally:
            handle.remove()
        for module, own in zip(modules, folders, strict=True):
            module.pm.load_checkpoint(own)


def is_prepared(thing: Any) -> bool:
    """Whether a module or optimizer is on ranks, or was prepared by Accelerate."""
    kinds = (PreparedModule, PreparedOptimizer, OPTIMIZERS.AcceleratedOptimizer)
    return isinstance(thing, kinds) or getattr(thing, "_is_accelerate_prepared", False)


def is_trained_here(model: nn.Module) -> bool:
    """Whether a model has to be put on ranks: it has something to train, and is not there yet."""
    return not is_prepared(model) and any(p.requires_grad for p in model.parameters())


def batch_size_of(thing: Any) -> int | None:
    """Batch size of a loader; None of anything else."""
    return thing.batch_size if isinstance(thing, torch.utils.data.DataLoader) else None


def listed(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[Any]:
    """Parameters as a list, of one or several."""
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
