"""
Process groups: any wait in them can be stopped, they can be formed again, and all their resources
are released.
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
import tft_pytorch.groups
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from tft_pytorch import adaptor
from tft_pytorch.device import Devices
from tft_pytorch.groups import Groups
from tft_pytorch.interruptible import InterruptibleGloo, _Waits, watch_failures
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.futures import Future
from torch.utils._python_dispatch import TorchDispatchMode

from tests.adaptors.conftest import NewJob, Start
from tests.adaptors.ranks import Actor, Failure, Rank, Recipe
from tests.e2e.jobs import until
from tft.errors import UsageError

NOT_WAITED_FOR = {
    "BackendType", "_end_coalescing", "_start_coalescing",  # only NCCL has these
    "_enable_collectives_timing", "_get_backend", "_get_backend_name", "_register_backend",
    "_get_sequence_number_for_group", "_set_sequence_number_for_group", "_has_hooks", "_id", "_backend_id",
    "_pybind11_conduit_v1_", "_register_on_completion_hook", "_set_default_backend",
    "_set_group_desc", "_set_group_name", "_wait_for_pending_works", "abort", "boxed", "unbox",
    "get_group_store", "merge_remote_group", "split_group", "name", "rank", "size", "set_timeout",
    "shutdown", "use_pg_for_symm_mem_rendezvous",
    "monitored_barrier",  # has its own time limit
}  # fmt: skip

AT_ONCE = 2.0
"""Seconds: far above the few milliseconds that a cancelled wait takes, far below any time limit of
torch."""


def adopted(start: Start, number: int) -> Rank:
    """
    Start a rank that has adopted a training state and has not formed a group.
    """
    rank = start()
    rank.ask("adopt", number, 1, Recipe(wrapped=False))
    return rank


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """
    Check that the `with` block takes less than `seconds` seconds.
    """
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def test_quiesce_ends_an_all_reduce_with_a_stopped_peer(job: NewJob) -> None:
    """When a peer is stopped during an all-reduce, then `quiesce` makes the other ranks raise. All
    three ranks can then form a group again and all-reduce."""
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
def test_quiesce_ends_a_training_step_with_a_stopped_peer(job: NewJob, *, broadcasts: bool) -> None:
    """When a peer is stopped and DDP waits for it, before the forward pass or inside backward, then
    `quiesce` makes the step raise."""
    three = job(3, Recipe(wrapper={"broadcast_buffers": broadcasts}))
    # DDP broadcasts its bucket layout in the second step, and ranks wait in this broadcast too
    three.all("train", 2)
    with three.ranks[0].stopped():
        for rank in three.ranks[1:]:
            rank.tell("train", 3)
        answers = quiesced(three.ranks[1:])
        assert [answer.kind for answer in answers] == ["network", "network"]


def test_quiesce_ends_operations_with_partly_sent_messages(job: NewJob) -> None:
    """When a peer is stopped while messages of an operation are partly sent, then `quiesce` makes
    the waiting thread raise at once. This holds for several kinds of operations and repeatedly."""
    two = job(2, Recipe(wrapped=False))
    for what in [*SEVERAL] * 3:
        for rank in two.ranks:
            rank.tell("call", over_and_over, what)
        for _ in range(50):  # repeated, so that both ranks are inside the collective
            two.ranks[0].await_waiting()
        with two.ranks[1].stopped():
            assert [answer.kind for answer in quiesced(two.ranks[:1])] == ["network"], what
        two.ranks[1].interject("quiesce")
        assert isinstance(two.ranks[1].hear(), Failure)
        two.all("clear")
        two.form()
    assert two.all("all_reduce") == [2.0, 2.0]


def test_cancelled_gloo_operation_ends_at_once(job: NewJob) -> None:
    """When the other rank never joins an operation and its connections stay open, then a cancelled
    wait ends at once, even where gloo ignores its timeout."""
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


def test_polled_operation_completes(job: NewJob) -> None:
    """When a rank polls an operation for its completion and no thread waits for it, then the
    operation completes."""
    two = job(2, Recipe(wrapped=False))
    assert two.all("call", polled) == [[2.0, 1.0], [2.0, 0.0]]


def test_reduce_scatter_works_in_inference_mode_and_into_a_parameter(job: NewJob) -> None:
    """When a reduce-scatter runs in inference mode, or writes into a parameter while gradients are
    disabled, then its result is the same as with torch's own groups."""
    two = job(2, Recipe(wrapped=False))
    assert two.all("call", part_of_sum_in_each_mode) == [[2.0, 2.0]] * 2


def test_reduce_scatter_in_a_dispatch_mode_does_not_count_as_a_change(job: NewJob) -> None:
    """When a reduce-scatter completes in a dispatch mode, in which torch does not count changes in
    place, then its result has none. Selective activation checkpointing refuses changed tensors."""
    two = job(2, Recipe(wrapped=False))
    assert two.all("call", changes_in_a_dispatch_mode) == [[0], [0]]


def test_every_torch_group_operation_can_be_cancelled() -> None:
    """When a torch group has a public operation, then tft's group implements it, or the operation
    is known not to wait."""
    public = {name for name, at in vars(dist.ProcessGroup).items() if callable(at)}
    assert {name for name in public - NOT_WAITED_FOR if not name.startswith("__")} == {
        name for name in vars(InterruptibleGloo) if name in public and not name.startswith("__")
    }


def test_quiesce_ends_the_forming_of_an_incomplete_group(start: Start, store: int) -> None:
    """When two of three ranks wait for the third rank to join, then `quiesce` makes both raise. All
    three ranks can then form the next group."""
    ranks = [adopted(start, number) for number in range(3)]
    for number, rank in enumerate(ranks[:2]):
        rank.tell("form", "absent", store, number, 3)
    assert [answer.words for answer in quiesced(ranks[:2])] == [
        "OrderRefused: forming the group 'absent' was cancelled, because an incident is being "
        "handled"
    ] * 2

    for number, rank in enumerate(ranks):
        rank.tell("form", "complete", store, number, 3)
    assert [rank.hear() for rank in ranks] == [None, None, None]
    for rank in ranks:
        rank.tell("all_reduce")
    assert [rank.hear() for rank in ranks] == [3.0, 3.0, 3.0]


@pytest.mark.parametrize("listening", [False, True])
def test_quiesce_ends_the_wait_for_a_store_without_an_answer(
    start: Start, *, listening: bool
) -> None:
    """When no process listens at the store's port, or the listener never answers, then `quiesce`
    ends the wait."""
    rank = adopted(start, 0)
    with closing(socket.socket()) as silent:
        silent.bind(("127.0.0.1", 0))
        if listening:
            silent.listen()
        rank.tell("form", "no store", silent.getsockname()[1], 0, 1)
        while not rank.interject("forms"):
            pass
        with within(AT_ONCE + 1.0):  # an attempt to connect takes at most one second
            rank.interject("quiesce")
            answer = rank.hear()
    assert isinstance(answer, Failure)
    assert "was cancelled" in answer.words


def test_quiesce_without_a_group_does_not_affect_the_next_group(start: Start, store: int) -> None:
    """When `quiesce` is called while the rank has no group, then the next group is formed as usual."""
    rank = adopted(start, 0)
    rank.interject("quiesce")
    rank.ask("clear")
    rank.interject("quiesce")
    rank.ask("form", "alone", store, 0, 1)
    assert rank.ask("all_reduce") == 1.0


def test_quiesce_keeps_other_connections_of_the_process_open(start: Start, store: int) -> None:
    """When the process has other connections, opened before or after the group was formed, then
    they still work after `quiesce`."""
    rank = adopted(start, 0)
    rank.ask("call", open_connection, "inheritable")
    rank.ask("form", "spared", store, 0, 1)
    rank.ask("call", open_connection, "closed on exec")
    rank.interject("quiesce")
    assert rank.ask("call", talk) == [b"hello", b"hello"]


def test_clear_frees_groups_wrappers_and_threads(job: NewJob) -> None:
    """When groups and wrappers are cleared after training, then none of their connections, threads
    and wrappers is left, and `sys.excepthook` has its former value."""
    two = job(2)
    two.all("clear")
    before = two.all("call", left_over)
    for _ in range(2):
        two.form()
        two.all("build")
        two.all("train", 2)
        two.all("call", watch_wrapper)
        two.all("clear")

    # the kernel may still list a thread that has been joined
    until(lambda: two.all("call", left_over) == before, f"that no more is left than {before}")
    assert two.all("call", wrappers_are_gone) == [True, True]


def test_incomplete_backward_does_not_keep_its_group_alive(job: NewJob) -> None:
    """When a backward pass ended with an exception and its remaining graph still refers to a group,
    then the group is freed with the other groups, before the next backward pass."""
    [rank, _] = job(2).ranks
    rank.ask("call", leave_a_backward_undone)
    rank.ask("clear")
    assert rank.ask("call", wrappers_are_gone)


def waits_when_cleared(_: Actor) -> list[str]:
    """
    Clear the groups. Return what happened then, in order: `free` for the groups, and `wait` for the
    device.
    """
    seen: list[str] = []
    clear = Groups.clear

    def free(groups: Groups) -> None:
        clear(groups)
        seen.append("free")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Groups, "clear", free)
        patch.setattr(Devices, "synchronize", lambda _: seen.append("wait"))
        adaptor.tft_clear()
    return seen


def test_device_has_done_its_work_when_the_state_may_be_read(job: NewJob) -> None:
    """When groups are cleared, then tft waits for the device afterwards, because other threads read
    the state from now on, in streams of their own. Before, a hanging collective may be pending."""
    [rank, _] = job(2).ranks
    assert rank.ask("call", waits_when_cleared) == ["free", "wait"]


def cleared_beside_a_device(_: Actor) -> bool:
    """
    Clear the groups of a script that creates its tensors on CUDA. Return whether CUDA stays
    uninitialized.
    """
    with torch.device("cuda"):
        adaptor.tft_clear()
    return not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch has no types here


def test_clearing_groups_does_not_use_the_default_device(job: NewJob) -> None:
    """When a default device for tensors is set, then clearing the groups does not use that device."""
    [rank, _] = job(2).ranks
    assert rank.ask("call", cleared_beside_a_device)


def test_training_continues_when_the_user_keeps_an_old_wrapper(job: NewJob) -> None:
    """When the user's script still refers to an old wrapper and its group, then the connections of
    this group are closed. Training continues with the new wrapper, and the parameters of both ranks
    are equal."""
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
    assert first["parameters"] == second["parameters"]  # type: ignore[index]  # both are dictionaries


def leave_operations_undone(_: Actor) -> None:
    """
    Stop cutting connections, as if gloo did not notice that they are cut.
    """
    vars(tft_pytorch.groups)["cut"] = lambda *_, **__: 0


def wait_until_given_up(_: Actor) -> None:
    """
    Wait until the groups are freed or given up, as `form` does.
    """
    groups = adaptor._torch._groups
    assert groups._freeing is not None
    groups._outlived = groups._freeing.wait()


def drop_all(actor: Actor) -> None:
    """
    Drop what was kept.
    """
    actor.kept.clear()


def test_script_that_drops_an_old_wrapper_and_group_late_waits_for_nothing(job: NewJob) -> None:
    """When an operation of a group cannot end, and the script drops its references to the wrapper
    and the group only after the incident, then it does not wait for the end of the operation, and
    it trains on."""
    two = job(2)
    two.all("train", 1)
    waits = two.ranks[0]
    for keep in (keep_wrapper, leave_operations_undone):
        waits.ask("call", keep)
    waits.tell("all_reduce")
    waits.await_waiting()
    waits.interject("quiesce")
    assert isinstance(waits.hear(), Failure)
    waits.ask("clear")
    waits.ask("call", wait_until_given_up)
    with within(AT_ONCE):
        waits.ask("call", drop_all)
    two.ranks[1].ask("clear")
    two.form()
    two.all("build")
    two.all("train", 3)
    first, second = two.all("digests")
    assert first["parameters"] == second["parameters"]  # type: ignore[index]  # both are dictionaries


def call_kept_wrapper(actor: Actor) -> str:
    """
    Call the wrapper that was kept. Return the sentence with which this is refused.
    """
    with pytest.raises(UsageError) as refused:
        actor.kept[0][0](torch.ones(1))
    return str(refused.value)


def test_wrapper_from_before_an_incident_is_refused(job: NewJob) -> None:
    """When the script calls a wrapper that it has kept from before an incident, then this is
    refused, because nothing would reduce its gradients."""
    two = job(2)
    two.ranks[0].ask("call", keep_wrapper)
    two.all("clear")
    two.form()
    assert "call session.model" in two.ranks[0].ask("call", call_kept_wrapper)


def test_quiesce_also_ends_waits_in_the_scripts_own_group(job: NewJob) -> None:
    """When the script makes its own group, then all-reduces in it work, and `quiesce` also ends a
    wait in that group."""
    three = job(3, Recipe(wrapped=False))
    assert three.all("call", sum_in_own_group) == [2.0, 2.0, 0.0]
    with three.ranks[1].stopped():
        three.ranks[0].tell("call", sum_in_own_group)
        assert [answer.kind for answer in quiesced(three.ranks[:1])] == ["network"]


def quiesced(ranks: list[Rank]) -> list[Failure]:
    """
    Wait until all ranks wait for others, stop all waits, and return the failures.

    Every rank gets the request twice. All requests together must take less than `AT_ONCE` seconds.
    """
    for rank in ranks:
        rank.await_waiting()
    with within(AT_ONCE):
        for rank in [*ranks, *ranks]:
            rank.interject("quiesce")
        answers = [rank.hear() for rank in ranks]
    return [answer for answer in answers if isinstance(answer, Failure)]


# ---------------------------------------------------------------- functions for the rank's process


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
"""Operations between two ranks, by name."""


def scatters(one: Tensor) -> None:
    """
    Run two reduce-scatters of the parts of `one` as a single coalesced request.
    """
    with distributed_c10d._coalescing_manager():
        for part in one.chunk(2):
            dist.reduce_scatter_tensor(torch.empty_like(part[: len(part) // 2]), part)


def part_of_sum_in_each_mode(_: Actor) -> list[float]:
    """
    Run a reduce-scatter in inference mode and another without gradients. Return this rank's parts
    of the two results.
    """
    with torch.inference_mode():
        kept = torch.empty(1)
        dist.reduce_scatter_tensor(kept, torch.ones(2))
    parameter = torch.empty(1, requires_grad=True)
    with torch.no_grad():
        dist.reduce_scatter_tensor(parameter, torch.ones(2))
    return [kept.item(), parameter.item()]


def changes_in_a_dispatch_mode(_: Actor) -> list[int]:
    """
    Run a reduce-scatter in a dispatch mode. Return how often its result has been changed in place,
    as the mode sees it.
    """
    seen = []

    class Looks(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:  # Any: as torch passes them
            result = func(*args, **(kwargs or {}))
            if func is torch.ops._c10d_functional.wait_tensor.default:
                seen.append(result._version)
            return result

    looks: Any = Looks  # Any: torch has no types here
    wait: Any = functional.wait_tensor
    with looks():
        wait(functional.reduce_scatter_tensor(torch.ones(2), "sum", 0, [0, 1]))
    return seen[:1]


def polled(_: Actor) -> list[float]:
    """
    Exchange a reduce-scatter and a message with the other rank, and poll until all are complete.

    Return this rank's part of the sum and the number of the other rank.
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
    Repeat the collective `what` forever with 32 MiB, far more than a connection can buffer.
    """
    many = torch.ones(2**23)
    while True:
        SEVERAL[what](many)


def open_connection(actor: Actor, how: str) -> None:
    """
    Open a TCP connection of the process with itself and keep both ends.

    With `how="inheritable"`, child processes inherit the two sockets.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        pair = (socket.create_connection(server.getsockname()), server.accept()[0])
    for end in pair:
        end.set_inheritable(how == "inheritable")
    actor.kept.append(pair)


def talk(actor: Actor) -> list[bytes]:
    """
    Send a word through each kept connection and return the words that arrive.
    """
    heard = []
    for one, other in actor.kept:
        one.sendall(b"hello")
        heard.append(other.recv(5))
    return heard


def left_over(_: Actor) -> tuple[int, int, str]:
    """
    Return the number of open sockets, the number of threads, and the name of the exception hook.
    """
    sockets = 0
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor that lists this directory is closed
            sockets += os.readlink(fd).startswith("socket:")
    return sockets, len(os.listdir("/proc/self/task")), sys.excepthook.__qualname__


def watch_wrapper(actor: Actor) -> None:
    """
    Keep a weak reference to the wrapped model. The reference does not keep the model alive.
    """
    actor.kept.append(weakref.ref(actor.model))


class Keeps(torch.autograd.Function):
    """
    An autograd function that stores its process group in the graph, as functions of some libraries
    do.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # Any: torch's context
        """
        Store the group and return a copy of `x`.
        """
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # Any: torch's context
        """
        Pass the gradient through unchanged.
        """
        return grads[0], None


class Fails(torch.autograd.Function):
    """
    An autograd function whose backward pass fails, as if a collective were interrupted.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # Any: torch's context
        """
        Return a copy of `x`.
        """
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # Any: torch's context
        """
        Raise `ConnectionError`.
        """
        raise ConnectionError("called off")


def leave_a_backward_undone(actor: Actor) -> None:
    """
    Interrupt a backward pass whose remaining graph still holds the current process group.

    Keep a weak reference to the group for a later check.
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
    Return whether all objects behind the kept weak references are freed.
    """
    return all(watched() is None for watched in actor.kept)


def keep_wrapper(actor: Actor) -> None:
    """
    Keep strong references to the wrapped model and its group, as a careless script does.
    """
    actor.kept.append((actor.model, dist.group.WORLD))


def sum_in_own_group(actor: Actor) -> float:
    """
    All-reduce ones over ranks 0 and 1 in a group that the first call makes. Return the first
    element.
    """
    if not actor.kept:
        actor.kept.append(dist.new_group([0, 1]))
    ones = torch.ones(10)
    if dist.get_rank() == 2:
        return 0.0
    dist.all_reduce(ones, group=actor.kept[0])
    return float(ones[0])


# ---------------------------------------------------------------- failed collectives


def test_failure_in_a_future_is_reported() -> None:
    """When a collective fails for whose future DDP waits, or when its wait is cancelled, then its
    exception is reported as one that no thread has raised yet."""
    told: list[tuple[str, bool]] = []
    watch_failures(lambda error, raised: told.append((str(error), raised)))
    try:
        failed, unfinished = Future[None](), Future[None]()
        waits = _Waits()
        for native in (failed, unfinished):
            waits.promise(native)
        failed.set_exception(RuntimeError("connection closed by peer"))  # type: ignore[arg-type]  # torch types it as its value
        waits.call_off()
    finally:
        watch_failures(None)
    assert told == [
        ("connection closed by peer", False),
        ("the wait for other ranks of a process group was cancelled", False),
    ]
