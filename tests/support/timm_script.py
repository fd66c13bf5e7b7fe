"""A training script with the structure of timm's ``train.py``: a task, an optimizer, a loop, a validation, checkpoints.

It calls timm's functions in the order of that script and under its names, so that the diff of docs/timm_script.md fits
both. The loop keeps what touches the model or the optimizer: autocast, accumulation, clipping, averages, schedules.
"""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportOptionalOperand=false
# timm's own types of these calls: a dict of any options, a scheduler or None.

import argparse
import copy
from contextlib import suppress
from functools import partial

import torch
import torch.nn as nn
from timm import utils
from timm.data import create_dataset, create_loader
from timm.models import create_model
from timm.optim import create_optimizer_v2, optimizer_kwargs
from timm.scheduler import create_scheduler_v2, scheduler_kwargs
from timm.task import ClassificationTask, resume_task_checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--data-dir")
parser.add_argument("--model", default="vit_tiny_patch16_224")
parser.add_argument("--model-kwargs", nargs="*", default={}, action=utils.ParseKwargs)
parser.add_argument("--num-classes", type=int, default=4)
parser.add_argument("--img-size", type=int, default=32)
parser.add_argument("--device", default="cpu")
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--grad-accum-steps", type=int, default=1)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--opt", default="adamw")
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--opt-kwargs", nargs="*", default={}, action=utils.ParseKwargs)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--weight-decay", type=float, default=0.05)
parser.add_argument("--layer-decay", type=float)
parser.add_argument("--sched", default="cosine")
parser.add_argument("--sched-on-updates", action="store_true")
parser.add_argument("--warmup-epochs", type=int, default=1)
parser.add_argument("--clip-grad", type=float)
parser.add_argument("--clip-mode", default="norm")
parser.add_argument("--amp", action="store_true")
parser.add_argument("--model-ema", action="store_true")
parser.add_argument("--resume", default="")
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--output")


def main():
    args = parser.parse_args()
    device = utils.init_distributed_device(args)
    utils.random_seed(args.seed, args.rank)
    model = create_model(args.model, num_classes=args.num_classes, **args.model_kwargs)
    model.to(device=device)
    amp_autocast = partial(torch.autocast, device_type=device.type, dtype=torch.bfloat16) if args.amp else suppress

    loaders = {}
    for split in ("train", "validation"):
        loaders[split] = create_loader(
            create_dataset("", root=args.data_dir, split=split, is_training=split == "train"),
            input_size=(3, args.img_size, args.img_size),
            batch_size=args.batch_size,
            is_training=split == "train",
            no_aug=True,
            num_workers=0,
            use_prefetcher=False,
            device=device,
        )
    task = ClassificationTask(model=model, device=device, verbose=False, criterion_kwargs={"smoothing": 0.1})

    model = task.get_trainable_module()
    eval_model = task.get_eval_model()

    optimizer = create_optimizer_v2(
        model,
        **optimizer_kwargs(cfg=args),
        **args.opt_kwargs,
    )
    if utils.is_primary(args):
        defaults = copy.deepcopy(optimizer.defaults)
        print(f"{type(optimizer).__name__}: {defaults}")

    start_epoch = 0
    if args.resume:
        start_epoch = resume_task_checkpoint(task, args.resume, optimizer=optimizer, log_info=False)
    if args.model_ema:
        task.setup_ema(decay=0.9)

    utils.get_outdir(args.output)
    saver = utils.CheckpointSaver(
        model=model, optimizer=optimizer, args=args, checkpoint_dir=args.output, recovery_dir=args.output, task=task
    )
    updates_per_epoch = -(-len(loaders["train"]) // args.grad_accum_steps)
    lr_scheduler, num_epochs = create_scheduler_v2(
        optimizer, **scheduler_kwargs(args), updates_per_epoch=updates_per_epoch
    )
    if start_epoch > 0:
        lr_scheduler.step(start_epoch)
    evaluator = task.create_evaluator()
    for epoch in range(start_epoch, num_epochs):
        train_metrics = train_one_epoch(epoch, task, loaders["train"], optimizer, args, lr_scheduler, amp_autocast)
        eval_metrics = validate(eval_model, loaders["validation"], evaluator, amp_autocast)
        utils.update_summary(
            epoch, train_metrics, eval_metrics, filename=f"{args.output}/summary.csv",
            lr=optimizer.param_groups[0]["lr"], write_header=epoch == start_epoch,
        )  # fmt: skip
        saver.save_checkpoint(epoch, metric=eval_metrics["top1"])
        lr_scheduler.step(epoch + 1, eval_metrics["top1"])


def train_one_epoch(epoch, task, loader, optimizer, args, lr_scheduler, amp_autocast):
    losses_m = utils.AverageMeter()
    task.get_trainable_module().train()
    accum_steps = args.grad_accum_steps
    num_updates = epoch * -(-len(loader) // accum_steps)
    optimizer.zero_grad()
    for batch_idx, (input, target) in enumerate(loader):
        need_update = batch_idx == len(loader) - 1 or (batch_idx + 1) % accum_steps == 0
        with amp_autocast():
            loss = task(input, target)["loss"] / accum_steps
        loss.backward()
        losses_m.update(loss.item() * accum_steps, input.shape[0])
        if not need_update:
            continue
        if args.clip_grad is not None:
            parameters = task.get_clip_parameters(exclude_head="agc" in args.clip_mode)
            utils.dispatch_clip_grad(parameters, value=args.clip_grad, mode=args.clip_mode)
        optimizer.step()
        num_updates += 1
        optimizer.zero_grad()
        task.update_ema(step=num_updates)
        lr_scheduler.step_update(num_updates=num_updates, metric=losses_m.avg)
    return {"loss": losses_m.avg}


def validate(model: nn.Module, loader, evaluator, amp_autocast):
    evaluator.reset()
    model.eval()
    with torch.inference_mode():
        for input, target in loader:
            with amp_autocast():
                evaluator.update(model(input), target)
    return evaluator.compute(distributed=False)


if __name__ == "__main__":
    main()
