"""
A program written for MindIO that trains numbers instead of a model. It imports nothing of tft.

    program.py PORT RING DIRECTORY STEPS OPTIONS

The variable RANK holds the rank, as launchers set it. The program writes its losses, the calls of
its functions and its last checkpoint into DIRECTORY. OPTIONS is JSON:

- `faults`: a list of [rank, step, where, text]; each fault happens once, and faults of one step and
  place happen together. `where` is `loop` (before the all-reduce), `summed` (after it) or `update`
  (after half of the numbers have changed). In a replacement, `replaced` means before it is ready.
  Step 0 means any step after a file `strike` exists. The text `kill` kills the process and `hang`
  blocks for ever. A text that begins with the name of an exception raises this exception; any other
  text raises a RuntimeError.
- `without`: names of functions that are not registered.
- `raises`: by function, the rank whose function raises. `raises_once`: the same, but only at the
  first call. `raises_after`: a file; the function of `raises_once` waits for it before it raises.
- `clean`: by rank, the result of its clean function; a list gives one result per call. `discards`:
  the numbers are lost when memory is lost and the result is 0.
- `uce`: whether devices with lost memory are repaired. `zit`: whether the job may continue with
  fewer ranks. `arf`: whether lost ranks are replaced.
- `asks`: the program asks for the step to continue from. `ready`: a replacement reports that it is
  ready `once` or `always`.
- `early`: by rank, the step after which the rank returns; the ranks then train without an
  all-reduce.
- `orchestrated`: rank 0 registers the orchestrator of `stub.py`; `choices` are its planned choices.
- `pattern`: [text, name of a state, answer of the handler], for a registered exception handler.
- `done`: the program trains until a file of that name exists, and a few steps more. `warms`: a
  replacement is ready when a file of that name exists.
- `skip`: the step that is counted twice. `pace`: the seconds that a step waits.
- `tls`: the TLS description; TLS is off without it.
- `keep`: the number of steps between the program's own checkpoints. The repair function loads one
  and reports its step. `finds`: by rank, the step that the rank loads instead of the newest; 0
  means that it does not report the step.
- `loop`: the program has its own loop, as MindSpore does.
- `broken`: the text of the error after other ranks are gone, instead of FORCE STOP.
- `device`: the program has a stand-in for torch_npu with one current device per thread; the rank is
  its device.
- `swaps`: the rollback function replaces the first entry of the list of arguments by the step.
"""

import array
import json
import math
import os
import select
import signal
import sys
import threading
import time
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mindio_ttp import framework_ttp as ttp
from mindio_ttp.controller_ttp import tft_init_controller, tft_start_controller

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
RAISED: dict[str, type[BaseException]] = {
    "ValueError": ValueError, "KeyboardInterrupt": KeyboardInterrupt, "SystemExit": SystemExit,
}  # fmt: skip
TLS: dict[str, Any] = {"enable_tls": "tls" in options, "tls_info": options.get("tls", "")}
early: dict[str, int] = options.get("early", {})
groups: list[dict[str, Any]] = options.get("groups") or [
    {"rank_list": list(range(world)), "replica_cnt": world, "replica_shift": 0}
]


class State:
    """
    The state of the training in this process.
    """

    numbers = array.array("d", [0.0] * 100)
    step = 0
    drawn = 0
    member: Member | None = None
    world = world
    """The number of ranks that train now."""
    stopped = False
    """This rank must not wait in an all-reduce, neither now nor later."""


state = State()


class Npu(threading.local):
    """
    A stand-in for `torch.npu`, with one current device per thread. A new thread begins at device 0.
    """

    device = 0

    def current_device(self) -> int:
        """
        Return the device of the calling thread.
        """
        return self.device

    def set_device(self, device: int) -> None:
        """
        Set the device of the calling thread.
        """
        self.device = device


npu = Npu()
if options.get("device"):
    torch = types.ModuleType("torch")
    torch.npu = npu  # type: ignore[attr-defined]  # torch_npu adds it
    sys.modules["torch"] = torch
    npu.set_device(rank)


def note(what: str, **facts: Any) -> None:
    """
    Append an event to this rank's file of calls.
    """
    if options.get("device"):
        facts["device"] = npu.current_device()
    with (directory / f"calls-{rank}.jsonl").open("a") as file:
        file.write(json.dumps({"what": what, "pid": os.getpid(), **facts}) + "\n")


def strike(where: str) -> None:
    """
    Carry out the fault that `faults` plans for this rank, step and place, if any.
    """
    for place, (whom, step, at, text) in enumerate(faults):
        mark = directory / f"struck-{place}"
        now = state.step + 1 if step or not (directory / "strike").exists() else 0
        if (whom, step, at) == (rank, now, where) and once(mark):
            # ranks with a fault at the same place fail together, however busy the machine is
            there = [n for n, (_, *when, _) in enumerate(faults) if when == [step, at]]
            while not all((directory / f"struck-{n}").exists() for n in there):
                time.sleep(0.005)
            if text == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if text == "hang":
                threading.Event().wait()
            raise RAISED.get(text.partition(" ")[0], RuntimeError)(text)


def fail(name: str) -> None:
    """
    Raise an `OSError` if the options plan a failure of the function `name` on this rank.
    """
    raised = directory / f"raised-{name}-{rank}"
    if options.get("raises_once", {}).get(name) == rank and once(raised):
        while "raises_after" in options and not (directory / options["raises_after"]).exists():
            select.select([], [], [], 0.002)
        raise OSError(f"{name} of rank {rank} cannot, this once")
    if options.get("raises", {}).get(name) == rank:
        raise OSError(f"{name} of rank {rank} cannot")


def stop(args: Any, ctx: Any) -> None:
    """
    Stop handler: interrupt the all-reduce that this rank waits in.
    """
    note("stop", type=ttp.tft_get_repair_type())
    fail("stop")
    state.stopped = True
    if state.member is not None:
        state.member.shut()


def clean(uce: bool, args: Any, ctx: Any) -> int:
    """
    Clean handler: return the planned result; the program has nothing to clean.
    """
    note("clean", uce=uce, type=ttp.tft_get_repair_type())
    fail("clean")
    state.stopped = False
    said = options.get("clean", {}).get(str(rank), 0)
    result = int(said.pop(0) if len(said) > 1 else said[0]) if isinstance(said, list) else int(said)
    if uce and result == 0 and options.get("discards"):
        state.numbers[:] = array.array("d", [math.nan] * len(state.numbers))
    return result


def rebuild(fault_ranks: list[int], args: Any, ctx: Any) -> None:
    """
    Rebuild handler: only record the call, because the loop forms the groups itself.
    """
    note("rebuild", ranks=fault_ranks)
    fail("rebuild_group")


def repair(
    step: int, need_rebuild: bool, error_ranks: list[int], info: dict[str, Any], args: Any, ctx: Any
) -> None:
    """
    Repair handler: load the program's own checkpoint, or move the numbers through a named pipe.
    """
    note("repair", step=step, need_rebuild=need_rebuild, error_ranks=error_ranks, **info)
    fail("repair")
    kind = ttp.RepairType(info["repair_type"])
    if kind in (ttp.RepairType.RT_LOAD_CKPT, ttp.RepairType.RT_LOAD_REBUILD):
        return load(step)
    for source, destination, group in zip(info["src"], info["dst"], info["type"], strict=True):
        pipe = directory / f"pipe-{source}-{destination}-{group}"
        with suppress(FileExistsError):
            os.mkfifo(pipe)
        if kind is ttp.RepairType.RT_SEND:
            send(pipe)
        else:
            receive(pipe)
    (directory / f"repaired-{rank}").touch()


def send(pipe: Path) -> None:
    """
    Write the numbers into the pipe once the receiver has opened it. Raises if `stop` is called
    first.
    """
    while not state.stopped:
        with suppress(OSError):
            end = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            os.set_blocking(end, True)
            with os.fdopen(end, "wb") as file:
                file.write(state.numbers.tobytes())
            return
        select.select([], [], [], 0.002)
    raise RuntimeError("FORCE STOP: the receiver is not waited for")


def receive(pipe: Path) -> None:
    """
    Read the numbers from the pipe. Raises if `stop` is called before all numbers have come.
    """
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        found = b""
        while len(found) < len(state.numbers) * state.numbers.itemsize:
            if state.stopped:
                raise RuntimeError("FORCE STOP: the sender is not waited for")
            with suppress(BlockingIOError):
                found += os.read(end, 4096)
            select.select([], [], [], 0.002)
        state.numbers[:] = array.array("d", found)
    finally:
        os.close(end)


def kept(step: int, whom: int) -> Path:
    """
    Return the file of rank `whom` in the program's own checkpoint of `step`.
    """
    return directory / f"kept-{step}-{whom}"


def keep(step: int) -> None:
    """
    Write this rank's file of the program's own checkpoint. The file appears only when it is
    complete.
    """
    beside = directory / f"beside-{rank}"
    beside.write_bytes(state.numbers.tobytes())
    beside.replace(kept(step, rank))


def load(last: int) -> None:
    """
    Load the newest own checkpoint up to step `last` that all ranks have written, and report its
    step.
    """
    ranks = range(world)
    whole = [n for n in range(1, last + 1) if all(kept(n, each).exists() for each in ranks)]
    found = options.get("finds", {}).get(str(rank), max(whole))
    state.numbers[:] = array.array("d", kept(found or max(whole), rank).read_bytes())
    if found:
        ttp.tft_report_load_ckpt_step(found)


def rollback(step: int, args: Any, ctx: Any) -> None:
    """
    Rollback handler: continue from the end of `step`.
    """
    note("rollback", step=step)
    fail("rollback")
    if options.get("swaps"):
        args[0] = step
    state.stopped = False
    state.step = state.drawn = step


def shrink(group: list[int], members: list[int], args: Any, params: str) -> None:
    """
    Downgrade handler: continue with `members` only, and draw the data of the interrupted step
    again.

    The loop itself forms the smaller group.
    """
    note("zit_downgrade_rebuild", group=group, members=members, params=params)
    fail("zit_downgrade_rebuild")
    state.stopped = False
    state.world, state.drawn = len(members), state.step


def grow(fault_ranks: list[int], args: Any, params: str) -> None:
    """
    Upgrade handler: continue with all ranks again. The loop itself forms the group.
    """
    note("zit_upgrade_rebuild", ranks=fault_ranks, params=params)
    fail("zit_upgrade_rebuild")
    state.world = world


def bring(
    step: int, need_rebuild: bool, ranks: list[int], info: dict[str, Any], args: Any, params: str
) -> None:
    """
    Repair handler of an upgrade: do what `repair` does.
    """
    note("zit_upgrade_repair", params=params)
    repair(step, need_rebuild, ranks, info, args, None)


def bring_back(step: int, args: Any, params: str) -> None:
    """
    Rollback handler of an upgrade: continue from the end of `step`.
    """
    note("zit_upgrade_rollback", params=params)
    fail("zit_upgrade_rollback")
    state.stopped = False
    state.step = state.drawn = step


def save(step: int, info: list[dict[str, Any]], args: Any, ctx: Any) -> None:
    """
    Save handler: write this rank's numbers.

    MindIO calls this on the first ranks that together hold a complete copy.
    """
    note("save", step=step, info=info)
    fail("save_ckpt")
    (directory / f"saved-{rank}.bin").write_bytes(state.numbers.tobytes())


def rename(step: int, args: Any) -> None:
    """
    Rename handler: record the step as the latest checkpoint, after all ranks have saved.
    """
    note("rename", step=step)
    fail("rename")
    (directory / "latest").write_text(str(step))


def leave(ctx: Any) -> None:
    """
    Exit handler: record that the job is over for this rank.
    """
    note("exit")


desk = Desk(directory, rank, early.get(str(rank), steps), options, note)


def draw() -> float:
    """
    Return the next number of this rank's data.
    """
    state.drawn += 1
    return (rank + 1) * 0.37 + state.drawn * 0.11


def train(first: int) -> str:
    """
    Train until the last step; each step adds up one number per rank.
    """
    note("train", step=state.step, first=first)
    if ttp.tft_is_reboot_node():
        strike("replaced")
        while "warms" in options and not (directory / options["warms"]).exists():
            time.sleep(0.02)
    if options.get("asks"):
        state.step = state.drawn = ttp.tft_get_repair_step()
    ready = directory / f"ready-{os.getpid()}"
    always = options.get("ready") == "always"
    if ttp.tft_is_reboot_node() and (always or not ready.exists()):
        ready.touch()
        raise RuntimeError("ARF FINISH")
    state.member = None if early else Member(rank, ring, state.world)
    if state.member is not None:
        try:
            if state.stopped:
                raise ConnectionError("there is nobody to wait for")
            state.member.join()
        except ConnectionError as error:
            raise RuntimeError(f"FORCE STOP: {error}") from error
    while not desk.is_last(state.step):
        time.sleep(options.get("pace", 0.0))
        strike("loop")
        loss = draw() + state.numbers[0]
        with (directory / f"losses-{rank}.jsonl").open("a") as file:
            file.write(json.dumps([state.step + 1, loss.hex()]) + "\n")
        try:
            total = loss if state.member is None else state.member.add(loss)
        except ConnectionError as error:
            raise RuntimeError(f"{options.get('broken', 'FORCE STOP')}: {error}") from error
        strike("summed")
        ttp.tft_start_updating_os()
        for index in range(len(state.numbers)):
            if index == len(state.numbers) // 2:
                strike("update")
            state.numbers[index] = total / (index + 1)
        state.step += 1 + (state.step + 1 == options.get("skip"))
        ttp.tft_end_updating_os(state.step)
        if "keep" in options and not state.step % options["keep"]:
            keep(state.step)
        desk.obey()
        ttp.tft_pause_train(state.step)
    return "trained"


def loop(first: int) -> str:
    """
    Train, and begin again after every incident, as MindSpore's own loop does.
    """
    states = {
        "UCE": ttp.ReportState.RS_UCE, "ARF FINISH": ttp.ReportState.RS_PREREPAIR_FINISH,
        "STEP FINISH": ttp.ReportState.RS_STEP_FINISH,
    }  # fmt: skip
    while True:
        try:
            return train(first)
        except RuntimeError as error:
            known = [state for text, state in states.items() if text in str(error)]
            ttp.tft_report_error([*known, ttp.ReportState.RS_NORMAL][0].value)
            if ttp.tft_wait_next_action() == ttp.Action.EXIT.value:
                raise
            assert ttp.tft_wait_repair_action() == ttp.Action.RETRY.value


if rank == 0 and not os.environ.get("MINDX_TASK_ID"):
    tft_init_controller(rank, world, False, enable_arf=True, enable_zit=options.get("zit", False))
    if options.get("orchestrated"):
        Stub(note, options.get("choices", {})).register()
    tft_start_controller("127.0.0.1", port, **TLS)
ttp.tft_init_processor(
    rank, world, False, **TLS,
    enable_uce=options.get("uce", True), enable_arf=options.get("arf", True),
    enable_zit=options.get("zit", False),
)  # fmt: skip
ttp.tft_start_processor("127.0.0.1", port)
master = os.environ.get("MASTER_PORT")
note("started", reboot=ttp.tft_is_reboot_node(), type=ttp.tft_get_reboot_type(), master=master)
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "stop": stop, "clean": clean, "rebuild_group": rebuild, "repair": repair, "rollback": rollback,
    "save_ckpt": save, "rename": rename, "exit": leave, "zit_downgrade_rebuild": shrink,
    "zit_upgrade_rebuild": grow, "zit_upgrade_repair": bring, "zit_upgrade_rollback": bring_back,
}  # fmt: skip
for name, function in FUNCTIONS.items():
    if name not in options.get("without", []):
        getattr(ttp, f"tft_register_{name}_handler")(function)
if "pattern" in options:
    text, kind, says = options["pattern"]
    ttp.tft_register_exception_handler(text, kind, lambda _: says)
mine = [group for group in groups if rank in group["rank_list"]]
ttp.tft_set_optimizer_replica(rank, mine)
said = loop(0) if options.get("loop") else ttp.tft_exception_handler(train)(0)
note("returned", said=said)
(directory / f"final-{rank}.hex").write_text(state.numbers.tobytes().hex())
ttp.tft_destroy_processor()
