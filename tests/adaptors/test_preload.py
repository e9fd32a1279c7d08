"""
The preload before a script starts: it imports all modules that training needs, and it does not
initialize a device.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
import json, sys, tempfile, time
from pathlib import Path
from tft_pytorch import adaptor
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
    adaptor.tft_capture(closing=False)
    optimizer.step()
    scheduler.step()
    adaptor.tft_capture(closing=True)
    seconds.append(time.perf_counter() - began)
payload = adaptor.tft_give("dense", 0, kept=False)
adaptor.tft_take("dense", payload.meta)
adaptor.tft_taken("dense", payload.meta)
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


def run(script: str, *arguments: str) -> str:
    """
    Run a script in a new process with one thread, as ranks do, and return its output.
    """
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *arguments],
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'adaptors'}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.soak
def test_first_step_imports_few_modules_after_the_preload() -> None:
    """When a process has preloaded its modules, then its first step, transfer and checkpoint import
    at most 5 more modules. The first step takes less than 0.1 s longer than the second."""
    told = json.loads(run(SCRIPT))

    assert len(told["late"]) <= 5, told["late"]
    assert not [name for name in told["late"] if name.startswith(("torch._", "torch.distributed"))]
    assert told["seconds"][0] - told["seconds"][1] < 0.1
    assert not told["cuda"]


FORKS = """
import os, sys
import numpy, torch
from tft_pytorch import adaptor
adaptor.tft_preload()
DRAW = {"numpy": numpy.random.rand, "torch": lambda: torch.rand(1).item()}
draw = DRAW[sys.argv[1]]
seed = {"numpy": numpy.random.seed, "torch": torch.manual_seed}[sys.argv[1]]

def drawn_in_a_fork():
    here, there = os.pipe()
    if os.fork() == 0:
        os.write(there, str(draw()).encode())
        os._exit(0)
    os.wait()
    return os.read(here, 100).decode()

print(len(os.listdir("/proc/self/task")), drawn_in_a_fork(), drawn_in_a_fork())
seed(3)
print(draw(), drawn_in_a_fork(), drawn_in_a_fork(), draw())
"""


@pytest.mark.parametrize("generator", [pytest.param("numpy", marks=pytest.mark.soak), "torch"])
def test_forked_ranks_draw_different_numbers_after_the_preload(generator: str) -> None:
    """When ranks are forked from one preloaded process, then that process had one thread, and numpy
    and torch draw different numbers in each rank. A generator that the script has seeded is
    inherited."""
    ran = run(FORKS, generator)
    unseeded, seeded = (line.split() for line in ran.splitlines())

    assert unseeded[0] == "1"
    assert len(set(unseeded[1:])) == 2
    assert seeded[1] == seeded[2] == seeded[3] != seeded[0]
