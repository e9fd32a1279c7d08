"""
The fork server: `python -m tft.worker.fork_server ADAPTOR FD`, one per node, run by an agent. It imports
once what every rank needs, and then forks a process whenever the agent wants one for a rank.

A fork copies one thread only, so there must be only one: where the imports have started others
(a BLAS with a pool, as numpy's when OMP_NUM_THREADS is more than 1), the fork server says so and ends,
and ranks are started without it.

A forked process becomes the agent's child: the process between it and the fork server ends at once,
and the agent takes in orphans. It waits for its task, for which the agent may never have a use.
"""

import gc
import multiprocessing.process
import os
import select
import socket
import sys

from tft.config import descriptor_variables, replace_environment
from tft.errors import UsageError
from tft.parent_death import ANOTHER, READY, Task, die_with, die_with_parent, introduce, take_task


def main() -> None:
    """
    Fork for the agent at the other end of FD until it is gone. Returns in the forked processes
    too, with the script at its end: they end as every Python does.
    """
    die_with_parent()
    agent = os.getppid()
    adaptor, descriptor = sys.argv[1:]

    from tft.worker.launch import launch, preload  # late: it must be tied to the agent before

    with socket.socket(fileno=int(descriptor)) as door:
        try:
            preload(adaptor)
        except UsageError as refused:  # each rank is going to say so, too
            sys.exit(f"tft: {refused}")
        import tft.worker.session  # noqa: F401 (what `tft.init` imports when it is first used)

        threads = os.listdir("/proc/self/task")
        if len(threads) > 1:
            door.send(f"the adaptor {adaptor!r} has {len(threads)} threads once loaded".encode())
            return
        gc.freeze()  # else the first collection of a rank copies every page there is
        door.send(READY)
        forked = _fork_for(door, agent)
    if forked:
        task = take_task(forked)
        forked.close()
        if task is None:
            os._exit(0)  # nothing was begun that an ordinary end would have to finish
        _take_on(task)
        launch(task.arguments)


def _fork_for(door: socket.socket, agent: int) -> socket.socket | None:
    """
    Fork whenever it is asked for: None in the fork server, when the agent has gone; in a forked
    process, where it will be told its task.
    """
    while door.recv(len(ANOTHER)):
        if _fork():
            die_with(agent)
            os.setsid()
            return introduce(door)
    return None


def _fork() -> bool:
    """
    Fork a process that is not a child of this one, True in that process.
    """
    between = os.fork()
    if between:
        _, status = os.waitpid(between, 0)
        if status:
            sys.exit(
                "tft: the fork server could not fork"
            )  # the agent starts the rank itself, or not
        return False
    try:
        ending = os.pidfd_open(os.getpid())
        if os.fork():
            os._exit(0)
    except OSError:
        os._exit(1)
    # not a child of the agent before the process between has gone
    gone = select.poll()
    gone.register(ending, select.POLLIN)
    gone.poll()
    os.close(ending)
    return True


def _take_on(task: Task) -> None:
    """
    Have what a process that the agent itself had started would have, and nothing in common with
    the others forked here. Signals are as Python had them: the fork server has changed none.
    """
    for stream in (1, 2):
        os.dup2(task.output, stream)
    os.close(task.output)
    replace_environment(task.environment | descriptor_variables(page=task.page, words=task.words))
    # `random` does this by itself
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed()
    multiprocessing.process.current_process().authkey = os.urandom(32)


if __name__ == "__main__":
    main()
