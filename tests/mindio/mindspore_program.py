"""
A program with a training loop like MindSpore's, which trains numbers instead of a model.

No decorator wraps its loop. After an incident the program itself reports how the loop ended, waits
for the next action, and asks for the step to continue from.

    mindspore_program.py PORT RING DIRECTORY STEPS OPTIONS

The arguments and the written files are those of `program.py`. Ranks in one group have the same
numbers; the groups differ. OPTIONS is JSON:

- `faults`: a list of [rank, step, where, text]; each fault happens once. `where` is `loop` (before
  the all-reduce), `update` (after half of the numbers have changed) or `replacement` (in a new
  process, before it is ready). `where` may also be the name of a function below. The text `kill`
  kills the process, `hang` blocks for ever, and any other text is raised.
- `groups`: lists of ranks that hold the same state; the default is {0, 2} and {1, 3}.
- `clean`: the result of the clean function, by rank.
- `done`, `orchestrated`, `choices`: as in `program.py`.
"""

import array
import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from mindio_ttp import framework_ttp as ttp
from mindio_ttp.controller_ttp import tft_init_controller, tft_start_controller
from mindio_ttp.framework_ttp import Action, RepairType, ReportState

from tests.mindio.desk import Desk
from tests.mindio.ring import Member
from tests.mindio.stub import Stub
from tests.once import once

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
port, ring, directory, steps = (
    int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]),
)  # fmt: skip
options: dict[str, Any] = json.loads(sys.argv[5])
faults: list[list[Any]] = options.get("faults", [])
groups: list[list[int]] = options.get("groups", [[0, 2], [1, 3]])
mine = next(group for group in groups if rank in group)

STATES = {
    "UCEError": ReportState.RS_UCE,
    "HCCEError": ReportState.RS_HCCL_FAILED,
    "ForceStopError": ReportState.RS_NORMAL,
    "ARF FINISH": ReportState.RS_PREREPAIR_FINISH,
    "STEP FINISH": ReportState.RS_STEP_FINISH,
}
"""By text that MindSpore's loop looks for in an error: the state that the loop reports."""


class State:
    """
    The state of the training in this process.
    """

    numbers = array.array("d", [0.0] * 64)
    step = 0
    drawn = 0
    member: Member | None = None
    stopped = False


state = State()


def note(what: str, **facts: Any) -> None:
    """
    Append an event to this rank's file of calls.
    """
    with (directory / f"calls-{rank}.jsonl").open("a") as file:
        file.write(json.dumps({"what": what, "pid": os.getpid(), **facts}) + "\n")


def strike(where: str, step: int) -> None:
    """
    Carry out the fault that `faults` plans for this rank, step and place, if any.
    """
    for place, (whom, when, at, text) in enumerate(faults):
        mark = directory / f"struck-{place}"
        if (whom, when, at) == (rank, step, where) and once(mark):
            # ranks with a fault at the same place fail together, however busy the machine is
            there = [n for n, (_, *moment, _) in enumerate(faults) if moment == [step, at]]
            while not all((directory / f"struck-{n}").exists() for n in there):
                time.sleep(0.005)
            if text == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if text == "hang":
                threading.Event().wait()
            raise RuntimeError(text)


# ---------------------------------------------------------------- registered functions


def stop(args: Any, ctx: Any) -> None:
    """
    Stop handler: interrupt the all-reduce that this rank waits in.
    """
    note("stop", type=ttp.tft_get_repair_type())
    strike("stop", state.step + 1)
    state.stopped = True
    if state.member is not None:
        state.member.shut()


def clean(uce: bool, args: Any, ctx: Any) -> int:
    """
    Clean handler: return the planned result; the program has nothing to clean.
    """
    note("clean", uce=uce, type=ttp.tft_get_repair_type())
    strike("clean", state.step + 1)
    results: dict[str, int] = options.get("clean", {})
    return results.get(str(rank), 0)


def rebuild(fault_ranks: list[int], args: Any, ctx: Any) -> None:
    """
    Rebuild handler: only record the call, because the loop forms the groups itself.
    """
    note("rebuild", ranks=fault_ranks)
    strike("rebuild", state.step + 1)


def repair(
    step: int, need_rebuild: bool, error_ranks: list[int], info: dict[str, Any], args: Any, ctx: Any
) -> None:
    """
    Repair handler: send or receive the numbers through a named pipe between the two ranks.
    """
    note("repair", step=step, need_rebuild=need_rebuild, error_ranks=error_ranks, **info)
    strike("repair", step + 1)
    pipe = directory / f"pipe-{info['src'][0]}-{info['dst'][0]}"
    with suppress(FileExistsError):
        os.mkfifo(pipe)
    if info["repair_type"] == RepairType.RT_SEND.value:
        with pipe.open("wb") as file:
            file.write(state.numbers.tobytes())
    else:
        with pipe.open("rb") as file:
            state.numbers[:] = array.array("d", file.read())


def rollback(step: int, args: Any, ctx: Any) -> None:
    """
    Rollback handler: allow waiting again. The loop itself asks for the step to continue from.
    """
    note("rollback", step=step)
    strike("rollback", step + 1)
    state.stopped = False


def save(step: int, info: list[dict[str, Any]], args: Any, ctx: Any) -> None:
    """
    Save handler: write this rank's numbers to a file and record which state this rank was chosen to
    save.
    """
    note("save", step=step, info=info)
    strike("save", step + 1)
    (directory / f"saved-{rank}.bin").write_bytes(state.numbers.tobytes())


def rename(step: int, ctx: Any) -> None:
    """
    Rename handler: record the call, which comes after all ranks have saved.
    """
    note("rename", step=step)


def leave(ctx: Any) -> None:
    """
    Exit handler: record that the job is over for this rank.
    """
    note("exit")


desk = Desk(directory, rank, steps, options, note)


# ---------------------------------------------------------------- the training loop


def draw() -> float:
    """
    Return the next number of this rank's data.
    """
    state.drawn += 1
    return (rank + 1) * 0.37 + state.drawn * 0.11


def train() -> None:
    """
    Train until the last step; each step adds up one number per rank.
    """
    state.member = Member(rank, ring)
    try:
        if state.stopped:
            raise ConnectionError("there is nobody to wait for")
        state.member.join()
    except ConnectionError as error:
        raise RuntimeError(f"ForceStopError: {error}") from error
    while not desk.is_last(state.step):
        strike("loop", state.step + 1)
        loss = draw() + state.numbers[0]
        with (directory / f"losses-{rank}.jsonl").open("a") as file:
            file.write(json.dumps([state.step + 1, loss.hex()]) + "\n")
        try:
            total = state.member.add(loss)
        except ConnectionError as error:
            raise RuntimeError(f"ForceStopError: {error}") from error
        ttp.tft_start_updating_os()
        for index in range(len(state.numbers)):
            if index == len(state.numbers) // 2:
                strike("update", state.step + 1)
            state.numbers[index] = total / (index + 1) + mine[0]
        state.step += 1
        ttp.tft_end_updating_os(state.step)
        desk.obey()
        ttp.tft_pause_train(state.step)


if rank == 0:
    tft_init_controller(rank, world, False, enable_arf=True)
    if options.get("orchestrated"):
        Stub(note, options.get("choices", {})).register()
    tft_start_controller("127.0.0.1", port, False, "")
ttp.tft_init_processor(rank, world, False, False, "", enable_arf=True)
ttp.tft_start_processor("127.0.0.1", port)
ready = not ttp.tft_is_reboot_node()
note("started", reboot=not ready, type=ttp.tft_get_reboot_type())
if not ready:
    ttp.tft_report_error(ReportState.RS_INIT_FINISH.value)
    note("initialised", action=ttp.tft_wait_next_action())
ttp.tft_register_stop_handler(stop)
ttp.tft_register_clean_handler(clean)
ttp.tft_register_rebuild_group_handler(rebuild)
ttp.tft_register_repair_handler(repair)
ttp.tft_register_rollback_handler(rollback)
ttp.tft_register_save_ckpt_handler(save)
ttp.tft_register_rename_handler(rename)
ttp.tft_register_exit_handler(leave)
ttp.tft_set_optimizer_replica(
    rank, [{"type": 1, "rank_list": mine, "replica_cnt": len(mine), "replica_shift": 0}]
)
while True:
    try:
        if not ready:
            ready = True
            strike("replacement", 0)
            raise RuntimeError("ARF FINISH")
        train()
        break
    except RuntimeError as error:
        text = str(error)
    found = [named for words, named in STATES.items() if words in text]
    ttp.tft_report_error((found or [ReportState.RS_UNKNOWN])[0].value)
    action = Action(ttp.tft_wait_next_action())
    note("action", action=action.value, type=ttp.tft_get_repair_type())
    if action is Action.EXIT:
        sys.exit(2)
    state.step = state.drawn = ttp.tft_get_repair_step()
    note("train", step=state.step)
note("returned")
(directory / f"final-{rank}.hex").write_text(state.numbers.tobytes().hex())
ttp.tft_destroy_processor()
