"""
Tests of the stand-in for torch_npu: one current device per thread, collectives that stopping a
device interrupts, and groups that can be rebuilt.
"""

import json
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.jobs import ROOT

FRAMEWORKS = ROOT / "tests" / "mindspeed" / "standins" / "frameworks"
FORCE_STOP = "FORCE STOP"


@pytest.fixture(autouse=True, scope="module")
def _installed() -> None:
    """
    Import the stand-in, which patches torch in this process.
    """
    sys.path.insert(0, str(FRAMEWORKS))
    __import__("torch_npu")


def test_each_thread_has_a_device_of_its_own() -> None:
    """When a thread sets its device, then the device of another thread stays the same, and a new
    thread begins at device 0."""
    import torch

    npu: Any = torch.npu  # type: ignore[attr-defined]  # torch_npu adds it
    npu.set_device(3)
    found: list[int] = []
    other = threading.Thread(target=lambda: found.append(npu.current_device()))
    other.start()
    other.join()
    assert (npu.current_device(), found) == (3, [0])
    npu.set_device(0)


@pytest.mark.parametrize(("device", "stops"), [(2, True), (0, False)])
def test_a_device_stop_interrupts_only_the_collectives_of_its_device(
    device: int, stops: bool
) -> None:
    """When a device is stopped while a thread waits in a collective for a missing peer, then the
    thread raises FORCE STOP if its group uses that device. A stop of another device interrupts no
    collective."""
    import torch
    from torch._C._distributed_c10d import HashStore
    from torch_npu import hccl, npu

    group = hccl.Group(HashStore(), 0, 2, timedelta(seconds=60))
    begun = threading.Event()
    raised: list[str] = []

    def wait() -> None:
        npu.set_device(2)
        work = group.ask("allreduce", ([torch.zeros(2)],), {})
        begun.set()
        try:
            work.wait()
        except RuntimeError as error:
            raised.append(str(error))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    assert begun.wait(10)
    npu.stop_device(device)
    waiting.join(10 if stops else 0.5)
    assert waiting.is_alive() is not stops
    assert [FORCE_STOP in text for text in raised] == [True] * stops
    npu.stop_device(2)
    waiting.join(10)
    assert not waiting.is_alive()
    for each in (device, 2):
        npu.restart_device(each)


PAIR = """
import json, sys
from datetime import timedelta
sys.path.insert(0, sys.argv[1])
import torch, torch_npu
import torch.distributed as dist
from torch.distributed import distributed_c10d
rank, port, repairs = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4].split(",")
naming = {"repair": "0"}
distributed_c10d._process_group_name = lambda ranks, use_hashed_name: naming["repair"] + "__"
_process_group_name = distributed_c10d._process_group_name
store = dist.TCPStore("127.0.0.1", port, is_master=False)
dist.init_process_group("hccl", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
for repair in repairs:
    if naming["repair"] != repair:
        naming["repair"] = repair
        torch.distributed.reinit_process_group(None, rebuild_link=True)
    total = torch.ones(1, device="npu")
    dist.all_reduce(total)
    print(json.dumps([repair, total.item()]), flush=True)
    sys.stdin.readline()
"""


def _member(rank: int, port: int, repairs: str) -> subprocess.Popen[str]:
    """
    Start a process that is one of the two members of a group.
    """
    return subprocess.Popen(
        [sys.executable, "-c", PAIR, str(FRAMEWORKS), str(rank), str(port), repairs], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def _said(process: subprocess.Popen[str]) -> Any:
    """
    Return the next line that the process prints, parsed as JSON.
    """
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def _goes_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_a_reinitialized_group_includes_the_new_process(tmp_path: Path) -> None:
    """When a process of a group is killed and another one takes its rank, then both all-reduce in
    the same group after it was reinitialized."""
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [_member(0, store.port, "0,1"), _member(1, store.port, "0")]
    try:
        assert [_said(each) for each in processes] == [["0", 2.0]] * 2
        processes[1].kill()
        processes[1].wait()
        processes.append(_member(1, store.port, "1"))
        _goes_on(processes[0])
        assert [_said(processes[0]), _said(processes[2])] == [["1", 2.0]] * 2
    finally:
        for process in processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
