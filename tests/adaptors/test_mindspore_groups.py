"""
The groups of the adaptor mindspore, over real sockets. They know nothing of MindSpore, and these tests
neither: the ranks are threads here.
"""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy
import pytest
from tft_mindspore import groups
from tft_mindspore.groups import GroupBroken, Groups
from tft_mindspore.store import Store

from tests.e2e.jobs import until
from tft.errors import OrderRefused, UsageError

Ask = Callable[[Groups, int], Any]  # Any: whatever is asked of it returns


@contextmanager
def serving(port: int = 0) -> Iterator[int]:
    """
    A rendezvous store; its port.
    """
    loop = asyncio.new_event_loop()
    opened: list[int] = []
    there = threading.Event()

    def note(taken: int) -> None:
        opened.append(taken)
        there.set()

    async def serve() -> None:
        with ExitStack() as stack:
            stack.callback(there.set)
            await Store().serve("127.0.0.1", port, note)

    task = loop.create_task(serve())

    def live() -> None:
        asyncio.set_event_loop(loop)
        with pytest.raises(asyncio.CancelledError):
            loop.run_until_complete(task)
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    thread = threading.Thread(target=live)
    thread.start()
    assert there.wait(10)
    try:
        yield opened[0]
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()


class Ranks:
    """
    Some ranks, each on a thread of its own.
    """

    def __init__(self, world: int, port: int) -> None:
        self.port = port
        self.ranks = [Groups() for _ in range(world)]
        self.threads = [ThreadPoolExecutor(1) for _ in range(world)]

    def form(self, name: str = "one") -> None:
        """
        All join the group of this name.
        """
        self.all(lambda g, rank: g.form(name, "127.0.0.1", self.port, rank, len(self.ranks)))

    def all(self, ask: Ask) -> list[Any]:  # Any: what it returns
        """
        What comes of it on each.
        """
        asked = [
            thread.submit(ask, group, rank)
            for rank, (thread, group) in enumerate(zip(self.threads, self.ranks, strict=True))
        ]
        return [each.result(30) for each in asked]

    def close(self) -> None:
        """
        Free everything.
        """
        for group in self.ranks:
            group.quiesce()
        for thread in self.threads:
            thread.shutdown()
        for group in self.ranks:
            group.clear()


@pytest.fixture
def port() -> Iterator[int]:
    """
    The port of a store.
    """
    with serving() as port:
        yield port


@pytest.fixture
def together(port: int) -> Iterator[Callable[[int], Ranks]]:
    """
    Makes ranks that have formed a group.
    """
    made: list[Ranks] = []

    def make(world: int) -> Ranks:
        ranks = Ranks(world, port)
        made.append(ranks)
        ranks.form()
        return ranks

    yield make
    for ranks in made:
        ranks.close()


Together = Callable[[int], Ranks]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [0, 1, 7, 100_003])
def test_a_sum_is_taken_in_the_order_of_the_ranks(
    together: Together, world: int, size: int
) -> None:
    """
    When ranks sum arrays, small or cut into stretches, then each has bit for bit what adding them up in the
    order of the ranks gives, in the shapes that were given.
    """
    given = [
        (numpy.random.RandomState(rank).randn(size) * 10.0**rank).astype(numpy.float32)
        for rank in range(world)
    ]
    expected = given[0].copy()
    for each in given[1:]:
        expected += each

    sums = together(world).all(
        lambda g, rank: g.present.sum([given[rank].reshape(1, size), numpy.array(rank)])
    )

    for found, number in sums:
        assert found.shape == (1, size)
        assert found.tobytes() == expected.tobytes()
        assert number == sum(range(world))
        assert number.shape == ()


def test_means_of_gradients_have_the_type_of_the_gradients(together: Together) -> None:
    """
    When types are mixed, then each array comes back in its own, divided by the number of ranks.
    """
    means = together(2).all(
        lambda g, rank: g.present.mean(
            [numpy.full(3, rank + 1, numpy.float16), numpy.full((2, 2), rank, numpy.float64)]
        )
    )

    for half, double in means:
        assert (half.dtype, half.tolist()) == (numpy.float16, [1.5] * 3)
        assert (double.dtype, double.tolist()) == (numpy.float64, [[0.5, 0.5]] * 2)


def test_some_ranks_sum_among_themselves(together: Together) -> None:
    """
    When only some ranks take part in a sum, then the others need not know, and the next sum of all is
    right.
    """

    def ask(g: Groups, rank: int) -> tuple[float, float]:
        pair = (0, 2) if rank in (0, 2) else (1, 3)
        (some,) = g.present.sum([numpy.array([float(rank)])], ranks=pair)
        (every,) = g.present.sum([numpy.array([float(rank)])])
        return some[0], every[0]

    assert together(4).all(ask) == [(2, 6), (4, 6), (2, 6), (4, 6)]


def test_what_is_broadcast_and_gathered_is_what_was_given(together: Together) -> None:
    """
    When one rank broadcasts and all gather, then everybody has the same.
    """

    def ask(g: Groups, rank: int) -> tuple[list[Any], list[bytes]]:
        arrays = [numpy.full(1000, rank, numpy.int32), numpy.full((), rank, numpy.float32)]
        cast = g.present.broadcast(arrays, root=1)
        g.present.barrier()
        return [each.max().item() for each in cast], g.present.gather(b"x" * rank)

    assert together(3).all(ask) == [([1, 1], [b"", b"x", b"xx"])] * 3


def test_ranks_at_different_places_of_the_script_are_told_so(together: Together) -> None:
    """
    When a rank all-reduces something of another size than the others, then that is refused with a sentence, and
    nobody gets a wrong number.
    """
    ranks = together(2)

    def ask(g: Groups, rank: int) -> str:
        with pytest.raises((UsageError, GroupBroken)) as raised:
            g.present.sum([numpy.zeros(10 + rank)])
        g.quiesce()
        return str(raised.value)

    told = ranks.all(ask)
    assert any("is at another place of the script" in words for words in told)


def test_a_rank_that_waits_is_brought_out_from_another_thread(together: Together) -> None:
    """
    When a rank waits for one that does not come, then `quiesce` makes it raise, and so do those it is
    connected with; a group under a new name works.
    """
    ranks = together(3)
    waits = [
        ranks.threads[rank].submit(ranks.ranks[rank].present.sum, [numpy.zeros(9)])
        for rank in (0, 1)
    ]
    assert not any(each.done() for each in waits)
    ranks.ranks[0].quiesce()
    ranks.ranks[0].quiesce()
    for each in waits:
        with pytest.raises(GroupBroken):
            each.result(10)
    with pytest.raises(GroupBroken):
        ranks.ranks[0].present.barrier()

    ranks.all(lambda g, rank: g.clear())
    ranks.form("two")
    sums = ranks.all(lambda g, rank: g.present.sum([numpy.ones(2)])[0].tolist())
    assert sums == [[3, 3]] * 3


def test_whoever_waits_for_a_group_to_be_formed_is_brought_out(port: int) -> None:
    """
    When a member never comes, then `quiesce` ends the waiting of the others, with a negative answer.
    """
    ranks = Ranks(2, port)
    try:
        form = ranks.threads[0].submit(ranks.ranks[0].form, "one", "127.0.0.1", port, 0, 2)
        until(lambda: ranks.ranks[0]._group is not None, "the forming has begun")
        ranks.ranks[0].quiesce()
        with pytest.raises(OrderRefused, match="was cancelled"):
            form.result(10)
        with pytest.raises(GroupBroken, match="there is no group"):
            _ = ranks.ranks[0].present
    finally:
        ranks.close()


def test_a_member_that_came_and_went_is_not_waited_for(port: int) -> None:
    """
    When a member has gone before the group was complete, then one that comes in its place is taken.
    """
    ranks = Ranks(2, port)
    try:
        with socket.create_connection(("127.0.0.1", port)) as gone:
            gone.sendall(b'{"name": "one", "rank": 1, "world": 2, "port": 1}\n')
            gone.shutdown(socket.SHUT_WR)
            assert gone.recv(1) == b""  # the store has seen it go
        ranks.form()
        assert ranks.all(lambda g, rank: g.present.gather(b"here")) == [[b"here"] * 2] * 2
    finally:
        ranks.close()


def test_the_store_refuses_what_it_cannot_read(port: int) -> None:
    """
    When something else speaks to the store, then it is told why it is not answered.
    """
    for words in (b"GET / HTTP/1.1\n", b'{"name": "x", "rank": 4, "world": 2, "port": 1}\n'):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(words)
            assert b"refused" in stranger.recv(4096)


def test_strangers_are_not_let_into_a_group(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    When somebody connects to a member without the token, then it is sent away, and the group is formed.
    """
    seen: list[int] = []
    ask = groups.Group._ask

    def noting(self: groups.Group, store: socket.socket, at: int) -> dict[str, Any]:  # Any: JSON
        with socket.create_connection(("127.0.0.1", at)) as stranger:
            stranger.sendall(b"\0" * 64)
        seen.append(at)
        return ask(self, store, at)

    monkeypatch.setattr(groups.Group, "_ask", noting)
    ranks = Ranks(2, port)
    try:
        ranks.form()
        assert ranks.all(lambda g, rank: g.present.gather(b"") == [b"", b""]) == [True, True]
        assert len(seen) == 2
    finally:
        ranks.close()


def test_a_store_that_comes_up_late_is_waited_for() -> None:
    """
    When the store is being started again, then the ranks wait for it.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = Ranks(2, port)
    asked = [
        ranks.threads[rank].submit(ranks.ranks[rank].form, "one", "127.0.0.1", port, rank, 2)
        for rank in range(2)
    ]
    try:
        with serving(port):
            for each in asked:
                each.result(10)
    finally:
        ranks.close()
