"""
Before a script starts: everything is imported, and nothing of a device is touched.
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

SCRIPT = """
import json, sys, tempfile, time
from pathlib import Path
import tft_pytorch as adaptor
assert "torch._dynamo" not in sys.modules
adaptor.tft_preload()
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed import TCPStore

torch.set_num_threads(1)
before = set(sys.modules)
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64), nn.Dropout(0.1), nn.LayerNorm(64))
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
adaptor.tft_adopt(
    {"model": model, "optimizer": optimizer, "scheduler": scheduler}, lambda: DDP(model)
)
adaptor.tft_regroup("one", "127.0.0.1", store.port, 0, 1)
wrapped = adaptor.tft_rebuild()
seconds = []
for _ in range(2):
    began = time.perf_counter()
    loss = nn.functional.cross_entropy(wrapped(torch.arange(4)), torch.arange(4))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    adaptor.tft_capture()
    optimizer.step()
    scheduler.step()
    adaptor.tft_capture()
    seconds.append(time.perf_counter() - began)
parcel = adaptor.tft_give("dense")
adaptor.tft_take("dense", parcel.meta)
adaptor.tft_taken("dense", parcel.meta)
directory = Path(tempfile.mkdtemp())
adaptor.tft_save(directory, "dense")
adaptor.tft_load(directory, "dense")
adaptor.tft_quiesce()
adaptor.tft_clear()
print(json.dumps({
    "seconds": seconds,
    "late": sorted(set(sys.modules) - before),
    "cuda": torch.cuda.is_initialized(),
}))
"""


def test_nothing_large_is_imported_after_the_preload() -> None:
    """
    When a process has preloaded, then its first step, move and checkpoint import at most a few
    small modules of torch, and the first step is hardly slower than the second.
    """
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'adaptors'}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)

    assert len(told["late"]) <= 5, told["late"]
    assert not [name for name in told["late"] if name.startswith(("torch._", "torch.distributed"))]
    assert told["seconds"][0] - told["seconds"][1] < 0.1
    assert not told["cuda"]
