"""A training that Hydra configures: model, data, optimizer, schedule and mesh are files in ``conf/``.

``hydra.utils.instantiate`` makes the objects, and the ``parallel`` group holds arguments of `autopar.parallelize`.
Checkpoints, logs and the composed configuration lie in Hydra's output folder: with ``hydra.run.dir`` of an earlier run
the same command goes on with it, on any mesh. Each job of a multirun ends its processes before the next one starts.

    python examples/hydra_train.py model=vit_tiny parallel=pipeline optimizer.lr=1e-3
    python examples/hydra_train.py -m parallel=data,pipeline,tensor optimizer=adamw,lamb
    python examples/hydra_train.py hydra.run.dir=runs/hydra epochs=10
    torchrun --nproc-per-node 2 examples/hydra_train.py parallel=tensor hydra.run.dir=runs/hydra-tensor

Each takes seconds on two CPU cores: the digits of scikit-learn, without a download.
"""

import logging
import sys
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

import autopar
from autopar import train

log = logging.getLogger(__name__)


def fit(config: DictConfig) -> float | None:
    """The best accuracy, for sweepers."""
    data: train.Data = instantiate(config.data)
    torch.manual_seed(config.seed)
    model = instantiate(config.model, num_classes=data.num_classes)
    settings: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    mesh = settings.pop("parallel")

    with autopar.parallelize(
        model,
        example_inputs=torch.empty(config.batch_size, *data.form.shape),
        optimizer=instantiate(config.optimizer),
        lr_scheduler=instantiate(config.schedule),
        clip_grad_norm=config.clip_grad_norm,
        seed=config.seed,
        **mesh,
    ) as pm:
        # The processes of a launcher have different folders where these are named by the time.
        folder = Path(train.run_on_rank_zero(lambda: HydraConfig.get().runtime.output_dir, pm.broadcast_from_rank0))
        if train.is_rank_zero():
            log.info("The plan, and results in %s\n%s", folder, pm.plan)
        trainer = train.Trainer(
            pm,
            train.training_loader(pm, data, config.batch_size, seed=config.seed),
            train.evaluation_loader(data, config.batch_size, pm),
            epochs=config.epochs,
            schedule="timm",
            callbacks=[train.JsonLog(folder), train.Checkpoints(folder), train.ProgressBar()],
            settings={name: value for name, value in settings.items() if name not in ("epochs", "schedule")},
        )
        trainer.resume_or_start(folder)
        trainer.fit()
    return trainer.best


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> float | None:
    try:
        return fit(config)
    except autopar.AutoparError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
