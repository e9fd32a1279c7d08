"""
`vision.py` with tft: `tft run --nproc-per-node 2 vision_tft.py`.

`Batches` gives the loader a position and takes care of the epochs. The scheduler and the moving
average are handed over, and the session calls the evaluation.
"""

from pathlib import Path
from typing import Any

import torch
from common import Images, arguments, classifier
from tft_pytorch import Batches
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler

import tft

args = arguments(steps=30)

session = tft.init()
torch.set_num_threads(1)
torch.manual_seed(0)
model = classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
rank, world = session.rank, session.world
torch.manual_seed(rank)
images = Images(160, augment=True)
sampler: DistributedSampler[Any] = DistributedSampler(images, world, rank)
batches = Batches(DataLoader(images, batch_size=8, sampler=sampler, num_workers=2))


def evaluate(step: int) -> None:
    """
    Record how many images the moving average classifies right. Rank 0 does it.
    """
    if rank:
        return
    ema.eval()
    with torch.no_grad():
        right = sum(
            int((ema(x).argmax(1) == y).sum())
            for x, y in DataLoader(Images(80, augment=False), batch_size=16)
        )
    session.record({"right": right / 80})


def train(session: tft.Session) -> None:
    """
    Run the training loop.
    """
    for _ in session.steps(args.steps):
        x, y = batches.next()
        loss = cross_entropy(session.model(x), y)
        optimizer.zero_grad()
        loss.backward()
        with session.update():
            optimizer.step()
            scheduler.step()
            ema.update_parameters(model)


session.adopt(
    model=model, optimizer=optimizer, scheduler=scheduler, data=batches, others={"ema": ema},
    wrap=lambda: DDP(model),
)  # fmt: skip
session.evaluate(evaluate, every=len(batches))
session.run(train)
if args.out:
    torch.save(model.state_dict(), Path(args.out, f"final-{rank}.pt"))
