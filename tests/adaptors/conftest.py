"""
Fixtures of the adaptor tests: rank processes, a rendezvous store, and jobs made of both.

Rank processes are forked from a process that has already imported torch.
"""

import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext

import pytest
from tft_pytorch.store import serve

from tests.adaptors.ranks import Rank, Recipe, sound

Start = Callable[[], Rank]


@pytest.fixture(scope="session")
def context() -> ForkServerContext:
    """
    Return the `multiprocessing` context that forks all test processes from a fork server.

    The fork server imports torch once, so each test process starts quickly.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.adaptors.preloaded"])
    return context


@pytest.fixture(scope="session")
def store(context: ForkServerContext) -> Iterator[int]:
    """
    Run a rendezvous store in a separate process and yield its port.
    """
    here, there = context.Pipe()
    process = context.Process(target=serve, args=("127.0.0.1", 0, there.send), daemon=True)
    process.start()
    assert here.poll(30.0)
    yield here.recv()
    process.kill()
    process.join()


@pytest.fixture
def start(context: ForkServerContext) -> Iterator[Start]:
    """
    Yield a function that starts the process of one rank.

    At the end of the test, all processes that it started are killed.
    """
    started: list[Rank] = []

    def start() -> Rank:
        started.append(Rank(context))
        return started[-1]

    yield start
    for rank in started:
        rank.close()


class Job:
    """
    The rank processes of one job, and the process groups that they form.
    """

    _names = (f"group-{number}" for number in itertools.count())

    def __init__(self, start: Start, store: int, world: int, recipe: Recipe) -> None:
        self._start = start
        self._store = store
        self._recipe = recipe
        self._world = world
        self.ranks = [self.join(rank) for rank in range(world)]

    def join(self, rank: int) -> Rank:
        """
        Start a process for `rank` and ask it to adopt a fresh training state. Do not wait for the
        answer.
        """
        process = self._start()
        process.tell("adopt", rank, self._world, self._recipe)
        return process

    def replace(self, rank: int) -> Rank:
        """
        Kill the process of `rank`, start a new one, and return the new one after it has adopted its
        state.
        """
        self.ranks[rank].kill()
        self.ranks[rank] = self.join(rank)
        sound(self.ranks[rank].hear())
        return self.ranks[rank]

    def repair(self, *lost: int) -> None:
        """
        Copy every shard of the ranks in `lost` from a rank that still holds the shard.
        """
        for rank in lost:
            for shard, ranks in self.ranks[rank].ask("shards", self._world).items():
                holder = next(other for other in ranks if other not in lost)
                self.ranks[rank].ask("take", *self.ranks[holder].ask("give", shard))

    def lose(self, victims: tuple[int, ...], completed: int) -> None:
        """
        Kill the `victims` in the middle of the step after `completed` steps, and recover the job.

        New processes replace the victims and copy their shards from other ranks. Then all ranks
        roll back to the end of step `completed`.
        """
        local_state = {
            victim: self.ranks[victim].ask("local_state", completed) for victim in victims
        }
        self.all("interrupt")
        for victim in victims:
            self.replace(victim)
        self.all("clear")
        self.repair(*victims)
        self.form()
        self.all("build")
        for number, rank in enumerate(self.ranks):
            rank.ask("roll_back", completed, local_state.get(number))

    def adopted(self) -> "Job":
        """
        Wait until all ranks have adopted their training state, and return the job.
        """
        for rank in self.ranks:
            sound(rank.hear())
        return self

    def form(self) -> None:
        """
        Let all ranks form a process group under a name that was not used before.
        """
        name = next(Job._names)
        for number, rank in enumerate(self.ranks):
            rank.tell("form", name, self._store, number, len(self.ranks))
        for rank in self.ranks:
            sound(rank.hear())

    def all(self, request: str, *arguments: object) -> list[object]:
        """
        Send the same request to all ranks at once, and return their answers by rank.
        """
        for rank in self.ranks:
            rank.tell(request, *arguments)
        return [sound(rank.hear()) for rank in self.ranks]

    def begin(self) -> "Job":
        """
        Form the process groups, rebuild the models, and roll back to step 0, so that training can
        begin. Return the job.
        """
        self.form()
        self.all("build")
        self.all("roll_back", 0, None)
        return self


NewJob = Callable[..., Job]


@pytest.fixture
def job(start: Start, store: int) -> NewJob:
    """
    Return a function that makes a job of `world` ranks that are ready to train.
    """

    def job(world: int, recipe: Recipe | None = None) -> Job:
        return Job(start, store, world, recipe or Recipe()).adopted().begin()

    return job
