"""
A plain training script of an image classifier, as people write them: `torchrun --nproc-per-node 2
vision.py`. `vision_tft.py` is the same script with tft.

It has a DataLoader with workers that augment, a DistributedSampler, a scheduler, batch norms, and a
moving average (EMA) of the model that is evaluated after each epoch.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Images, arguments, classifier
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler

args = arguments(steps=30)

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
torch.manual_seed(0)
model = classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
wrapped = DDP(model)
torch.manual_seed(rank)
images = Images(160, augment=True)
sampler: DistributedSampler[Any] = DistributedSampler(images, world, rank)
loader = DataLoader(images, batch_size=8, sampler=sampler, num_workers=2)


def evaluate(step: int) -> None:
    """
    Log how many images the moving average classifies right. Rank 0 does it.
    """
    ema.eval()
    with torch.no_grad():
        right = sum(
            int((ema(x).argmax(1) == y).sum())
            for x, y in DataLoader(Images(80, augment=False), batch_size=16)
        )
    print(json.dumps({"step": step, "right": right / 80}), flush=True)


step, epoch = 0, 0
while step < args.steps:
    sampler.set_epoch(epoch)
    for x, y in loader:
        step += 1
        loss = cross_entropy(wrapped(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        ema.update_parameters(model)
        if step == args.steps:
            break
    epoch += 1
    if rank == 0:
        evaluate(step)
if args.out:
    torch.save(model.state_dict(), Path(args.out, f"final-{rank}.pt"))
dist.destroy_process_group()
