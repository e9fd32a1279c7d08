"""
Devices other than the CPU, with modules of devices made for these tests: generators, the kinds of
devices that are accepted, and the memory that a transfer costs.
"""

import ast
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash
from structlog.testing import capture_logs
from tft_pytorch import device
from tft_pytorch.adopted_maker import adopt
from tft_pytorch.device import Devices, devices_of, undisturbed
from tft_pytorch.groups import Groups
from tft_pytorch.interruptible import CalledOff
from tft_pytorch.state_store import StateStore
from torch import nn
from torch._C._distributed_c10d import HashStore, PrefixStore  # as torch.distributed has them
from torch.distributed import distributed_c10d

from tft.errors import OrderRefused, UsageError
from tft.transfer.wire import FROM_SERVER, Hello, Request, ShardOffer, chunks, frame, read_frame

ROOT = Path(__file__).resolve().parents[2]


class Module:
    """
    The module that torch would have for a device kind with two devices. The current device is 0.
    """

    def __init__(self) -> None:
        self.states = {0: bytes(16), 1: bytes(16)}
        self.calls: list[str] = []
        self.at_rest = True

    def synchronize(self, place: Any) -> None:
        """
        Note that somebody waits for a device.
        """
        self.calls.append(f"wait for {_index(place)}")

    def get_rng_state(self, place: Any = "cuda") -> torch.Tensor:
        """
        Return the state of a device, by default the current one.
        """
        return torch.frombuffer(bytearray(self.states[_index(place)]), dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, place: Any = "cuda") -> None:
        """
        Set the state of a device, by default the current one.
        """
        self.states[_index(place)] = state.numpy().tobytes()

    def current_stream(self, place: Any) -> SimpleNamespace:
        """
        Return the stream of a device, which tells whether it has done its work.
        """
        return SimpleNamespace(query=lambda: self.at_rest)

    def draw(self, place: int) -> bytes:
        """
        Draw from the generator of one device.
        """
        self.states[place] = xxhash.xxh3_128_digest(self.states[place])
        return self.states[place]

    def seed(self, seed: int) -> None:
        """
        Seed all devices alike, as `torch.manual_seed` does.
        """
        self.states = dict.fromkeys(self.states, seed.to_bytes(16))


def _index(place: Any) -> int:
    return place if isinstance(place, int) else torch.device(place).index or 0


class Elsewhere(torch.Tensor):
    """
    A tensor that says it is on the second device.
    """

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # in torch it is an attribute
        return torch.device("cuda", 1)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    """
    Pretend that torch has a module of two CUDA devices.
    """
    made = Module()
    real = torch.get_device_module
    monkeypatch.setattr(
        torch, "get_device_module", lambda kind=None: made if kind == "cuda" else real(kind)
    )
    return made


def on_second(wrap: Callable[[], object] | None = None) -> StateStore:
    """
    Return the adopted state of a model on the second device.
    """
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = adopt({"model": model, "optimizer": optimizer}, wrap)
    for name in ("weight", "bias"):
        setattr(model, name, nn.Parameter(torch.zeros(3).as_subclass(Elsewhere)))
    state._local_state.learn(model)
    return state


def test_the_generator_of_the_device_that_has_the_model_is_kept(module: Module) -> None:
    """When the model is on a device that is not the current one, then the state of that device's
    generator is captured and restored. The generator of the current device is not changed."""
    state = on_second()
    module.draw(1)
    captured = state.capture()
    drawn = module.draw(1)
    current = module.draw(0)
    state.rollback(captured)
    assert module.draw(1) == drawn
    assert module.states[0] == current


def test_wrapper_is_used_when_the_device_has_made_it(module: Module) -> None:
    """When a wrapper is built, then the devices have done their work before and after. Lightning
    builds DDP on a stream of its own, whose work could otherwise meet that of other streams."""
    state = on_second(lambda: module.calls.append("wrap"))
    state.rebuild()
    assert module.calls == ["wait for 1", "wrap", "wait for 1"]


def test_successor_gets_the_buffers_of_the_device_of_the_dead_process(module: Module) -> None:
    """When the forward pass changes buffers on a device, then a successor has those of the dead
    process. While the device computes, a capture does not wait for it, and only refers to them."""

    def rank(running: float) -> tuple[StateStore, list[torch.Tensor]]:
        model = nn.BatchNorm1d(2)
        for name, buffer in list(model.named_buffers()):
            model._buffers[name] = (buffer + running).as_subclass(Elsewhere)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return adopt({"model": model, "optimizer": optimizer}, None), list(model.buffers())

    (dead, buffers), (successor, came) = rank(3), rank(5)
    for at_rest, expected in (False, came), (True, buffers):
        module.at_rest = at_rest
        lost = successor.rollback(dead.capture(closing=True))
        assert bool(lost) != at_rest
        assert [each.tolist() for each in came] == [each.tolist() for each in expected]


def test_digests_see_the_generator_of_the_device(module: Module) -> None:
    """When a random number is drawn on the model's device, then the digest of the generators
    changes."""
    state = on_second()
    before = state.digests()["rng"]
    module.draw(1)
    assert state.digests()["rng"] != before


def test_generators_of_another_number_of_devices_are_refused(module: Module) -> None:
    """When a captured state has generators for another number of devices than this rank has, then
    it is refused."""
    model = nn.Linear(2, 2)
    plain = adopt({"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}, None)
    with pytest.raises(OrderRefused, match="the random generators of 0 devices, but this rank has"):
        on_second().rollback(plain.capture())


def test_a_factory_that_seeds_leaves_the_generators_of_devices_alone(
    module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a factory calls `torch.manual_seed`, which seeds all devices alike, then the generators
    of the rank afterwards have the states that they had before."""
    accelerator = SimpleNamespace(
        current_accelerator=lambda check_available=False: torch.device("cuda"),
        device_count=lambda: 2,
    )
    monkeypatch.setattr(torch, "accelerator", accelerator)
    module.draw(1)
    own = dict(module.states)
    with undisturbed():
        module.seed(7)
    assert module.states == own


@pytest.mark.parametrize(
    ("local_rank", "used", "current"),
    [
        pytest.param("1", False, 1, id="second of two"),
        pytest.param("1", True, 0, id="script has chosen"),
        pytest.param("5", False, 0, id="sees only its own"),
        pytest.param("no-rank-yet", False, 0, id="warm process"),
    ],
)
def test_the_trial_of_a_factory_uses_the_device_of_the_rank(
    module: Module,
    monkeypatch: pytest.MonkeyPatch,
    local_rank: str,
    used: bool,
    current: int,
) -> None:
    """When a factory makes a mesh over groups that send nothing, and the script has not chosen a
    device, then the current device is the one that torch's DeviceMesh would choose."""
    chosen = [0]
    accelerator = SimpleNamespace(
        current_accelerator=lambda check_available=False: torch.device("cuda"),
        device_count=lambda: 2,
        set_device_index=lambda index: chosen.append(index),
    )
    monkeypatch.setattr(torch, "accelerator", accelerator)
    monkeypatch.setattr(module, "is_initialized", lambda: used, raising=False)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    device.select()
    assert chosen[-1] == current


@pytest.mark.parametrize(
    ("kinds", "sentence"),
    [
        (("meta",), "on device meta, for which torch knows no collective backend"),
        (("cuda", "xpu"), "on devices of several kinds: cuda, xpu"),
    ],
)
def test_devices_that_cannot_be_recovered_are_refused(
    kinds: tuple[str, ...], sentence: str
) -> None:
    """When a model is on devices of several kinds, or of a kind without a backend, then the error
    names them."""
    tensors: list[Any] = [SimpleNamespace(device=torch.device(kind)) for kind in kinds]
    with pytest.raises(UsageError, match=sentence):
        devices_of(tensors)


def test_the_backend_follows_from_the_device() -> None:
    """When tensors are on the CPU and on an accelerator, then the accelerator is the device of the
    job, and process groups get a backend for each of the two."""
    tensors: list[Any] = [
        SimpleNamespace(device=torch.device(place)) for place in ("cpu", "xpu:1", "xpu:0")
    ]
    found = devices_of(tensors)
    assert found == Devices("xpu", (torch.device("xpu", 0), torch.device("xpu", 1)))
    assert (found.backends, found.asynchronous) == ("cpu:gloo,xpu:xccl", True)
    assert (Devices().backends, Devices().asynchronous) == ("gloo", False)


def test_a_setting_that_ends_processes_stays_and_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When the user has set an environment variable that makes torch end processes on errors, then
    it is not changed, and a warning names it. Variables that the user has not set get the values
    that tft needs."""
    monkeypatch.setattr(os, "environ", {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"})
    with capture_logs() as logs:
        device.prepare_environment(Devices("cuda", (torch.device("cuda", 0),)))
    assert [line["variable"] for line in logs] == ["TORCH_NCCL_ASYNC_ERROR_HANDLING=3"]
    assert os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == "0"


def test_a_slow_abort_does_not_cut_the_connections_of_later_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When other groups are formed while an abort of device groups is still going on, then the
    abort cuts no connection when it ends. An abort that ends before cuts gloo's connections, once.
    """
    begun, goes_on, cuts = threading.Event(), threading.Event(), []

    def abort(groups: object) -> None:
        begun.set()
        assert goes_on.wait(30)

    monkeypatch.setattr(device, "abort", abort)
    monkeypatch.setattr("tft_pytorch.groups.cut", lambda spared, *_, **__: cuts.append(spared))
    groups = Groups()
    groups._devices = Devices("xpu", (torch.device("xpu", 0),))
    first, second = frozenset({1}), frozenset({2})
    for later in (second, first):
        begun.clear()
        goes_on.clear()
        groups._spared = first
        groups.quiesce()
        assert begun.wait(30)
        groups.quiesce()  # a second call starts no second abort
        assert groups._aborting is not None
        groups._spared = later
        goes_on.set()
        groups._aborting.join(30)
        assert cuts == ([] if later is second else [first])


def group_of_two_backends() -> tuple[dist.ProcessGroup, Any]:  # Any: torch has no types here
    """
    Return a group of one rank whose default backend is that of the CPU, as torch makes it for XPU,
    and the backend of its devices.
    """
    kinds, store = dist.ProcessGroup.BackendType, HashStore()
    group = dist.ProcessGroup(store, 0, 1)
    for kind, name in ((kinds.GLOO, "cpu"), (kinds.XCCL, "xpu")):
        backend = dist.ProcessGroupGloo(PrefixStore(name, store), 0, 1, timedelta(seconds=30))
        group._register_backend(torch.device(name), kind, backend)
    group._set_default_backend(kinds.GLOO)
    return group, backend


def test_collectives_of_a_device_are_counted_beside_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the default backend of a group is gloo and its device has another one, then a collective
    on the device is counted. The window does not close over it after an abort, however often it is
    closed."""
    group, of_device = group_of_two_backends()
    monkeypatch.setattr(distributed_c10d, "_pg_names", {group: "0"})
    monkeypatch.setattr(Devices, "synchronize", lambda self: None)
    groups = Groups()
    groups._devices = Devices("xpu", (torch.device("xpu", 0),))
    groups.synchronize(closing=False)
    of_device.allreduce([torch.zeros(1)]).wait()
    groups._stopped = True  # the all-reduce may have been aborted
    for _ in range(2):
        with pytest.raises(CalledOff):
            groups.synchronize(closing=True)


def test_groups_whose_aborts_wait_for_each_other_are_aborted() -> None:
    """When the abort of a group waits until that of another one has begun, then both are aborted."""
    both = threading.Barrier(2, timeout=20)
    groups: list[Any] = [SimpleNamespace(abort=both.wait) for _ in range(2)]
    device.abort(groups)
    assert not both.broken


def test_groups_are_aborted_without_further_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the system has no more threads, then groups are aborted one after the other."""

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    aborted: list[int] = []
    monkeypatch.setattr(threading.Thread, "start", refused)
    groups: list[Any] = [
        SimpleNamespace(abort=lambda n=number: aborted.append(n)) for number in range(2)
    ]
    device.abort(groups)
    assert aborted == [0, 1]


def test_groups_that_cannot_be_discarded_are_not_taken_for_discarded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When the abort of the groups fails, then discarding them fails with the same error."""

    def abort(groups: object) -> None:
        raise RuntimeError("the communicator cannot be reached")

    monkeypatch.setattr(device, "abort", abort)
    with pytest.raises(RuntimeError, match="cannot be reached"):
        device.discard(Devices("xpu", (torch.device("xpu", 0),)))


OF_MEGATRON = frozenset(
    {
        "get_cuda_rng_tracker", "cuda_rng_state", "cuda_graph_impl", "enable_cuda_graph",
        "external_cuda_graph", "nccl_communicator_config_path",
    }
)  # fmt: skip
"""Names in Megatron's own code that contain a kind of device but are used on every kind."""


def test_only_one_file_of_the_adaptors_knows_a_kind_of_device() -> None:
    """When the code of the adaptors for torch is read, then only `device.py` names a kind of device
    or its backend. Megatron's own names are an exception."""
    found = []
    for path in sorted(ROOT.glob("adaptors/tft_pytorch/*.py")) + sorted(
        ROOT.glob("adaptors/tft_megatron/*.py")
    ):
        if path.name == "device.py":
            continue
        tree = ast.parse(path.read_text())
        docs = {
            ast.get_docstring(node, clean=False)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        }
        for node in ast.walk(tree):
            words = [getattr(node, each, None) for each in ("id", "attr", "arg", "name", "value")]
            found += [
                f"{path.name}: {word}"
                for word in words
                if isinstance(word, str)
                and word not in docs | OF_MEGATRON
                and re.search(r"cuda|nccl|hccl|xccl|\bnpu\b|\bxpu\b", word, re.IGNORECASE)
            ]
    assert found == []


def test_a_job_on_a_device_says_how_little_was_tested(capsys: pytest.CaptureFixture[str]) -> None:
    """When training begins on a device other than the CPU, then one line says how little was tested
    on real devices. On the CPU nothing is said."""
    device.tell_unseen(Devices())
    device.tell_unseen(Devices("npu", (torch.device("cuda", 0),)))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "tft: recovery on npu devices was tested on a simulated device and on one"
    )


@pytest.mark.parametrize("megabytes", [128, pytest.param(1024, marks=pytest.mark.soak)])
def test_a_source_needs_two_pieces_of_memory_for_each_receiver(megabytes: int) -> None:
    """When four receivers fetch a shard that is on a device at the same time, then the host memory
    of the source grows only by a few pieces for each receiver, not by the whole shard."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.adaptors.give", "the-job", str(megabytes)],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as source:  # fmt: skip
        try:
            assert source.stdout is not None
            host, _, port = source.stdout.readline().strip().rpartition(":")
            before = resident(source.pid)
            digests: list[str] = []
            threads = [
                threading.Thread(target=lambda: digests.append(dropped(host, int(port))))
                for _ in range(4)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert (len(digests), len(set(digests))) == (4, 1)
            assert resident(source.pid) - before < 16 << 20
        finally:
            source.kill()


def resident(pid: int) -> int:
    """
    Return the largest number of bytes that a process has had in memory so far.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def dropped(host: str, port: int) -> str:
    """
    Fetch a shard, drop its content, and return a digest of it.
    """
    with socket.create_connection((host, port), timeout=60) as client:

        def read(views: list[memoryview]) -> int:
            return client.recvmsg_into(views)[0]

        client.sendall(frame(Hello(job="the-job", rank=1, shard="dense", step=3)))
        offer = read_frame(read, FROM_SERVER)
        assert isinstance(offer, ShardOffer)
        found = xxhash.xxh3_128()
        for chunk in chunks(offer.size, 1):
            client.sendall(frame(Request(offset=chunk.offset, length=chunk.length)))
            left = chunk.length
            while left:
                got = client.recv(min(left, 1 << 20))
                assert got
                found.update(got)
                left -= len(got)
            digest = 16
            while digest:
                digest -= len(client.recv(digest))
        return found.hexdigest()
