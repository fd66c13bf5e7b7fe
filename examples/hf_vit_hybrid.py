"""A Hugging Face ViT under combined tensor and pipeline parallelism: ``tp=2, pp=2`` on four devices.

The model is built from a config, so nothing is fetched from the hub. Its output remains a dataclass: the loss takes
``output.logits``. The scheduler is transformers' cosine with a warm-up over 0.3 of all updates; 3 epochs.

    python examples/hf_vit_hybrid.py --data-dir data --download
    torchrun --nproc-per-node 4 examples/hf_vit_hybrid.py --data-dir data

To try it without the data, and in seconds:

    python examples/hf_vit_hybrid.py --hidden-size 32 --layers 2 --heads 2 --img-size 32 --data synthetic \\
        --limit 64 --epochs 1
"""

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import ViTConfig, ViTForImageClassification, get_cosine_schedule_with_warmup

import autopar
from autopar import train


def options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument("--data", default="cifar10", help="digits, cifar10, cifar100, imagefolder or synthetic")
    parser.add_argument("--data-dir", type=Path, help="where the data lies")
    parser.add_argument("--download", action="store_true", help="fetch the data into --data-dir first")
    parser.add_argument("--limit", type=int, help="train and test on so many images only")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--warmup-ratio", type=float, default=0.3)
    parser.add_argument("--output", type=Path, default=Path("runs/hf-vit"), help="folder for checkpoints")
    parser.add_argument("--resume", type=Path, help="a checkpoint of an earlier run, such as runs/hf-vit/last")
    parser.add_argument("--overwrite", action="store_true", help="remove the run that --output holds already")
    args = parser.parse_args(argv)
    if args.hidden_size % args.heads:
        parser.error(f"--hidden-size {args.hidden_size} is no multiple of --heads {args.heads}")
    return args


def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.logits, target)


def main(args: argparse.Namespace) -> None:
    wanted = train.Wanted(
        args.img_size, folder=args.data_dir, download=args.download, num_train=args.limit, num_test=args.limit
    )
    data = train.load_data(args.data, wanted)
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        intermediate_size=4 * args.hidden_size,
        image_size=args.img_size,
    )
    config.num_labels = data.num_classes
    model = ViTForImageClassification(config)
    updates = args.epochs * (train.num_images(data.train) // args.batch_size)

    with autopar.parallelize(
        model,
        devices=args.tp * args.pp,
        tp=args.tp,
        pp=args.pp,
        microbatches=4,
        example_inputs=torch.empty(args.batch_size, 3, args.img_size, args.img_size),
        loss_fn=loss_fn,
        optimizer=functools.partial(torch.optim.AdamW, lr=args.lr, weight_decay=args.weight_decay),
        lr_scheduler=lambda optimizer: get_cosine_schedule_with_warmup(
            optimizer, round(args.warmup_ratio * updates), updates
        ),
    ) as pm:
        if train.is_rank_zero():
            print(pm.plan)
        trainer = train.Trainer(
            pm,
            train.training_loader(pm, data, args.batch_size),
            train.evaluation_loader(data, args.batch_size, pm),
            epochs=args.epochs,
            schedule="update",
            scores=lambda output: output.logits,
            callbacks=[train.ProgressBar(), train.Checkpoints(args.output)],
        )
        if args.resume:
            trainer.resume(args.resume)
        elif args.overwrite and train.is_rank_zero():
            train.remove_run(args.output)
        trainer.fit()
        model.load_state_dict(pm.state_dict())  # then model.save_pretrained(...)


if __name__ == "__main__":
    try:
        main(options())
    except autopar.AutoparError as error:
        sys.exit(f"error: {error}")
