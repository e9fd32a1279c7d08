"""
A program written for MindIO, with numbers in the place of a model: it imports nothing of tft.

    program.py PORT RING DIRECTORY STEPS OPTIONS

Its rank is in RANK, as launchers have it. OPTIONS is JSON; `faults` in it is a list of [rank, step, where,
text], struck once each; the text `kill` ends the process. `where` is `loop` (before the sum), `summed` (after
it) or `update` (with half of the numbers changed). DIRECTORY takes what it writes: losses,
what is called, its last checkpoint.
"""

import array
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from mindio_ttp import framework_ttp as ttp
from mindio_ttp.controller_ttp import tft_init_controller, tft_start_controller

from tests.mindio.ring import Member
from tests.mindio.stub import Stub

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
port, ring, directory, steps = (
    int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]),
)  # fmt: skip
options: dict[str, Any] = json.loads(sys.argv[5])
faults: list[list[Any]] = options.get("faults", [])
groups: list[dict[str, Any]] = options.get("groups") or [
    {"rank_list": list(range(world)), "replica_cnt": world, "replica_shift": 0}
]


class State:
    """
    What is trained.
    """

    numbers = array.array("d", [0.0] * 100)
    step = 0
    drawn = 0
    member: Member | None = None


state = State()


def note(what: str, **facts: Any) -> None:
    """
    A line of what has happened.
    """
    with (directory / f"calls-{rank}.jsonl").open("a") as file:
        file.write(json.dumps({"what": what, "pid": os.getpid(), **facts}) + "\n")


def strike(where: str) -> None:
    """
    What is to go wrong here.
    """
    for place, (whom, step, at, text) in enumerate(faults):
        mark = directory / f"struck-{place}"
        if (whom, step, at) == (rank, state.step + 1, where) and not mark.exists():
            mark.touch()
            if text == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError(text)


def stop(args: Any, ctx: Any) -> None:
    """
    Out of the sum.
    """
    note("stop", type=ttp.tft_get_repair_type())
    if state.member is not None:
        state.member.shut()


def clean(uce: bool, args: Any, ctx: Any) -> int:
    """
    Nothing is left to be cleaned.
    """
    note("clean", uce=uce, type=ttp.tft_get_repair_type())
    results: dict[str, int] = options.get("clean", {})
    return results.get(str(rank), 0)


def rebuild(fault_ranks: list[int], args: Any, ctx: Any) -> None:
    """
    The groups are formed in the loop.
    """
    note("rebuild", ranks=fault_ranks)


def repair(
    step: int, need_rebuild: bool, error_ranks: list[int], info: dict[str, Any], args: Any, ctx: Any
) -> None:
    """
    Through a pipe, which both ends open.
    """
    note("repair", step=step, need_rebuild=need_rebuild, error_ranks=error_ranks, **info)
    kind = ttp.RepairType(info["repair_type"])
    pipe = directory / f"pipe-{info['src'][0]}-{info['dst'][0]}-{info['type'][0]}"
    with suppress(FileExistsError):
        os.mkfifo(pipe)
    if kind is ttp.RepairType.RT_SEND:
        with pipe.open("wb") as file:
            file.write(state.numbers.tobytes())
    else:
        with pipe.open("rb") as file:
            state.numbers[:] = array.array("d", file.read())


def rollback(step: int, args: Any, ctx: Any) -> None:
    """
    Back to a step.
    """
    note("rollback", step=step)
    state.step = state.drawn = step


def save(step: int, info: list[dict[str, Any]], args: Any, ctx: Any) -> None:
    """
    The first of those who hold a copy together writes it.
    """
    note("save", step=step, info=info)
    (directory / f"saved-{rank}.bin").write_bytes(state.numbers.tobytes())


def rename(step: int, args: Any) -> None:
    """
    All have saved.
    """
    note("rename", step=step)
    (directory / "latest").write_text(str(step))


def draw() -> float:
    """
    The next number of this rank.
    """
    state.drawn += 1
    return (rank + 1) * 0.37 + state.drawn * 0.11


@ttp.tft_exception_handler
def train(first: int) -> str:
    """
    One number a step.
    """
    note("train", step=state.step)
    if ttp.tft_is_reboot_node() and not (directory / f"ready-{os.getpid()}").exists():
        (directory / f"ready-{os.getpid()}").touch()
        raise RuntimeError("ARF FINISH")
    state.member = Member(rank, ring)
    while state.step < steps:
        strike("loop")
        loss = draw() + state.numbers[0]
        with (directory / f"losses-{rank}.jsonl").open("a") as file:
            file.write(json.dumps([state.step + 1, loss.hex()]) + "\n")
        try:
            total = state.member.add(loss)
        except ConnectionError as error:
            raise RuntimeError(f"FORCE STOP: {error}") from error
        strike("summed")
        ttp.tft_start_updating_os()
        for index in range(len(state.numbers)):
            if index == len(state.numbers) // 2:
                strike("update")
            state.numbers[index] = total / (index + 1)
        state.step += 1
        ttp.tft_end_updating_os(state.step)
        ttp.tft_pause_train(state.step)
    return "trained"


if rank == 0 and not os.environ.get("MINDX_TASK_ID"):
    tft_init_controller(rank, world, False, enable_arf=True)
    if options.get("orchestrated"):
        Stub(note, options.get("choices", {})).register()
    tft_start_controller("127.0.0.1", port, enable_tls=False)
ttp.tft_init_processor(rank, world, False, enable_tls=False, enable_uce=True, enable_arf=True)
ttp.tft_start_processor("127.0.0.1", port)
note("started", reboot=ttp.tft_is_reboot_node())
ttp.tft_register_stop_handler(stop)
ttp.tft_register_clean_handler(clean)
ttp.tft_register_rebuild_group_handler(rebuild)
ttp.tft_register_repair_handler(repair)
ttp.tft_register_rollback_handler(rollback)
ttp.tft_register_save_ckpt_handler(save)
ttp.tft_register_rename_handler(rename)
mine = [group for group in groups if rank in group["rank_list"]]
ttp.tft_set_optimizer_replica(rank, mine)
said = train(0)
note("returned", said=said)
(directory / f"final-{rank}.hex").write_text(state.numbers.tobytes().hex())
ttp.tft_destroy_processor()
