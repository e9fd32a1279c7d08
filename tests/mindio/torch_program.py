"""
A program written for MindIO on torch.distributed that forms new process groups after a repair.

    torch_program.py PORT RING DIRECTORY STEPS OPTIONS

In each step every rank all-reduces a tensor over all ranks and over its half of them.
OPTIONS["kills"] is a list of [rank, step]. Each entry kills the rank once, before the all-reduce of
this step. The program writes the names of its groups and the final tensor into DIRECTORY.
"""

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mindio_ttp import framework_ttp as ttp

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
port, directory, steps = int(sys.argv[1]), Path(sys.argv[3]), int(sys.argv[4])
kills: list[list[int]] = json.loads(sys.argv[5]).get("kills", [])
half = [each for each in range(world) if each % 2 == rank % 2]


class State:
    """
    The state of the training in this process, and its process groups.
    """

    value = torch.zeros(4, dtype=torch.float64)
    step = 0
    groups: tuple[Any, ...] = ()
    """The group of all ranks, the group of this rank's half, and a second group of this half."""
    links: frozenset[int] = frozenset()
    """The socket descriptors of the connections of these groups."""


state = State()


def sockets() -> set[int]:
    """
    Return the descriptors of this process's connections to other ranks, without connections to a
    store.
    """
    found = set()
    for place in Path("/proc/self/fd").iterdir():
        with suppress(OSError), socket.socket(fileno=os.dup(int(place.name))) as made:
            named = made.getpeername()
            if isinstance(named, tuple) and named[1] != int(os.environ["MASTER_PORT"]):
                found.add(int(place.name))
    return found


def form() -> None:
    """
    Form the process groups; torch chooses their names.
    """
    before = sockets()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    halves = [dist.new_group([r for r in range(world) if r % 2 == parity]) for parity in (0, 1)]
    alone = dist.new_group(half, use_local_synchronization=True)
    state.groups = (dist.group.WORLD, halves[rank % 2], alone)
    state.links = frozenset(sockets() - before)
    names = [str(getattr(group, "group_name", "")) for group in state.groups]
    with (directory / f"names-{rank}.jsonl").open("a") as file:
        file.write(json.dumps(names) + "\n")


def stop(args: Any, ctx: Any) -> None:
    """
    Stop handler: close the groups' connections, so that a thread that waits in a group raises.
    """
    for link in state.links:
        with suppress(OSError), socket.socket(fileno=os.dup(link)) as made:
            made.shutdown(socket.SHUT_RDWR)


def rebuild(fault_ranks: list[int], args: Any, ctx: Any) -> None:
    """
    Rebuild handler: form new groups, on survivors and replacements alike.
    """
    if dist.is_initialized():
        state.groups = ()
        dist.destroy_process_group()
    form()


def repair(
    step: int, need_rebuild: bool, error_ranks: list[int], info: dict[str, Any], args: Any, ctx: Any
) -> None:
    """
    Repair handler: move the state within a group of all ranks that take part, as MindSpeed-LLM
    does.
    """
    group = dist.new_group(info["rank_list"], use_local_synchronization=True)
    for source, destination in zip(info["src"], info["dst"], strict=True):
        if source == rank:
            dist.send(state.value, destination, group=group)
        else:
            dist.recv(state.value, source, group=group)


def rollback(step: int, args: Any, ctx: Any) -> None:
    """
    Rollback handler: continue from the end of `step`.
    """
    state.step = step


def train() -> None:
    """
    Train the remaining steps; each all-reduces a tensor over all ranks and over a half.
    """
    if ttp.tft_is_reboot_node() and not state.groups:
        raise RuntimeError("ARF FINISH")
    if not state.groups:
        form()
    while state.step < steps:
        for place, (whom, step) in enumerate(kills):
            mark = directory / f"struck-{place}"
            if (whom, step) == (rank, state.step + 1) and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        drawn = torch.full((4,), 0.1 * (rank + 1) + 0.01 * state.step, dtype=torch.float64)
        try:
            dist.all_reduce(drawn, group=state.groups[0])
            part = drawn * (1 + rank % 2)
            dist.all_reduce(part, group=state.groups[1])
            dist.all_reduce(part, group=state.groups[0])
        except RuntimeError as error:
            raise RuntimeError(f"FORCE STOP: {error}") from error
        ttp.tft_start_updating_os()
        state.value.add_(part)
        state.step += 1
        ttp.tft_end_updating_os(state.step)


if rank == 0:
    ttp.tft_init_controller(rank, world, False, enable_arf=True)
    ttp.tft_start_controller("127.0.0.1", port, enable_tls=False)
ttp.tft_init_processor(rank, world, False, enable_tls=False, enable_arf=True)
ttp.tft_start_processor("127.0.0.1", port)
ttp.tft_register_stop_handler(stop)
ttp.tft_register_clean_handler(lambda uce, args, ctx: 0)
ttp.tft_register_rebuild_group_handler(rebuild)
ttp.tft_register_repair_handler(repair)
ttp.tft_register_rollback_handler(rollback)
ttp.tft_exception_handler(train)()
final = state.value.numpy().tobytes().hex()
(directory / f"final-{rank}.hex").write_text(final)
ttp.tft_destroy_processor()
