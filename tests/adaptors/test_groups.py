"""
Process groups: brought out of any wait, formed again, really freed.
"""

import os
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from tft_pytorch import adaptor
from tft_pytorch.interruptible import InterruptibleGloo
from torch import Tensor
from torch.distributed import distributed_c10d

from tests.adaptors.conftest import NewJob, Start
from tests.adaptors.ranks import Actor, Failure, Rank, Recipe
from tests.e2e.jobs import until

NOT_WAITED_FOR = {
    "BackendType", "_end_coalescing", "_start_coalescing",  # of NCCL
    "_enable_collectives_timing", "_get_backend", "_get_backend_name", "_register_backend",
    "_get_sequence_number_for_group", "_set_sequence_number_for_group", "_has_hooks", "_id", "_backend_id",
    "_pybind11_conduit_v1_", "_register_on_completion_hook", "_set_default_backend",
    "_set_group_desc", "_set_group_name", "_wait_for_pending_works", "abort", "boxed", "unbox",
    "get_group_store", "merge_remote_group", "split_group", "name", "rank", "size", "set_timeout",
    "shutdown", "use_pg_for_symm_mem_rendezvous",
    "monitored_barrier",  # which has a time limit of its own
}  # fmt: skip

AT_ONCE = 2.0
"""Seconds: far above the few milliseconds it takes, far below any time limit of torch."""


def adopted(start: Start, number: int) -> Rank:
    """
    A rank that has adopted a state and formed no group.
    """
    rank = start()
    rank.ask("adopt", number, 1, Recipe(wrapped=False))
    return rank


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """
    What happens inside takes no longer.
    """
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def test_quiesce_ends_a_collective_whose_peer_does_not_answer(job: NewJob) -> None:
    """
    When a peer is stopped in the middle of a sum, then `quiesce` makes the others raise, and all
    three can form a group again and sum.
    """
    three = job(3, Recipe(wrapped=False))
    with three.ranks[2].stopped():
        for rank in three.ranks[:2]:
            rank.tell("all_reduce")
        answers = quiesced(three.ranks[:2])
        assert [answer.kind for answer in answers] == ["network", "network"]

    three.all("clear")
    three.form()
    assert three.all("all_reduce") == [3.0, 3.0, 3.0]


@pytest.mark.parametrize("broadcasts", [True, False])
def test_quiesce_ends_a_step_whose_peer_does_not_answer(job: NewJob, *, broadcasts: bool) -> None:
    """
    When a peer is stopped, and DDP waits for it before the forward pass, with buffers, or inside
    backward, in C++, then `quiesce` makes the step raise.
    """
    three = job(3, Recipe(wrapper={"broadcast_buffers": broadcasts}))
    three.all("train", 2)  # in the second step DDP tells its buckets, which is waited for as well
    with three.ranks[0].stopped():
        for rank in three.ranks[1:]:
            rank.tell("train", 3)
        answers = quiesced(three.ranks[1:])
        assert [answer.kind for answer in answers] == ["network", "network"]


def test_quiesce_ends_what_gloo_itself_forgets(job: NewJob) -> None:
    """
    When connections are cut while messages have come in part and left in part, in all-reduces, gathers and
    messages from rank to rank, then each thread comes out of it at once, time after time.
    """
    two = job(2, Recipe(wrapped=False))
    for what in [*SEVERAL] * 3:
        for rank in two.ranks:
            rank.tell("call", over_and_over, what)
        for _ in range(50):  # so that both are in the middle of it
            two.ranks[0].await_waiting()
        with two.ranks[1].stopped():
            assert [answer.kind for answer in quiesced(two.ranks[:1])] == ["network"], what
        two.ranks[1].interject("quiesce")
        assert isinstance(two.ranks[1].hear(), Failure)
        two.all("clear")
        two.form()
    assert two.all("all_reduce") == [2.0, 2.0]


def test_gloo_keeps_nobody_who_is_called_off(job: NewJob) -> None:
    """
    When no connection is cut, and the other rank never comes, then a wait that is called off still ends at
    once, also where gloo takes no notice of a time limit.
    """
    two = job(2, Recipe(wrapped=False))
    waits = two.ranks[0]
    for what in ("sum", "gather", "messages", "scatter", "scatters at once"):
        waits.tell("call", over_and_over, what)
        waits.await_waiting()
        with within(AT_ONCE):
            waits.interject("call_off")
            answer = waits.hear()
        assert isinstance(answer, Failure), what
        assert answer.kind == "network", what
        two.all("clear")
        two.form()


def test_an_operation_that_is_polled_completes(job: NewJob) -> None:
    """
    When a rank asks again and again whether an operation is complete, and nobody waits for it, then
    it completes.
    """
    two = job(2, Recipe(wrapped=False))
    assert two.all("call", polled) == [[2.0, 1.0], [2.0, 0.0]]


def test_a_sum_is_written_in_the_mode_of_the_caller(job: NewJob) -> None:
    """
    When a sum of which each rank keeps a part is asked for in inference mode, or is written into a parameter without
    gradients, then it works as it does with torch's own groups.
    """
    two = job(2, Recipe(wrapped=False))
    assert two.all("call", part_of_sum_in_each_mode) == [[2.0, 2.0]] * 2


def test_every_operation_of_torchs_groups_can_be_called_off() -> None:
    """
    When torch's groups have an operation, then ours answers it, or it is known to be none that waits.
    """
    public = {name for name, at in vars(dist.ProcessGroup).items() if callable(at)}
    assert {name for name in public - NOT_WAITED_FOR if not name.startswith("__")} == {
        name for name in vars(InterruptibleGloo) if name in public and not name.startswith("__")
    }


def test_quiesce_ends_the_forming_of_a_group_that_a_rank_never_joins(
    start: Start, store: int
) -> None:
    """
    When two of three ranks wait for the third, then `quiesce` makes them raise; the next group is
    formed by those two and one that never waited.
    """
    ranks = [adopted(start, number) for number in range(3)]
    for number, rank in enumerate(ranks[:2]):
        rank.tell("form", "absent", store, number, 3)
    assert [answer.words for answer in quiesced(ranks[:2])] == [
        "OrderRefused: forming the group 'absent' was cancelled"
    ] * 2

    for number, rank in enumerate(ranks):
        rank.tell("form", "complete", store, number, 3)
    assert [rank.hear() for rank in ranks] == [None, None, None]
    for rank in ranks:
        rank.tell("all_reduce")
    assert [rank.hear() for rank in ranks] == [3.0, 3.0, 3.0]


@pytest.mark.parametrize("listening", [False, True])
def test_quiesce_ends_the_wait_for_a_store_that_does_not_answer(
    start: Start, *, listening: bool
) -> None:
    """
    When nobody listens at the store's port, or somebody who never answers, then `quiesce` ends
    the wait all the same.
    """
    rank = adopted(start, 0)
    with closing(socket.socket()) as silent:
        silent.bind(("127.0.0.1", 0))
        if listening:
            silent.listen()
        rank.tell("form", "no store", silent.getsockname()[1], 0, 1)
        while not rank.interject("forms"):
            pass
        with within(AT_ONCE + 1.0):  # an attempt to connect takes up to a second
            rank.interject("quiesce")
            answer = rank.hear()
    assert isinstance(answer, Failure)
    assert "was cancelled" in answer.words


def test_a_quiesce_that_came_before_does_not_stop_the_next_group(start: Start, store: int) -> None:
    """
    When `quiesce` is called while there is no group, then nothing happens, and a group forms.
    """
    rank = adopted(start, 0)
    rank.interject("quiesce")
    rank.ask("clear")
    rank.interject("quiesce")
    rank.ask("form", "alone", store, 0, 1)
    assert rank.ask("all_reduce") == 1.0


def test_quiesce_spares_every_other_connection(start: Start, store: int) -> None:
    """
    When the process has connections of its own, older than the group without any mark, or
    younger and marked as Python marks them, then they work after `quiesce` as before.
    """
    rank = adopted(start, 0)
    rank.ask("call", open_connection, "inheritable")
    rank.ask("form", "spared", store, 0, 1)
    rank.ask("call", open_connection, "closed on exec")
    rank.interject("quiesce")
    assert rank.ask("call", talk) == [b"hello", b"hello"]


def test_clear_frees_groups_and_wrappers(job: NewJob) -> None:
    """
    When groups and wrappers are cleared after steps were trained, then no connection, thread or
    wrapper is left of them, and `sys.excepthook` is what it was.
    """
    two = job(2)
    two.all("clear")
    before = two.all("call", left_over)
    for _ in range(2):
        two.form()
        two.all("build")
        two.all("train", 2)
        two.all("call", watch_wrapper)
        two.all("clear")

    # a thread that has been joined may be in the kernel's table still
    until(lambda: two.all("call", left_over) == before, f"that no more is left than {before}")
    assert two.all("call", wrappers_are_gone) == [True, True]


def test_what_a_backward_has_left_undone_keeps_no_group(job: NewJob) -> None:
    """
    When a backward ended with an exception, and a function that it had not come to keeps its group, then the
    group is freed with the others: not by the next backward, which would wait for what the destructor waits
    for.
    """
    [rank, _] = job(2).ranks
    rank.ask("call", leave_a_backward_undone)
    rank.ask("clear")
    assert rank.ask("call", wrappers_are_gone)


def cleared_beside_a_device(_: Actor) -> bool:
    """
    Whether a script whose tensors are made on a device, where it has one, leaves its groups without it.
    """
    with torch.device("cuda"):
        adaptor.tft_clear()
    return not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch has no types here


def test_the_default_device_takes_no_part_in_the_end_of_groups(job: NewJob) -> None:
    """
    When tensors are made on a device unless it is said otherwise, then dropping the groups does not touch it.
    """
    [rank, _] = job(2).ranks
    assert rank.ask("call", cleared_beside_a_device)


def test_a_wrapper_that_the_user_keeps_does_no_harm(job: NewJob) -> None:
    """
    When something still refers to the old wrapper and its group, then its connections are shut,
    its hooks are gone, and training goes on with the new one.
    """
    two = job(2)
    two.all("train", 1)
    two.all("call", keep_wrapper)
    two.ranks[0].ask("clear")

    two.ranks[1].tell("all_reduce")
    assert isinstance(two.ranks[1].hear(), Failure)

    two.ranks[1].ask("clear")
    two.form()
    two.all("build")
    two.all("train", 3)
    first, second = two.all("digests")
    assert first["parameters"] == second["parameters"]  # type: ignore[index]  # dictionaries


def test_the_users_own_groups_work_and_are_brought_down_too(job: NewJob) -> None:
    """
    When the script makes a group of its own, then `quiesce` ends a wait in it as well.
    """
    three = job(3, Recipe(wrapped=False))
    assert three.all("call", sum_in_own_group) == [2.0, 2.0, 0.0]
    with three.ranks[1].stopped():
        three.ranks[0].tell("call", sum_in_own_group)
        assert [answer.kind for answer in quiesced(three.ranks[:1])] == ["network"]


def quiesced(ranks: list[Rank]) -> list[Failure]:
    """
    All wait for others; all are brought out of it, at once, by a call that may be repeated.
    """
    for rank in ranks:
        rank.await_waiting()
    with within(AT_ONCE):
        for rank in [*ranks, *ranks]:
            rank.interject("quiesce")
        answers = [rank.hear() for rank in ranks]
    return [answer for answer in answers if isinstance(answer, Failure)]


# ---------------------------------------------------------------- in the rank's process


SEVERAL: dict[str, Callable[[Tensor], object]] = {
    "sum": dist.all_reduce,
    "gather": lambda one: dist.all_gather([torch.empty_like(one) for _ in range(2)], one),
    "messages": lambda one: [work.wait() for work in dist.batch_isend_irecv([
        dist.P2POp(dist.isend, one, 1 - dist.get_rank()),
        dist.P2POp(dist.irecv, torch.empty_like(one), 1 - dist.get_rank()),
    ])],
    "scatter": lambda one: dist.reduce_scatter_tensor(torch.empty_like(one[: len(one) // 2]), one),
    "scatters at once": lambda one: scatters(one),
    "sum inside a graph": lambda one: functional.all_reduce(one, "sum", [0, 1]) + 0,
    "gather inside a graph": lambda one: functional.all_gather_single(one, 0, [0, 1]) + 0,
    "scatter inside a graph": lambda one: functional.reduce_scatter_single(one, "sum", 0, [0, 1]) + 0,
    "exchange inside a graph": lambda one: functional.all_to_all_single(one, None, None, [0, 1]) + 0,
}  # fmt: skip
"""Among two ranks."""


def scatters(one: Tensor) -> None:
    """
    Several, asked for as one.
    """
    with distributed_c10d._coalescing_manager():
        for part in one.chunk(2):
            dist.reduce_scatter_tensor(torch.empty_like(part[: len(part) // 2]), part)


def part_of_sum_in_each_mode(_: Actor) -> list[float]:
    """
    This rank's, one after the other.
    """
    with torch.inference_mode():
        kept = torch.empty(1)
        dist.reduce_scatter_tensor(kept, torch.ones(2))
    parameter = torch.empty(1, requires_grad=True)
    with torch.no_grad():
        dist.reduce_scatter_tensor(parameter, torch.ones(2))
    return [kept.item(), parameter.item()]


def polled(_: Actor) -> list[float]:
    """
    A part of an all-reduce, and the number of the other rank.
    """
    other = 1 - dist.get_rank()
    part, number = torch.empty(1), torch.empty(1)
    left = [
        dist.reduce_scatter_tensor(part, torch.ones(2), async_op=True),
        dist.isend(torch.tensor([float(dist.get_rank())]), other),
        dist.irecv(number, other),
    ]
    ends = time.monotonic() + 20.0
    while any(not (work is None or work.is_completed()) for work in left):
        assert time.monotonic() < ends
    return [part.item(), number.item()]


def over_and_over(_: Actor, what: str) -> None:
    """
    Of 32 MiB each time: far more than goes through a connection at once.
    """
    many = torch.ones(2**23)
    while True:
        SEVERAL[what](many)


def open_connection(actor: Actor, how: str) -> None:
    """
    A TCP connection of the process with itself.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        pair = (socket.create_connection(server.getsockname()), server.accept()[0])
    for end in pair:
        end.set_inheritable(how == "inheritable")
    actor.kept.append(pair)


def talk(actor: Actor) -> list[bytes]:
    """
    What comes out of each connection at the other end.
    """
    heard = []
    for one, other in actor.kept:
        one.sendall(b"hello")
        heard.append(other.recv(5))
    return heard


def left_over(_: Actor) -> tuple[int, int, str]:
    """
    Sockets, threads, and who would show an exception.
    """
    sockets = 0
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists the directory
            sockets += os.readlink(fd).startswith("socket:")
    return sockets, len(os.listdir("/proc/self/task")), sys.excepthook.__qualname__


def watch_wrapper(actor: Actor) -> None:
    """
    Without holding it.
    """
    actor.kept.append(weakref.ref(actor.model))


class Keeps(torch.autograd.Function):
    """
    What is done over a group, as its author has it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # Any: torch's own
        """
        Nothing.
        """
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # Any: torch's own
        """
        Nothing.
        """
        return grads[0], None


class Fails(torch.autograd.Function):
    """
    What is cut off in the backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # Any: torch's own
        """
        Nothing.
        """
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # Any: torch's own
        """
        Raises.
        """
        raise ConnectionError("called off")


def leave_a_backward_undone(actor: Actor) -> None:
    """
    With the group of now in what is left.
    """
    group = dist.group.WORLD
    assert group is not None
    actor.kept.append(weakref.ref(group))
    x = torch.ones(1, requires_grad=True)
    kept = Keeps.apply(x, group)  # type: ignore[no-untyped-call]  # torch has no types here
    failing = Fails.apply(x)  # type: ignore[no-untyped-call]  # as above
    with suppress(ConnectionError):
        (kept + failing).backward()


def wrappers_are_gone(actor: Actor) -> bool:
    """
    All that were watched.
    """
    return all(watched() is None for watched in actor.kept)


def keep_wrapper(actor: Actor) -> None:
    """
    As a careless script does.
    """
    actor.kept.append((actor.model, dist.group.WORLD))


def sum_in_own_group(actor: Actor) -> float:
    """
    In a group of ranks 0 and 1, made the first time.
    """
    if not actor.kept:
        actor.kept.append(dist.new_group([0, 1]))
    ones = torch.ones(10)
    if dist.get_rank() == 2:
        return 0.0
    dist.all_reduce(ones, group=actor.kept[0])
    return float(ones[0])
