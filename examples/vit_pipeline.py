"""ViT-L/16 on CIFAR-10 as a pipeline: ``pp=2`` cuts the unmodified model into two stages.

Each batch of 16 goes through them in 4 microbatches, so that both stages work at the same time. ``print(pm.plan)``
shows the cut. Adam with a learning rate of 1e-3, 60 epochs.

    python examples/vit_pipeline.py --data-dir data --download
    torchrun --nproc-per-node 2 examples/vit_pipeline.py --data-dir data

To try it without the data, and in seconds:

    python examples/vit_pipeline.py --model test_vit --img-size 32 --data synthetic --limit 64 --epochs 1
"""

import argparse
import functools
import sys
from pathlib import Path

import timm
import torch

import autopar
from autopar import train


def options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_large_patch16_224", help="a timm name")
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument("--data", default="cifar10", help="digits, cifar10, cifar100, imagefolder or synthetic")
    parser.add_argument("--data-dir", type=Path, help="where the data lies")
    parser.add_argument("--download", action="store_true", help="fetch the data into --data-dir first")
    parser.add_argument("--limit", type=int, help="train and test on so many images only")
    parser.add_argument("--devices", type=int, default=2, help="stages of the pipeline")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--output", type=Path, default=Path("runs/vit-pipeline"), help="folder for checkpoints")
    parser.add_argument("--resume", type=Path, help="a checkpoint of an earlier run, such as runs/vit-pipeline/last")
    parser.add_argument("--overwrite", action="store_true", help="remove the run that --output holds already")
    args = parser.parse_args(argv)
    if not timm.is_model(args.model):
        parser.error(f"--model {args.model}: timm has no such model")
    return args


def main(args: argparse.Namespace) -> None:
    wanted = train.Wanted(
        args.img_size, folder=args.data_dir, download=args.download, num_train=args.limit, num_test=args.limit
    )
    data = train.load_data(args.data, wanted)
    torch.manual_seed(0)
    model = timm.create_model(args.model, img_size=args.img_size, num_classes=data.num_classes)

    with autopar.parallelize(
        model,
        devices=args.devices,
        pp=args.devices,
        microbatches=args.microbatches,
        example_inputs=torch.empty(args.batch_size, 3, args.img_size, args.img_size),
        optimizer=functools.partial(torch.optim.Adam, lr=args.lr),
    ) as pm:
        if train.is_rank_zero():
            print(pm.plan)
        trainer = train.Trainer(
            pm,
            train.training_loader(pm, data, args.batch_size),
            train.evaluation_loader(data, args.batch_size, pm),
            epochs=args.epochs,
            callbacks=[train.ProgressBar(), train.Checkpoints(args.output)],
        )
        if args.resume:
            trainer.resume(args.resume)
        elif args.overwrite and train.is_rank_zero():
            train.remove_run(args.output)
        trainer.fit()
        model.load_state_dict(pm.state_dict())  # back into the unmodified model


if __name__ == "__main__":
    try:
        main(options())
    except autopar.AutoparError as error:
        sys.exit(f"error: {error}")
