"""
Rank processes, forked from one that has imported torch already, and a rendezvous store.
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
    Where processes come from: the imports are paid for once.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.adaptors.preloaded"])
    return context


@pytest.fixture(scope="session")
def store(context: ForkServerContext) -> Iterator[int]:
    """
    The port of a store.
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
    Starts a rank's process; what is left of them at the end of the test is killed.
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
    Ranks, and the groups they form.
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
        A fresh process for a rank, with its state adopted.
        """
        process = self._start()
        process.tell("adopt", rank, self._world, self._recipe)
        return process

    def replace(self, rank: int) -> Rank:
        """
        A fresh process for a rank whose process is killed.
        """
        self.ranks[rank].kill()
        self.ranks[rank] = self.join(rank)
        sound(self.ranks[rank].hear())
        return self.ranks[rank]

    def repair(self, *lost: int) -> None:
        """
        They take each of their shards from a rank that still holds it.
        """
        for rank in lost:
            for shard, ranks in self.ranks[rank].ask("shards", self._world).items():
                holder = next(other for other in ranks if other not in lost)
                self.ranks[rank].ask("take", *self.ranks[holder].ask("give", shard))

    def lose(self, victims: tuple[int, ...], completed: int) -> None:
        """
        The victims are killed in the middle of the step after `completed` steps, and replaced.
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
        All have adopted.
        """
        for rank in self.ranks:
            sound(rank.hear())
        return self

    def form(self) -> None:
        """
        All form a group of a new name.
        """
        name = next(Job._names)
        for number, rank in enumerate(self.ranks):
            rank.tell("form", name, self._store, number, len(self.ranks))
        for rank in self.ranks:
            sound(rank.hear())

    def all(self, request: str, *arguments: object) -> list[object]:
        """
        The same of all ranks at once.
        """
        for rank in self.ranks:
            rank.tell(request, *arguments)
        return [sound(rank.hear()) for rank in self.ranks]

    def begin(self) -> "Job":
        """
        Up to the first step.
        """
        self.form()
        self.all("build")
        self.all("roll_back", 0, None)
        return self


NewJob = Callable[..., Job]


@pytest.fixture
def job(start: Start, store: int) -> NewJob:
    """
    Makes a job of some ranks that are ready to train.
    """

    def job(world: int, recipe: Recipe | None = None) -> Job:
        return Job(start, store, world, recipe or Recipe()).adopted().begin()

    return job
