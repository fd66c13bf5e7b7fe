"""ViT-B/16 under data, pipeline, tensor or hybrid parallelism: one argument changes the mesh.

``--parallel`` names an entry of ``meshes``; under ``auto`` the planner chooses. Images and losses are equal under every
mesh. A run may be stopped under one mesh and resumed under another. AdamW 3e-3, weight decay 0.3, label smoothing 0.1,
32 of 300 epochs of warm-up, activations recomputed in the backward pass.

    python examples/vit_data_to_hybrid.py --parallel data --data-dir data --download
    torchrun --nproc-per-node 4 examples/vit_data_to_hybrid.py --parallel hybrid --data-dir data --resume runs/vit/last

To try it without the data, and in seconds:

    python examples/vit_data_to_hybrid.py --parallel tensor --devices 2 --model test_vit --img-size 32 \\
        --data synthetic --limit 64 --batch-size 16 --epochs 2 --warmup-epochs 1
"""

import argparse
import functools
import sys
from pathlib import Path

import timm
import torch
import torch.nn.functional as F

import autopar
from autopar import train


def options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", default="hybrid", choices=["data", "pipeline", "tensor", "hybrid", "auto"])
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--model", default="vit_base_patch16_224", help="a timm name")
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument("--data", default="cifar10", help="digits, cifar10, cifar100, imagefolder or synthetic")
    parser.add_argument("--data-dir", type=Path, help="where the data lies")
    parser.add_argument("--download", action="store_true", help="fetch the data into --data-dir first")
    parser.add_argument("--limit", type=int, help="train and test on so many images only")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--warmup-epochs", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.3)
    parser.add_argument("--smoothing", type=float, default=0.1)
    parser.add_argument("--recompute", default="all", choices=["none", "all", "auto"])
    parser.add_argument("--output", type=Path, default=Path("runs/vit"))
    parser.add_argument("--resume", type=Path, help="a checkpoint of an earlier run, on whatever mesh")
    parser.add_argument("--overwrite", action="store_true", help="remove the run that --output holds already")
    args = parser.parse_args(argv)
    if args.parallel == "hybrid" and args.devices % 4:
        parser.error(f"--parallel hybrid is tp 2 × pp 2 × dp: --devices {args.devices} is no multiple of 4")
    if not timm.is_model(args.model):
        parser.error(f"--model {args.model}: timm has no such model")
    return args


def main(args: argparse.Namespace) -> None:
    meshes = {
        "data": {"dp": args.devices, "pp": 1, "tp": 1},
        "pipeline": {"dp": 1, "pp": args.devices, "tp": 1},
        "tensor": {"dp": 1, "pp": 1, "tp": args.devices},
        "hybrid": {"dp": args.devices // 4, "pp": 2, "tp": 2},
        "auto": {},
    }
    wanted = train.Wanted(
        args.img_size, folder=args.data_dir, download=args.download, num_train=args.limit, num_test=args.limit
    )
    data = train.load_data(args.data, wanted)
    torch.manual_seed(0)
    model = timm.create_model(args.model, img_size=args.img_size, num_classes=data.num_classes)

    with autopar.parallelize(
        model,
        args.devices,
        example_inputs=torch.empty(args.batch_size, 3, args.img_size, args.img_size),
        loss_fn=functools.partial(F.cross_entropy, label_smoothing=args.smoothing),
        optimizer=train.timm_optimizer(model, "adamw", args.lr, args.weight_decay),
        lr_scheduler=train.schedule("cosine", args.epochs, warmup_epochs=args.warmup_epochs),
        recompute=args.recompute,
        **meshes[args.parallel],
    ) as pm:
        if train.is_rank_zero():
            print(pm.plan)
        trainer = train.Trainer(
            pm,
            train.training_loader(pm, data, args.batch_size),
            train.evaluation_loader(data, args.batch_size, pm),
            epochs=args.epochs,
            schedule="timm",
            callbacks=[
                train.ProgressBar(),
                train.JsonLog(args.output),
                train.TensorBoard(args.output),
                train.Checkpoints(args.output),
            ],
        )
        if args.resume:
            trainer.resume(args.resume)
        elif args.overwrite and train.is_rank_zero():
            train.remove_run(args.output)
        trainer.fit()


if __name__ == "__main__":
    try:
        main(options())
    except autopar.AutoparError as error:
        sys.exit(f"error: {error}")
