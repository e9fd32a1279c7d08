"""
The process groups of the MindSpore adaptor, over real sockets.

The group code does not import MindSpore, and these tests do not either. Each rank is a thread here.
"""

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy
import pytest
from tft_mindspore import groups
from tft_mindspore.groups import GroupBroken, Groups
from tft_mindspore.step_numbers import Watch
from tft_mindspore.store import Store

from tests.e2e.jobs import until
from tft.errors import OrderRefused, UsageError

Ask = Callable[[Groups, int], Any]  # Any: any result


@contextmanager
def serving(port: int = 0) -> Iterator[int]:
    """
    Run a rendezvous store on a thread during the `with` block, and yield its port.
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
        # members may still be served: their connections must be closed before the loop is
        served = asyncio.all_tasks(loop)
        for each in served:
            each.cancel()
        loop.run_until_complete(asyncio.gather(*served, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    thread = threading.Thread(target=live)
    thread.start()
    assert there.wait(10)
    try:
        yield opened[0]
    finally:
        # asyncio leaks a connection that it accepts while the store ends: after the answer to this
        # one, which is refused, no earlier connection is on its way
        with socket.create_connection(("127.0.0.1", opened[0])) as last:
            last.sendall(b"\n")
            assert b"refused" in last.recv(1 << 16)
        loop.call_soon_threadsafe(task.cancel)
        thread.join()


class Ranks:
    """
    The groups of several ranks, each on its own thread.
    """

    def __init__(self, world: int, port: int) -> None:
        self.port = port
        self.ranks = [Groups() for _ in range(world)]
        self.threads = [ThreadPoolExecutor(1) for _ in range(world)]

    def form(self, name: str = "one") -> None:
        """
        Let all ranks join the group `name`.
        """
        self.all(lambda g, rank: g.form(name, "127.0.0.1", self.port, rank, len(self.ranks)))

    def all(self, ask: Ask) -> list[Any]:  # Any: any result
        """
        Call `ask` for every rank at once, each on its own thread, and return the results.
        """
        asked = [
            thread.submit(ask, group, rank)
            for rank, (thread, group) in enumerate(zip(self.threads, self.ranks, strict=True))
        ]
        return [each.result(30) for each in asked]

    def close(self) -> None:
        """
        Stop all waits, end the threads, and clear the groups.
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
    Yield the port of a running rendezvous store.
    """
    with serving() as port:
        yield port


@pytest.fixture
def together(port: int) -> Iterator[Callable[[int], Ranks]]:
    """
    Return a function that makes a number of ranks that have formed a group.
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
def test_all_reduce_adds_in_the_order_of_the_ranks(
    together: Together, world: int, size: int
) -> None:
    """When ranks all-reduce arrays of any size, then each rank has bit for bit the result of adding
    in the order of the ranks. Each result has the shape of its array."""
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


def test_mean_of_gradients_keeps_the_type_of_each_array(together: Together) -> None:
    """When the arrays of a mean have different types, then each result has the type of its array
    and is divided by the number of ranks."""
    means = together(2).all(
        lambda g, rank: g.present.mean(
            [numpy.full(3, rank + 1, numpy.float16), numpy.full((2, 2), rank, numpy.float64)]
        )
    )

    for half, double in means:
        assert (half.dtype, half.tolist()) == (numpy.float16, [1.5] * 3)
        assert (double.dtype, double.tolist()) == (numpy.float64, [[0.5, 0.5]] * 2)


@pytest.mark.parametrize("kind", [numpy.int32, numpy.uint8, numpy.bool_])
def test_mean_of_integers_is_refused(together: Together, kind: type) -> None:
    """When an array of a mean has integers or booleans, then the call is refused with the place and
    the type of the array, before anything is sent. The group can be used again."""
    ranks = together(2)
    given = [numpy.array([1.0]), numpy.array([1, 0], kind)]

    def ask(g: Groups, rank: int) -> str:
        with pytest.raises(UsageError) as refused:
            g.present.mean(given)
        return f"{refused.value}; {g.present.sum([given[0]])[0].tolist()}"

    name = numpy.dtype(kind).name
    for said in ranks.all(ask):
        assert said.startswith(f"the array at place 1 has the type {name}, which cannot hold an")
        assert said.endswith("; [2.0]")


def test_all_reduce_among_some_ranks_does_not_affect_the_others(together: Together) -> None:
    """When only some ranks take part in an all-reduce, then their result is correct, and so is the
    result of the next all-reduce of all ranks."""

    def ask(g: Groups, rank: int) -> tuple[float, float]:
        pair = (0, 2) if rank in (0, 2) else (1, 3)
        (some,) = g.present.sum([numpy.array([float(rank)])], ranks=pair)
        (every,) = g.present.sum([numpy.array([float(rank)])])
        return some[0], every[0]

    assert together(4).all(ask) == [(2, 6), (4, 6), (2, 6), (4, 6)]


def test_broadcast_and_gather_give_the_same_result_on_all_ranks(together: Together) -> None:
    """When one rank broadcasts and all ranks gather, then all ranks have the same values."""

    def ask(g: Groups, rank: int) -> tuple[list[Any], list[bytes]]:
        arrays = [numpy.full(1000, rank, numpy.int32), numpy.full((), rank, numpy.float32)]
        cast = g.present.broadcast(arrays, root=1)
        g.present.barrier()
        return [each.max().item() for each in cast], g.present.gather(b"x" * rank)

    assert together(3).all(ask) == [([1, 1], [b"", b"x", b"xx"])] * 3


def test_all_reduce_with_different_sizes_is_refused(together: Together) -> None:
    """When a rank all-reduces an array of another size than the other ranks, then all ranks raise
    an error, and its text gives the reason."""
    ranks = together(2)

    def ask(g: Groups, rank: int) -> str:
        with pytest.raises((UsageError, GroupBroken)) as raised:
            g.present.sum([numpy.zeros(10 + rank)])
        g.quiesce()
        return str(raised.value)

    told = ranks.all(ask)
    assert any("is at another place of the script" in words for words in told)


def test_quiesce_from_another_thread_ends_a_waiting_all_reduce(together: Together) -> None:
    """When two ranks wait for a third rank in an all-reduce, then `quiesce` on one of them makes
    both raise. After that the ranks can form a group with a new name."""
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


def test_quiesce_ends_the_wait_for_a_group_to_form(port: int) -> None:
    """When a member never joins a group, then `quiesce` ends the wait of the other member with
    `OrderRefused`."""
    ranks = Ranks(2, port)
    try:
        form = ranks.threads[0].submit(ranks.ranks[0].form, "one", "127.0.0.1", port, 0, 2)
        until(lambda: ranks.ranks[0]._group is not None, "the forming has begun")
        ranks.ranks[0].quiesce()
        with pytest.raises(OrderRefused, match="was cancelled"):
            form.result(10)
        with pytest.raises(GroupBroken, match="there is no group of the ranks now"):
            _ = ranks.ranks[0].present
    finally:
        ranks.close()


def test_member_that_left_before_the_group_formed_is_replaced(port: int) -> None:
    """When a member has left before the group was complete, then a new member with the same rank is
    accepted."""
    ranks = Ranks(2, port)
    try:
        with socket.create_connection(("127.0.0.1", port)) as gone:
            gone.sendall(b'{"name": "one", "rank": 1, "world": 2, "port": 1}\n')
            gone.shutdown(socket.SHUT_WR)
            assert gone.recv(1) == b""  # the store has noticed the end of the connection
        ranks.form()
        assert ranks.all(lambda g, rank: g.present.gather(b"here")) == [[b"here"] * 2] * 2
    finally:
        ranks.close()


def test_store_refuses_an_unreadable_request(port: int) -> None:
    """When the rendezvous store gets a request that it cannot read, then it answers with a refusal."""
    for words in (b"GET / HTTP/1.1\n", b'{"name": "x", "rank": 4, "world": 2, "port": 1}\n'):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(words)
            assert b"refused" in stranger.recv(4096)


def test_connection_without_the_token_is_not_accepted_into_a_group(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a process connects to a member without the group's token, then the connection is closed,
    and the group is formed without it. The process may send something else, reset the connection,
    or send nothing and keep it open."""
    silent: list[socket.socket] = []
    ask = groups.Group._ask

    def noting(self: groups.Group, store: socket.socket, at: int) -> dict[str, Any]:  # Any: JSON
        silent.append(socket.create_connection(("127.0.0.1", at)))
        with socket.create_connection(("127.0.0.1", at)) as stranger:
            stranger.sendall(b"\0" * 64)
        with socket.create_connection(("127.0.0.1", at)) as stranger:
            stranger.sendall(b"\0")
            # closing the socket resets the connection
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return ask(self, store, at)

    monkeypatch.setattr(groups.Group, "_ask", noting)
    ranks = Ranks(2, port)
    try:
        ranks.form()
        assert ranks.all(lambda g, rank: g.present.gather(b"") == [b"", b""]) == [True, True]
        assert len(silent) == 2
        for stranger in silent:
            stranger.settimeout(10)
            with suppress(ConnectionResetError):  # a connection that was never accepted is reset
                assert stranger.recv(1) == b""
            stranger.close()
    finally:
        ranks.close()


def test_ranks_wait_for_a_store_that_starts_late() -> None:
    """When the store starts after the ranks have asked for it, then the ranks wait for the store
    and form their group."""
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


# ---------------------------------------------------------------- numbers of a step


@pytest.mark.parametrize("refusing", [None, 0, 2])
def test_refusal_of_one_rank_reaches_all(together: Together, refusing: int | None) -> None:
    """When one of three ranks refuses, then all ranks know it; when none does, then none knows of a
    refusal."""
    found = together(3).all(lambda g, rank: g.present.agree(rank == refusing))
    assert found == [refusing is not None] * 3


def test_means_are_noted_as_the_gradients_of_the_step(
    together: Together, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When ranks average gradients, then the norm is that of the averages, and the own number of
    the rank is the norm of what it has given. A NaN of one rank is in the norm."""
    one = Watch()
    one.begin()
    monkeypatch.setattr(groups, "watch", one)
    ranks = together(1)
    gradients = [numpy.array([3.0, 0.0], numpy.float32), numpy.array([[4.0]], numpy.float32)]
    ranks.all(lambda g, rank: g.present.mean(gradients))
    numbers = one.take()
    assert (numbers.losses, numbers.norm, numbers.own) == ((), 5.0, (5.0,))
    assert one.take().norm is None
    ranks.all(lambda g, rank: g.present.mean([numpy.array([float("nan")])]))
    found = one.take().norm
    assert found is not None
    assert numpy.isnan(found)


def test_nothing_is_noted_while_nothing_is_watched_or_averaged() -> None:
    """When nothing is watched, or the list of arrays is empty, then there is no norm."""
    one = Watch()
    one.averaged([numpy.array([1.0])], [numpy.array([1.0])])
    assert one.take().norm is None
    one.begin()
    one.averaged([], [])
    assert one.take().norm is None
