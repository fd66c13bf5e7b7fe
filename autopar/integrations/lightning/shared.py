"""Part of Lightning's contract that strategies of Fabric and of the Trainer share: processes, devices, precision."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.api.parallelize import parallelize
from autopar.api.planning.plan import check_devices
from autopar.api.prepare import PreparedModule, PreparedOptimizer, prepare
from autopar.errors import UsageError
from autopar.integrations.lightning.precision import PluginWithoutMixing
from autopar.ir.mesh import Place
from autopar.ir.units import plural
from autopar.runtime.launch import caller_collectives
from autopar.runtime.launch.devices import Machine, this_machine
from autopar.runtime.launch.environment import Launched, launched

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


class RanksStrategy:
    """Base of both strategies, before Lightning's own base class.

    In a plain script there is one process, whose model runs on ranks in others. Under a launcher each process is a
    rank.
    """

    def configure(self, devices: int, arguments: dict[str, Any]) -> None:
        """Take the arguments of a strategy's constructor.

        Raises:
            UsageError: ``devices`` is no number, or Lightning decides about an argument.
        """
        check_devices(devices)
        if "precision" in arguments:
            raise UsageError(
                f'{type(self).__name__} takes no precision. Give Lightning\'s, such as precision="bf16-mixed", to '
                "Fabric or the Trainer."
            )
        self.devices, self.arguments = devices, arguments
        self.launch: Launched | None = launched()
        self.machine: Machine | None = None  # until Lightning has told the accelerator
        self.modules: dict[PreparedModule, PreparedOptimizer | None] = {}  # with their optimizers

    # -- devices -----------------------------------------------------------------------------------------------

    def check_place(self, who: str, parallel_devices: list[Any] | None, num_nodes: int) -> None:
        """Compare the devices that Lightning was asked for with those of the ranks.

        Args:
            who: "Fabric" or "Trainer", for messages.
            parallel_devices: Lightning's devices; one, where it was not asked for any.

        Raises:
            UsageError: they contradict each other, or are neither CPUs nor CUDA GPUs.
        """
        devices = [device for device in parallel_devices or [] if isinstance(device, torch.device)]
        kind = devices[0].type if devices else "none"
        if kind not in BACKENDS:
            raise UsageError(
                f'{type(self).__name__} runs on CPUs and CUDA GPUs. Pass {who}(accelerator="cpu") or '
                f'{who}(accelerator="cuda").'
            )
        backend = self.arguments.get("backend", BACKENDS[kind])
        if backend != BACKENDS[kind]:
            raise UsageError(
                f"backend={backend!r}, but {who}'s accelerator is {kind}. Leave backend out: {who}(accelerator=…) "
                "decides."
            )
        self.machine = this_machine(self.devices, backend)
        gpus = torch.cuda.device_count() if kind == "cuda" else 0
        allowed = {1, self.devices, gpus or 1, self.launch.devices_per_node if self.launch else 1}
        if len(devices) not in allowed:
            raise UsageError(
                f"{who} was asked for {plural(len(devices), 'device')}, {type(self).__name__} for {self.devices}. "
                f"Leave devices out of {who}(…)."
            )
        numbers = [device.index for device in devices]
        if kind == "cuda" and numbers != list(range(len(numbers))):
            raise UsageError(
                f"{who} was asked for GPUs {numbers}, and ranks use GPUs from 0 on. Choose them by "
                f"CUDA_VISIBLE_DEVICES={','.join(map(str, numbers))} and leave devices out of {who}(…)."
            )
        nodes = self.launch.num_nodes if self.launch else 1
        if num_nodes not in (1, nodes):
            raise UsageError(
                f"{who}(num_nodes={num_nodes}), but this run has {plural(nodes, 'node')}. Start the script with "
                f"torchrun on each node, and leave num_nodes out of {who}(…)."
            )

    @property
    def root_device(self) -> torch.device:
        """Device of this process's batches and losses."""
        assert self.machine is not None
        return torch.device(self.machine.device_of(self.global_rank))

    # -- the model ---------------------------------------------------------------------------------------------

    def on_ranks(
        self, model: nn.Module, optimizer: Optimizer | None, precision: PluginWithoutMixing
    ) -> tuple[PreparedModule, PreparedOptimizer | None]:
        """A model on its ranks, with its optimizer if there is one.

        Raises:
            UsageError: as `autopar.prepare`.
        """
        assert self.machine is not None
        arguments = {"backend": self.machine.backend, **self.arguments, "precision": precision.of_ranks}
        if "PL_GLOBAL_SEED" in os.environ:  # of seed_everything
            arguments.setdefault("seed", int(os.environ["PL_GLOBAL_SEED"]))
        if "example_inputs" in arguments:
            arguments["example_inputs"] = precision.convert_input(arguments["example_inputs"])
        with precision.tensor_init_context():  # the default dtype, in which example inputs are made
            if optimizer is not None:
                module, prepared = prepare(model, optimizer, self.devices, **arguments)
            else:
                pm = parallelize(model, self.devices, loss_over="caller", **arguments)
                module, prepared = PreparedModule(pm, model), None
        self.modules[module] = prepared
        return module, prepared

    def close_ranks(self) -> None:
        """End the ranks of all models."""
        while self.modules:
            self.modules.popitem()[0].pm.close()

    # -- processes ---------------------------------------------------------------------------------------------

    @property
    def global_rank(self) -> int:
        return self.launch.rank if self.launch else 0

    @property
    def local_rank(self) -> int:
        return self.launch.local_rank if self.launch else 0

    @property
    def node_rank(self) -> int:
        return self.launch.rank // self.launch.local_world if self.launch else 0

    @property
    def world_size(self) -> int:
        """Number of processes: 1 in a plain script, whatever number of ranks it starts."""
        return self.launch.world if self.launch else 1

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning has to give each process its part of the data."""
        return self.launch is not None

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """Arguments of a sampler that gives this process its part of the data; None where it gets all.

        Raises:
            UsageError: there is no model yet, or models are replicated differently.
        """
        if self.launch is None:
            return None
        parts = {(module.pm.data_size, module.pm.data_rank) for module in self.modules}
        if not parts:
            raise UsageError(
                "Which part of the data this process gets depends on the model's plan. Call fabric.setup(model, "
                "optimizer) before fabric.setup_dataloaders(loader)."
            )
        if len(parts) > 1:
            raise UsageError(
                f"The models have {sorted({size for size, _ in parts})} data-parallel replicas, so a process has no "
                "single part of the data. Pass the same dp= for all."
            )
        ((data_size, data_rank),) = parts
        return {"num_replicas": data_size, "rank": data_rank}

    def join_processes(self) -> None:
        """Join the process group of a launcher's processes, so that they can exchange what they like."""
        assert self.machine is not None
        if self.launch is not None:
            caller_collectives.join_default_group(self.launch, self.machine.device_type)

    def reduced(self, tensor: Any, group: Any, operation: Any) -> Any:
        """A tensor reduced over the processes, in place. A sum counts each data-parallel replica once.

        Processes of a replica have the same samples and the same outputs, so only its first one adds to a sum over all
        processes.
        """
        if self.launch is None or not isinstance(tensor, torch.Tensor):
            return tensor
        pm = next(iter(self.modules)).pm if self.modules else None
        counts = pm is None or pm.plan.mesh.rank(Place(0, pm.data_rank)) == self.launch.rank
        whole = caller_collectives.is_whole_group(group)
        return caller_collectives.all_reduce(tensor, operation, None if whole else group, counts or not whole)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Tensors of all processes, [processes, *shape]; in a plain script the tensor itself.

        Raises:
            UsageError: gradients are to flow through it.
        """
        if self.launch is None:
            return tensor
        if sync_grads and tensor.requires_grad:
            raise UsageError(
                "all_gather(sync_grads=True): gradients do not flow between processes here. In a plain script a loss "
                "has the outputs of the global batch."
            )
        return caller_collectives.all_gather(tensor, None if caller_collectives.is_whole_group(group) else group)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes."""
        del name
        if self.launch is not None:
            caller_collectives.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """An object that one process passes, on all of them."""
        return obj if self.launch is None else caller_collectives.broadcast_object(obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all processes decided yes; with ``all`` false, whether any did."""
        if self.launch is None:
            return decision
        own = torch.tensor(int(decision), device=self.root_device)
        return bool(caller_collectives.all_reduce(own, "min" if all else "max"))
