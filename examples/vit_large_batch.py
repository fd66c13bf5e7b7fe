"""ViT-B/32 with LAMB and a batch of 32,768 on a few devices, by gradient accumulation.

The planner chooses the mesh. ``--grad-accum-steps`` batches go through the model before each update, here 64 of 512
images. LAMB scales a parameter's step by the norm of the full parameter, also if the parameter is split over ranks.
Learning rate 1.8e-2, weight decay 0.1, 150 of 300 epochs of warm-up, mixup 0.2, gradients clipped to norm 1.

    python examples/vit_large_batch.py --data-dir imagenet
    torchrun --nproc-per-node 8 examples/vit_large_batch.py --devices 8 --data-dir imagenet

To try it without the data, and in seconds:

    python examples/vit_large_batch.py --devices 2 --model test_vit --img-size 32 --data synthetic --limit 128 \\
        --batch-size 64 --grad-accum-steps 4 --epochs 2 --warmup-epochs 1
"""

import argparse
import sys
from pathlib import Path

import timm
import torch

import autopar
from autopar import train


def options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--model", default="vit_base_patch32_224", help="a timm name")
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument("--data", default="imagefolder", help="digits, cifar10, cifar100, imagefolder or synthetic")
    parser.add_argument("--data-dir", type=Path, help="where the data lies")
    parser.add_argument("--limit", type=int, help="train and test on so many images only")
    parser.add_argument("--workers", type=int, default=0, help="processes that read images")
    parser.add_argument("--batch-size", type=int, default=32768, help="images of one update")
    parser.add_argument("--grad-accum-steps", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--warmup-epochs", type=int, default=150)
    parser.add_argument("--lr", type=float, default=1.8e-2)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--mixup", type=float, default=0.2)
    parser.add_argument("--clip-grad", type=float, default=1.0)
    parser.add_argument("--output", type=Path, default=Path("runs/vit-large-batch"), help="folder for checkpoints")
    parser.add_argument("--resume", type=Path, help="a checkpoint of an earlier run, such as runs/vit-large-batch/last")
    parser.add_argument("--overwrite", action="store_true", help="remove the run that --output holds already")
    args = parser.parse_args(argv)
    if not timm.is_model(args.model):
        parser.error(f"--model {args.model}: timm has no such model")
    return args


def main(args: argparse.Namespace) -> None:
    wanted = train.Wanted(args.img_size, folder=args.data_dir, num_train=args.limit, num_test=args.limit)
    data = train.load_data(args.data, wanted)
    torch.manual_seed(0)
    model = timm.create_model(args.model, img_size=args.img_size, num_classes=data.num_classes)
    at_once = train.micro_batch(args.batch_size, args.grad_accum_steps)

    with autopar.parallelize(
        model,
        args.devices,
        example_inputs=torch.empty(at_once, 3, args.img_size, args.img_size),
        optimizer=train.timm_optimizer(model, "lamb", args.lr, args.weight_decay),
        lr_scheduler=train.schedule("cosine", args.epochs, warmup_epochs=args.warmup_epochs),
        clip_grad_norm=args.clip_grad,
    ) as pm:
        if train.is_rank_zero():
            print(pm.plan)
        trainer = train.Trainer(
            pm,
            train.training_loader(
                pm,
                data,
                args.batch_size,
                grad_accum_steps=args.grad_accum_steps,
                mixup=train.Mixup(data.num_classes, mixup=args.mixup, smoothing=0.0),
                num_workers=args.workers,
            ),
            train.evaluation_loader(data, at_once, pm, num_workers=args.workers),
            epochs=args.epochs,
            grad_accum_steps=args.grad_accum_steps,
            schedule="timm",
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
