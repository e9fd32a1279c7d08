"""
Processes for the tests of chaos, forked from one that has imported torch already.
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
    Where processes come from: the imports, torch's late ones too, are paid for once.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "torch.nn.parallel", "torch._dynamo"])
    return context


@pytest.fixture
def start(context: ForkServerContext) -> Iterator[Start]:
    """
    Start processes that play; what is left of them at the end of the test is killed.
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
