"""
Processes for the tests of chaos, forked from a process that has imported torch.
"""

import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext, ForkServerProcess

import pytest

from tests.plugins.stage import Scene, play

Start = Callable[[Scene], ForkServerProcess]


@pytest.fixture(scope="session")
def context() -> ForkServerContext:
    """
    Return the context that forks the processes. Imports, including torch's late ones, are done
    once.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "torch.nn.parallel", "torch._dynamo"])
    return context


@pytest.fixture
def start(context: ForkServerContext) -> Iterator[Start]:
    """
    Start processes that play scenes. Processes that are left at the end of the test are killed.
    """
    started: list[ForkServerProcess] = []

    def start(scene: Scene) -> ForkServerProcess:
        process = context.Process(target=play, args=(scene,))
        process.start()
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.join()
        process.close()
