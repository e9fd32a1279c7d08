"""
Every phase and action of chaos, in a real process with a real model: the fault happens where the
spec says.

The place is read from what the process itself leaves behind: its trace, its memory and the kernel's
view of it. It is then compared with the evidence in chaos's record.
"""

import json
import multiprocessing.connection
import os
import signal
import struct
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
from tft_chaos.proc import main_thread

from tests.plugins.stage import Scene
from tft.protocol.messages import OrderName

Start = Callable[[Scene], ForkServerProcess]

PATIENCE = 30.0
"""The time limit of a wait on a busy machine, in seconds."""


def firings(run_dir: Path) -> dict[str, dict[str, Any]]:  # Any: JSON
    """
    Return chaos's record, by file.
    """
    return {
        path.name: json.loads(path.read_text())
        for path in sorted((run_dir / "chaos").glob("*.json"))
    }


def until(fact: Callable[[], bool], process: ForkServerProcess) -> None:
    """
    Wait until `fact` returns True. The process must live meanwhile.
    """
    deadline = time.monotonic() + PATIENCE
    while not fact():
        assert time.monotonic() < deadline
        assert not multiprocessing.connection.wait([process.sentinel], 0.005)


def killed(start: Start, scene: Scene) -> dict[str, Any]:  # Any: JSON
    """
    Play a scene whose process is killed. Return the only firing.
    """
    process = start(scene)
    process.join(PATIENCE)
    assert process.exitcode == -signal.SIGKILL
    (firing,) = firings(scene.run_dir).values()
    assert (firing["rank"], firing["incarnation"]) == (scene.rank, scene.incarnation)
    return firing


def test_forward_kill_happens_inside_the_model_call(start: Start, tmp_path: Path) -> None:
    """When a rank is killed in `forward`, then the rank has entered the model in that step and has
    not left it."""
    scene = Scene(run_dir=tmp_path, chaos=("kill:rank=0,step=2",))

    firing = killed(start, scene)

    assert scene.places(2) == ["batch taken", "model entered"]
    assert (firing["step"], firing["phase"]) == (2, "forward")
    assert firing["evidence"] == {"computed": "layers.0"}


def test_backward_kill_happens_when_some_gradients_exist(start: Start, tmp_path: Path) -> None:
    """When a rank is killed in `backward`, then at least one parameter has its gradient, but not
    all parameters have theirs."""
    scene = Scene(run_dir=tmp_path, chaos=("kill:rank=0,step=2,phase=backward",))

    firing = killed(start, scene)

    assert scene.places(2)[-3:] == [
        "backward entered",
        "gradient of layers.2.bias",
        "gradient of layers.2.weight",
    ]
    assert firing["evidence"] == {"gradients": 2, "of": 4}


def test_collective_kill_happens_when_all_peers_wait_in_the_all_reduce(
    start: Start, tmp_path: Path
) -> None:
    """When a rank is killed in `collective`, then every peer, even a slow one, has launched its
    collective and waits in it. The killed rank has launched none in that step."""
    chaos = ("kill:rank=1,step=3,phase=collective", "slow:rank=2,step=3,factor=100")
    scenes = [Scene(run_dir=tmp_path, chaos=chaos, rank=rank, world=3) for rank in range(3)]

    processes = [start(scene) for scene in scenes]
    for process in processes:
        process.join(PATIENCE)

    assert [process.exitcode for process in processes] == [1, -signal.SIGKILL, 1]
    assert scenes[1].places(3)[-1] == "gradient of layers.2.bias"
    assert "collective launched" not in scenes[1].places(3)
    firing = firings(tmp_path)["0-1.json"]
    for peer in (scenes[0], scenes[2]):
        launched, left = "collective launched", "raised RuntimeError None"
        assert peer.places(3)[-2:] == [launched, left]
        assert peer.at(3, launched) < firing["at"] < peer.at(3, left)
    assert set(firing["evidence"]["peers"]) == {"0", "2"}


@pytest.mark.parametrize("groups", [1, 2])
def test_update_kill_happens_when_some_parameters_have_changed(
    start: Start, tmp_path: Path, groups: int
) -> None:
    """When a rank is killed in `update`, then the update window is open. Some parameters in the
    memory of the rank have changed and others have not."""
    scene = Scene(run_dir=tmp_path, chaos=("kill:rank=0,step=2,phase=update",), groups=groups)

    firing = killed(start, scene)

    assert scene.places(2)[-1] == "window opened"
    sizes = {"weight 0": 32, "bias 0": 8, "weight 2": 8, "bias 2": 1}
    layout = " ".join(f"{size * 4}s" for size in sizes.values())
    before = struct.unpack(layout, scene.file("before").read_bytes())
    after = struct.unpack(layout, scene.file("memory").read_bytes())
    changed = [name for name, old, new in zip(sizes, before, after, strict=True) if old != new]
    assert changed == {1: ["weight 0", "bias 0"], 2: ["weight 0", "weight 2"]}[groups]
    assert firing["evidence"] == {"changed": 2, "of": 4}


@pytest.mark.parametrize("groups", [1, 2])
def test_update_kill_in_an_optimizer_with_masters(
    start: Start, tmp_path: Path, groups: int
) -> None:
    """When the optimizer keeps masters in an optimizer of its own, then the rank is killed when that
    one has changed some of them, whatever the number of parameter groups."""
    chaos = ("kill:rank=0,step=2,phase=update",)
    firing = killed(start, Scene(run_dir=tmp_path, chaos=chaos, groups=groups, masters=True))
    assert 0 < firing["evidence"]["changed"] < firing["evidence"]["of"]


def test_between_kill_happens_after_the_window_and_before_the_next_batch(
    start: Start, tmp_path: Path
) -> None:
    """When a rank is killed in `between`, then the update window of the step has closed, and no
    batch was taken since."""
    scene = Scene(run_dir=tmp_path, chaos=("kill:rank=0,step=2,phase=between",))

    firing = killed(start, scene)

    assert scene.places(2)[-1] == "window closed"
    assert scene.places(3) == []
    assert firing["evidence"] == {"window_closed": 2}


def test_tail_kill_happens_after_the_tail_and_before_the_end_of_the_step(
    start: Start, tmp_path: Path
) -> None:
    """When a rank is killed in `tail`, then the rank has done the work of the tail, and the step
    has not ended."""
    scene = Scene(run_dir=tmp_path, chaos=("kill:rank=0,step=2,phase=tail",))

    firing = killed(start, scene)

    assert scene.places(2)[-1] == "tail done"
    assert scene.places(3) == []
    assert firing["evidence"] == {"window_closed": 2}


def test_evaluation_kill_happens_inside_the_model_after_the_step(
    start: Start, tmp_path: Path
) -> None:
    """When a rank is killed in `evaluation`, then its step has ended and the rank is inside the
    model again. No batch of the next step was taken."""
    scene = Scene(run_dir=tmp_path, chaos=("kill:rank=0,step=2,phase=evaluation",), evaluates=True)

    firing = killed(start, scene)

    assert scene.places(2)[-1] == "step ended"
    assert scene.places(3) == ["model entered"]
    assert (firing["step"], firing["evidence"]) == (2, {"computed": "layers.0"})


def test_forward_kill_does_not_happen_in_an_earlier_evaluation(
    start: Start, tmp_path: Path
) -> None:
    """When the loop evaluates the model before a step, then a `forward` kill happens inside the
    model in the step itself, after the evaluation has ended."""
    scene = Scene(run_dir=tmp_path, chaos=("kill:rank=0,step=3,phase=forward",), evaluates=True)

    firing = killed(start, scene)

    assert scene.places(3)[:4] == ["model entered", "model left", "evaluated", "batch taken"]
    assert scene.places(3)[-1] == "model entered"
    assert firing["step"] == 3


def test_repair_kill_happens_at_an_order_of_an_incident(start: Start, tmp_path: Path) -> None:
    """When a rank is killed in `repair`, then the rank was about to carry out that order of an
    incident. The same order at the start of the job does not kill the rank."""
    scene = Scene(
        run_dir=tmp_path,
        chaos=("kill:rank=0,phase=repair",),
        orders=(("regroup", 0), ("rebuild", 0), ("stop", 1), ("regroup", 1), ("rebuild", 1)),
    )

    firing = killed(start, scene)

    assert scene.places(1) == [
        "order regroup",
        "order rebuild",
        "order stop",
        "order regroup",
    ]
    assert firing["evidence"] == {"order": "regroup", "incident": 1}


def test_repair_kill_does_not_happen_at_another_step(start: Start, tmp_path: Path) -> None:
    """When a `repair` spec names a step at which no incident happens, then the rank is not killed."""
    scene = Scene(
        run_dir=tmp_path,
        chaos=("kill:rank=0,phase=repair,step=9",),
        orders=(("regroup", 1),),
    )

    process = start(scene)
    process.join(PATIENCE)

    assert (process.exitcode, firings(tmp_path)) == (0, {})


def test_successor_gets_the_step_of_an_incident_from_other_ranks(
    start: Start, tmp_path: Path
) -> None:
    """When a `repair` spec names a step and the target is a successor without state, then the
    successor is killed in an incident that other ranks met at that step."""
    chaos = ("kill:rank=0,phase=repair,step=25",)
    orders: tuple[tuple[OrderName, int], ...] = (("stop", 2), ("regroup", 2))
    survivor = Scene(run_dir=tmp_path, chaos=chaos, rank=1, first=25, last=25, orders=orders)
    start(survivor).join(PATIENCE)

    firing = killed(start, Scene(run_dir=tmp_path, chaos=chaos, incarnation=1, orders=orders))

    assert (firing["step"], firing["evidence"]) == (25, {"order": "regroup", "incident": 2})


@pytest.mark.parametrize("phase", ["forward", "backward", "update", "between", "tail"])
def test_raised_fault_is_caught_once_and_the_rank_continues(
    start: Start, tmp_path: Path, phase: str
) -> None:
    """When a spec raises a fault, then the fault has its kind and is raised once. The rank computes
    the step again with the same objects."""
    scene = Scene(run_dir=tmp_path, chaos=(f"raise:rank=0,step=2,phase={phase},kind=memory",))

    process = start(scene)
    process.join(PATIENCE)

    assert process.exitcode == 0
    assert scene.places(2).count("raised ImitatedFault memory") == 1
    assert "window closed" in scene.places(4)
    assert len(firings(tmp_path)) == 1


def test_raised_bug_is_an_exception_without_a_fault_kind(start: Start, tmp_path: Path) -> None:
    """When a spec has `kind=bug`, then the rank raises an ordinary exception without a fault kind."""
    scene = Scene(run_dir=tmp_path, chaos=("raise:rank=0,step=2,kind=bug",))

    process = start(scene)
    process.join(PATIENCE)

    assert "raised ValueError None" in scene.places(2)


def test_stopped_update_is_completed_after_sigcont(start: Start, tmp_path: Path) -> None:
    """When a rank is stopped in the middle of an update and later continued, then its final state
    is equal to that of a rank that was never stopped."""
    undisturbed = Scene(run_dir=tmp_path, chaos=(), rank=0)
    disturbed = Scene(run_dir=tmp_path, chaos=("stop:rank=1,step=2,phase=update",), rank=1)
    start(undisturbed).join(PATIENCE)
    process = start(disturbed)
    assert process.pid is not None
    pid = process.pid

    until(lambda: (seen := main_thread(pid)) is not None and seen.state == "T", process)
    assert disturbed.places(2)[-1] == "window opened"
    os.kill(pid, signal.SIGCONT)
    process.join(PATIENCE)

    assert process.exitcode == 0
    assert disturbed.file("memory").read_bytes() == undisturbed.file("memory").read_bytes()
    assert disturbed.places(5) == undisturbed.places(5)


def test_hang_blocks_only_the_training_thread(start: Start, tmp_path: Path) -> None:
    """When the training thread hangs, then a signal does not wake the thread, and another thread
    still runs Python."""
    scene = Scene(run_dir=tmp_path, chaos=("hang:rank=0,step=2",))
    process = start(scene)
    until(lambda: bool(firings(tmp_path)), process)

    _, number = scene.ticks()
    until(lambda: scene.ticks()[1] > number + 5, process)

    assert process.pid is not None
    # Python handles a signal only between bytecodes, so code in C is not interrupted
    os.kill(process.pid, signal.SIGINT)
    _, number = scene.ticks()
    until(lambda: scene.ticks()[1] > number + 5, process)
    assert scene.places(2) == ["batch taken", "model entered"]


def test_hang_with_the_gil_held_blocks_all_python_threads(start: Start, tmp_path: Path) -> None:
    """When the training thread hangs and holds the GIL, then another Python thread wakes up
    repeatedly but makes no progress."""
    scene = Scene(run_dir=tmp_path, chaos=("hang:rank=0,step=2,gil=held",))
    process = start(scene)
    until(lambda: bool(firings(tmp_path)), process)
    thread, _ = scene.ticks()

    def wakings() -> int:
        status = Path(f"/proc/{process.pid}/task/{thread}/status").read_text()
        return int(status.split("voluntary_ctxt_switches:")[1].split()[0])

    def stuck() -> bool:
        before, woken = scene.ticks()[1], wakings()
        until(lambda: wakings() > woken + 20, process)
        return scene.ticks()[1] == before

    until(stuck, process)
    assert scene.places(2) == ["batch taken", "model entered"]


def test_slow_rank_stays_slow_from_its_step_on(start: Start, tmp_path: Path) -> None:
    """When a `slow` spec fires, then from that step on the forward pass takes at least the given
    factor times as long as the model. This is one firing."""
    scene = Scene(run_dir=tmp_path, chaos=("slow:rank=0,step=2,factor=3",))

    process = start(scene)
    process.join(PATIENCE)

    for step in (2, 3, 4):
        model, call = scene.durations(step)
        assert call >= 3 * model
    ((name, firing),) = firings(tmp_path).items()
    assert (name, firing["step"], firing["evidence"]) == ("0-1.json", 2, {"factor": 3.0})
