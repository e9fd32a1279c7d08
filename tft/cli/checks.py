"""
The checks of `tft doctor`. Each check tries on this machine something that a job needs, and returns
what it has found.
"""

import asyncio
import fcntl
import os
import platform
import resource
import secrets
import select
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from tft.bus.base import Bus, Heard, NotLetIn
from tft.bus.ports import free_address
from tft.bus.zeromq import open_bus
from tft.clock import SystemClock
from tft.config import inherited_environment
from tft.errors import TftError, UsageError
from tft.files import sync, write_whole
from tft.keys import read_keys, transfer_files
from tft.limits import LEAST, USUAL
from tft.page import Page
from tft.parent_death import parent_death_tie
from tft.plugins import ADAPTORS, FAILURES, GROUPS, check_complete, extensions, load_adaptor
from tft.protocol.messages import Lead
from tft.stopped import is_stopped

Result = Literal["ok", "warning", "failed"]

_LIMIT = 10.0  # seconds for a process of this check to start, or to end
_ANSWER = 3.0  # seconds for a broker to answer
_ROUNDS = 20  # messages that are sent through the broker, one after another
_MIB = 1024 * 1024
_SHARED = 64 * _MIB
"""Bytes that should be free in /dev/shm. Container runtimes give 64 MiB by default, and that is
known to be too little for the data loaders of PyTorch and for NCCL."""
_DISK = 1024 * _MIB
"""Bytes that should be free for a run directory, because of the logs and the story of a long
run."""
_PACKAGES = ("torch", "megatron-core", "mindspore", "numpy", "pyzmq", "msgspec", "msgpack")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """
    What one check has found.
    """

    check: str
    result: Result
    text: str
    """What was found and, if it is not ok, what to do."""


def ok(check: str, text: str) -> Finding:
    """
    Return a finding without a problem.
    """
    return Finding(check=check, result="ok", text=text)


def warning(check: str, text: str) -> Finding:
    """
    Return a finding about a problem with which some jobs cannot run, or run badly.
    """
    return Finding(check=check, result="warning", text=text)


def failed(check: str, text: str) -> Finding:
    """
    Return a finding about a problem with which no job can run.
    """
    return Finding(check=check, result="failed", text=text)


# ---------------------------------------------------------------- versions


def versions() -> Finding:
    """
    Name the versions of tft, Python and the system.
    """
    told = f"tft {version('tft-bus')}, Python {platform.python_version()} ({sys.executable}), "
    told += f"{platform.system()} {platform.release()}"
    if platform.system() != "Linux":
        return failed("versions", f"{told}: tft runs on Linux only")
    return ok("versions", told)


def packages() -> Finding:
    """
    Name the versions of the frameworks, and of the packages that tft needs.
    """
    told = []
    for name in _PACKAGES:
        try:
            told.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            told.append(f"{name} not installed")
    return ok("packages", ", ".join(told))


# ---------------------------------------------------------------- the machine


def open_files() -> Finding:
    """
    Check the limit of open files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    told = f"{soft} open files (hard limit: {most})"
    if hard != resource.RLIM_INFINITY and hard < LEAST:
        return failed(
            "open files", f"{told}; {LEAST} are needed: raise the hard limit (ulimit -Hn)"
        )
    if hard != resource.RLIM_INFINITY and hard < USUAL:
        return warning(
            "open files", f"{told}; a process of a job usually has {USUAL}: raise the hard limit"
        )
    return ok("open files", told)


def loopback() -> Finding:
    """
    Check that a broker can listen at two neighbouring ports of this machine.
    """
    try:
        return ok("ports", f"{free_address('127.0.0.1')} and the next port are free for a broker")
    except UsageError as refused:
        return failed("ports", str(refused))


def monotonic_clock() -> Finding:
    """
    Check that this process and a process that it starts read the same clock.
    """
    clock = SystemClock()
    before = clock.now()
    command = [sys.executable, "-I", "-S", "-c", "import time; print(time.monotonic())"]
    try:
        other = float(subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT, check=True
        ).stdout)  # fmt: skip
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return failed("clock", f"no process can be started to compare clocks: {error}")
    after = clock.now()
    if before <= other <= after:
        return ok("clock", "processes of this machine read the same CLOCK_MONOTONIC")
    return failed(
        "clock",
        f"a process that was started between {before:.3f} s and {after:.3f} s read {other:.3f} s "
        "from CLOCK_MONOTONIC: run all processes of a node in one time namespace",
    )


def shared_memory() -> Finding:
    """
    Check that a rank and its agent can share memory.
    """
    try:
        page = Page.create()
        page.move(1, window=False, stamp=0.0)
        page.close()
    except OSError as error:
        return failed(
            "shared memory",
            f"memfd_create or mmap fails ({error.strerror}): allow both in the sandbox of this "
            "machine, such as seccomp",
        )
    return ok("shared memory", "memfd_create and mmap work")


def dev_shm() -> Finding:
    """
    Check the free space in /dev/shm. Frameworks use it, although tft itself does not.
    """
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return warning("/dev/shm", f"cannot be read ({error.strerror}): data loaders may need it")
    told = f"{free / _MIB:.0f} MiB free"
    if free < _SHARED:
        return warning(
            "/dev/shm",
            f"{told}: data loaders of PyTorch and NCCL may need more; in a container raise "
            "--shm-size",
        )
    return ok("/dev/shm", told)


def processes() -> Finding:
    """
    Check that this process can do what an agent does with processes: watch them through a pidfd,
    read their state and environment in /proc, stop and end them.
    """
    command = [sys.executable, "-I", "-S", "-c", "import signal; signal.pause()"]
    try:
        child = subprocess.Popen(command, start_new_session=True)
    except OSError as error:
        return failed("processes", f"no process can be started: {error.strerror}")
    try:
        return _watched(child)
    except OSError as error:
        return failed(
            "processes",
            f"a child process cannot be watched ({error.strerror}; {error.filename or 'pidfd'}): "
            "tft needs pidfd_open and pidfd_send_signal (Linux 5.3) and a readable /proc",
        )
    finally:
        child.kill()
        child.wait()


def _watched(child: "subprocess.Popen[bytes]") -> Finding:
    watched = os.pidfd_open(child.pid)
    try:
        Path(f"/proc/{child.pid}/environ").read_bytes()
        child.send_signal(signal.SIGSTOP)
        # returns when the kernel has reported that the child is stopped
        os.waitpid(child.pid, os.WUNTRACED)
        if not is_stopped(child.pid):
            return failed("processes", "/proc does not show that a process is stopped")
        signal.pidfd_send_signal(watched, signal.SIGKILL)
        if not select.select([watched], [], [], _LIMIT)[0]:
            return failed("processes", f"a killed process has not ended within {_LIMIT:.0f} s")
    finally:
        os.close(watched)
    return ok("processes", "can be watched (pidfd), read in /proc, stopped and ended")


# ---------------------------------------------------------------- the run directory


def run_directory(directory: Path) -> Finding:
    """
    Check that files can be written, locked and synced where the run directory is, or will be made.
    """
    place = directory
    while not place.exists() and place != place.parent:
        place = place.parent
    name = "run directory"
    if not place.is_dir():
        return failed(name, f"{place} is not a directory: choose another --run-dir")
    probe = place / f".tft-doctor-{secrets.token_hex(4)}"
    try:
        write_whole(probe, "tft doctor\n")
        with probe.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        sync(probe)
        sync(place)
        os.link(probe, probe.with_suffix(".link"))
        free = shutil.disk_usage(place).free
    except OSError as error:
        return failed(
            name,
            f"{place}: {error.strerror}: choose a --run-dir on a file system on which you can "
            "write, lock, link and sync files",
        )
    finally:
        for left in (probe, probe.with_suffix(".link")):
            with suppress(OSError):
                left.unlink(missing_ok=True)
    told = f"{place} can be written, {free / 1024 / _MIB:.1f} GiB free"
    if free < _DISK:
        return warning(name, f"{told}: logs and checkpoints may need more")
    return ok(name, told)


# ---------------------------------------------------------------- keys, adaptor, plugins


def keys(curve: Path) -> Finding:
    """
    Check that all keys of a job can be read, by their owner only.
    """
    try:
        whole = (curve / "broker.key").exists()
        read_keys(curve, broker=whole)
        transfer_files(curve)
    except UsageError as refused:
        return failed("keys", str(refused))
    if not whole:
        return warning("keys", f"{curve} has no broker.key: node 0 needs it, other nodes do not")
    return ok("keys", f"{curve} has all keys, which only their owner can read")


def adaptor(name: str) -> Finding:
    """
    Check that an adaptor has all required hooks, and that its framework can be imported.
    """
    try:
        with redirect_stdout(sys.stderr):  # frameworks print when they are imported
            loaded = load_adaptor(name)
            check_complete(loaded, name)
            loaded.hook.tft_preload()
    except TftError as refused:
        return failed("adaptor", str(refused))
    except FAILURES as error:  # importing a framework may raise any exception
        what = f"{type(error).__name__}: {error}"
        return failed("adaptor", f"the framework of {name!r} cannot be imported: {what}")
    return ok("adaptor", f"{name} has all required hooks, and its framework can be imported")


def plugins() -> list[Finding]:
    """
    Check all extensions except adaptors. Return a finding for each extension that cannot be used,
    or one finding if all can be used.
    """
    with redirect_stdout(sys.stderr):
        found = extensions([group for group in GROUPS if group != ADAPTORS])
    broken = [each for each in found if each.problem]
    if not broken:
        names = ", ".join(sorted({each.name for each in found}))
        return [ok("plugins", f"all can be used: {names}")]
    return [
        failed(
            "plugins",
            f"{each.name} of {each.group} ({each.package or 'an unknown package'}): "
            f"{each.problem}; mend or uninstall it",
        )
        for each in broken
    ]


# ---------------------------------------------------------------- the broker


def broker(address: str, curve: Path | None) -> Finding:
    """
    Check that messages go through a broker and come back.
    """
    try:
        seconds = asyncio.run(_round_trip(address, curve))
    except UsageError as refused:
        return failed("broker", str(refused))
    except ConnectionError as silent:
        return failed("broker", str(silent))
    encrypted = "encrypted" if curve is not None else "not encrypted"
    return ok("broker", f"{address} returns a message in {1000 * seconds:.2f} ms, {encrypted}")


def own_broker(curve: Path | None) -> Finding:
    """
    Start a broker, check that messages go through it, and end it.
    """
    try:
        with started_broker(curve) as address:
            found = broker(address, curve)
    except ConnectionError as refused:
        return failed("broker", str(refused))
    return Finding(
        check="broker",
        result=found.result,
        text=f"started for this check: {found.text}",
    )


@contextmanager
def started_broker(curve: Path | None) -> Iterator[str]:
    """
    Run a broker while the context is open, and yield its address. Raises `ConnectionError` with
    the error that the broker has printed if the broker does not start.
    """
    keyed = [] if curve is None else ["--curve", str(curve)]
    with subprocess.Popen(
        [sys.executable, "-m", "tft", "broker", *keyed],
        stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**inherited_environment(), **parent_death_tie()},
    ) as process:  # fmt: skip
        try:
            assert process.stderr is not None
            said = ""
            if select.select([process.stderr], [], [], _LIMIT)[0]:
                said = process.stderr.readline().strip()
            if not said.startswith("broker at "):
                if said:  # the broker has printed an error, and will end after it
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(_LIMIT)
                process.kill()
                told = [said, *process.stderr.read().splitlines()]
                # the last line of a traceback is the one that says what has happened
                last = next((line for line in reversed(told) if line.strip()), "it says nothing")
                raise ConnectionError(f"a broker does not start: {last}")
            yield said.split()[-1]
        finally:
            process.kill()


async def _round_trip(address: str, curve: Path | None) -> float:
    """
    Return how many seconds a message takes through a broker and back (the median of `_ROUNDS`).

    Raises `ConnectionError` if the broker does not answer, or refuses this process. Raises
    `UsageError` if the address or the keys cannot be used.
    """
    mark = secrets.token_hex(4)
    topic = f"doctor.{mark}".encode()  # a topic to which only this check subscribes
    clock, times = SystemClock(), list[float]()
    async with open_bus(
        address, job=f"doctor-{mark}", sender=f"ask.{mark}", topics=[topic], curve=curve
    ) as bus:
        try:
            async with asyncio.timeout(_ANSWER):
                await _connected(bus, topic)
                for number in range(_ROUNDS):
                    sent = clock.now()
                    bus.publish(topic, Lead(epoch=number, heard={}))
                    while not isinstance(await bus.receive(), Heard):
                        pass
                    times.append(clock.now() - sent)
        except TimeoutError:
            raise ConnectionError(
                f"the broker at {address} has not answered for {_ANSWER:.0f} s: check that it "
                "runs, and that this machine reaches its port and the next one"
            ) from None
    return statistics.median(times)


async def _connected(bus: Bus, topic: bytes) -> None:
    """
    Wait until the broker knows that this process is subscribed to `topic`. Raises `ConnectionError`
    if the broker refuses this process.
    """
    listening = asyncio.ensure_future(bus.listened(topic))
    while not listening.done():
        receiving = asyncio.ensure_future(bus.receive())
        await asyncio.wait({listening, receiving}, return_when=asyncio.FIRST_COMPLETED)
        if not receiving.done():
            receiving.cancel()
        elif isinstance(refused := receiving.result(), NotLetIn):
            listening.cancel()
            raise ConnectionError(refused.why)
