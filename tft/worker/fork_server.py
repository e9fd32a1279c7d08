"""
The fork server: `python -m tft.worker.fork_server ADAPTOR FD`. The agent of a node runs one.

The fork server imports once all modules that every rank needs, and modules of plugins that permit
it (`tft.plugins.PRELOADED`). Then it forks a process whenever the agent needs one: for a rank, for
a warm process, or for the rendezvous store.

A fork copies only one thread, so the fork server must have only one thread. Some imports start
others, for example numpy's BLAS library if OMP_NUM_THREADS is more than 1. Then the fork server
reports the threads and ends, and the agent starts ranks without a fork server.

A forked process becomes a child of the agent: it is forked through an intermediate process that
ends at once, and the agent adopts orphans (as a subreaper). The forked process then waits until the
agent sends its task. It ends if the agent closes the connection without a task.
"""

import gc
import multiprocessing.process
import os
import select
import socket
import sys

from tft.config import replace_environment
from tft.errors import UsageError
from tft.forked_task import ANOTHER, READY, ForkedTask, introduce, take_task
from tft.parent_death import die_with, die_with_parent


def main() -> None:
    """
    Fork processes for the agent at the other end of FD, until the agent has ended.

    In a forked process, do the task that the agent sends. If the task is a rank or a warm process,
    `main` returns when the script has ended, and the process ends like an ordinary Python. If the
    task is the rendezvous store, `main` never returns.
    """
    die_with_parent()
    agent = os.getppid()
    adaptor, descriptor = sys.argv[1:]

    # import these modules only now: the imports are slow, and `die_with_parent` must be called
    # first
    # imports make hardly any garbage, and collecting it would take a tenth of their time, so switch
    # the garbage collection off
    gc.disable()
    from tft.plugins import preload_plugins
    from tft.worker.launch import launch, preload

    with socket.socket(fileno=int(descriptor)) as door:
        try:
            preload(adaptor)
        # no traceback: the ranks start without a fork server, and report the same error themselves
        except UsageError as refused:
            sys.exit(f"tft: {refused}")
        preload_plugins()
        import tft.worker.joining  # noqa: F401 (`tft.init` imports this when it is first used)
        from tft.worker.store import serve

        threads = os.listdir("/proc/self/task")
        if len(threads) > 1:
            door.send(
                f"the process has {len(threads)} threads after the import of the adaptor "
                f"{adaptor!r} and of the modules in the entry point group tft.preload, "
                "and a process with threads cannot be forked safely".encode()
            )
            return
        # without `gc.freeze`, the first garbage collection in a forked process would write to all
        # memory that the forked process shares with this process, and so copy that memory
        gc.freeze()
        gc.enable()
        door.send(READY)
        forked = _fork_for(door, agent)
    if forked:
        task = take_task(forked)
        if task is None:
            # the agent has sent no task: end without Python's cleanup, because this process has not
            # started anything yet
            os._exit(0)
        _take_on(task)
        if task.work == "warm":
            with forked:
                launch(task.arguments, warm=forked)
            return
        forked.close()
        if task.work == "store":
            adaptor, host = task.arguments
            serve(adaptor, host, *task.descriptors)
        launch(task.arguments)


def _fork_for(door: socket.socket, agent: int) -> socket.socket | None:
    """
    Fork a process whenever the agent asks for one.

    Returns None in the fork server, when the agent has gone. In a forked process, returns the
    socket on which the process will receive its task.
    """
    while door.recv(len(ANOTHER)):
        if _fork():
            die_with(agent)
            os.setsid()
            return introduce(door)
    return None


def _fork() -> bool:
    """
    Fork a process that does not stay a child of this process: the agent adopts it. Return True in
    the new process, and False in this one.

    Exits if the fork fails.
    """
    between = os.fork()
    if between:
        _, status = os.waitpid(between, 0)
        if status:
            # exit instead of raising an exception: the agent notices the end of the fork server,
            # and starts ranks without it
            sys.exit("tft: the fork server could not fork a process")
        return False
    try:
        ending = os.pidfd_open(os.getpid())
        if os.fork():
            os._exit(0)
    except OSError:
        os._exit(1)
    # wait until the intermediate process has ended: this process is then a child of the agent
    gone = select.poll()
    gone.register(ending, select.POLLIN)
    gone.poll()
    os.close(ending)
    return True


def _take_on(task: ForkedTask) -> None:
    """
    Give this forked process the output and environment of its task, and random seeds of its own.

    The process then behaves like a process that the agent itself has started, and shares nothing
    with other forked processes. Its signal handlers are those of an ordinary Python, because the
    fork server has not changed them.
    """
    for stream in (1, 2):
        os.dup2(task.output, stream)
    os.close(task.output)
    replace_environment(task.variables())
    # only numpy needs new random seeds: Python reseeds `random` after a fork by itself
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed()
    multiprocessing.process.current_process().authkey = os.urandom(32)


if __name__ == "__main__":
    main()
