"""
The sockets of this process that are cut when groups are given up.
"""

import errno
import fcntl
import socket
import threading
from contextlib import ExitStack, closing
from datetime import timedelta

import pytest
import torch.distributed as dist
from tft_pytorch import device
from tft_pytorch.device import Devices
from tft_pytorch.groups import Groups
from tft_pytorch.sockets import census, cut, stand_in
from torch._C._distributed_c10d import HashStore  # as torch.distributed has it

NOT_A_STORE = 1


def listening(*, close_on_exec: bool, reuses: bool) -> socket.socket:
    """
    Return a socket that listens, with the options with which NCCL, gloo or Python set theirs.
    """
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuses))
    found.bind(("127.0.0.1", 0))
    found.listen()
    fcntl.fcntl(found, fcntl.F_SETFD, fcntl.FD_CLOEXEC if close_on_exec else 0)
    return found


@pytest.fixture
def spared() -> frozenset[int]:
    """
    Return the inode numbers of the sockets that were open before the test.
    """
    return census()


def refused(server: socket.socket) -> bool:
    """
    Return whether the socket accepts no connections any more.
    """
    server.setblocking(False)
    try:
        server.accept()
    except OSError as error:
        return error.errno == errno.EINVAL
    return False


def test_only_listening_sockets_of_nccl_are_cut(spared: frozenset[int]) -> None:
    """When groups of NCCL are given up, then sockets that listen as those of NCCL do accept nothing
    any more. Those of gloo and of Python go on, and those that were open before."""
    with ExitStack() as opened:
        of_nccl, of_gloo, of_python = (
            opened.enter_context(closing(listening(close_on_exec=closes, reuses=reuses)))
            for closes, reuses in ((False, False), (False, True), (True, False))
        )
        assert cut(spared, NOT_A_STORE) == 0
        assert cut(census(), NOT_A_STORE, listening=True) == 0
        assert not refused(of_nccl)
        assert cut(spared, NOT_A_STORE, listening=True) == 1
        assert [refused(each) for each in (of_nccl, of_gloo, of_python)] == [True, False, False]


def test_an_abort_is_not_awaited_before_sockets_are_cut(
    monkeypatch: pytest.MonkeyPatch, spared: frozenset[int]
) -> None:
    """When an abort of NCCL lasts until its sockets are cut, then they are cut while it lasts."""
    groups = Groups()
    groups._spared, groups._devices = spared, Devices("cuda")
    over = threading.Event()
    with closing(listening(close_on_exec=False, reuses=False)) as server:

        def abort(*_: object) -> None:
            with pytest.raises(OSError, match="Invalid argument"):
                server.accept()
            over.set()

        monkeypatch.setattr(device, "abort", abort)
        groups.quiesce()
        assert over.wait(20)
        assert groups._aborting is not None
        groups._aborting.join(20)
        assert not groups._aborting.is_alive()


@pytest.mark.parametrize("waiting", [0, 1])
def test_a_wait_for_a_rank_that_never_connects_is_ended(
    monkeypatch: pytest.MonkeyPatch, spared: frozenset[int], waiting: int
) -> None:
    """When a rank waits in a collective of gloo for another one that has not connected to it, then
    the wait ends. One of the two connects, and the other one waits until it has done so."""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    store, groups = HashStore(), {}

    def form(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timeout=timedelta(minutes=30))

    forming = [threading.Thread(target=form, args=(rank,)) for rank in range(2)]
    for each in forming:
        each.start()
    for each in forming:
        each.join(20)
    errors: list[RuntimeError] = []

    def wait() -> None:
        try:
            groups[waiting].barrier().wait()  # type: ignore[attr-defined]  # of the base class
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    while not errors and thread.is_alive():
        cut(spared, NOT_A_STORE)
        stand_in(spared, 2)
        thread.join(0.05)
    assert errors
