"""
The broker: each message that is published at PORT is sent, at PORT + 1, to its subscribers.

The broker holds no state but the subscriptions. After a restart of the broker, the participants
subscribe again by themselves.
"""

import ipaddress
import random
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from errno import EADDRINUSE
from pathlib import Path

import zmq

from tft.bus.zap_auth import ZapAuthenticator
from tft.bus.zeromq import Socket, tuned
from tft.errors import AddressTaken, UsageError
from tft.keys import read_keys

LEAST_DESCRIPTORS = 256
"""The number of open files for 100 participants with two connections each, and for the broker
itself."""

BACKLOG = 4096
"""The number of connections that may wait to be accepted. After a restart all participants connect
at once."""

_ENDINGS = {signal.SIGTERM, signal.SIGINT}


def main(
    host: str,
    port: int,
    *,
    insecure: bool = False,
    curve: Path | None = None,
    opened: Callable[[int], None] | None = None,
) -> None:
    """
    Forward messages at `host`, ports `port` and `port` + 1, until SIGTERM or SIGINT. Call this on
    the main thread.

    Port 0 picks a free pair of ports. `opened` is called with the first port once both ports accept
    connections. With the directory `curve`, only participants with the keys of that job are
    accepted, and all bytes are encrypted.

    Raises `AddressTaken` when a port is in use. Raises `UsageError` for an address that does not
    belong to this machine, for an address other than loopback without `insecure` or `curve`, for
    keys that cannot be used, and when the process may open too few files.
    """
    keys = None if curve is None else read_keys(curve, broker=True)
    _refuse_open_door(host, allowed=insecure or keys is not None)
    _make_room()
    context: zmq.Context[Socket] = zmq.Context()
    with (
        _ended_by_signal(context),
        tuned(context, zmq.XSUB) as publishers,
        tuned(context, zmq.XPUB) as subscribers,
    ):
        publishers.setsockopt(zmq.BACKLOG, BACKLOG)
        subscribers.setsockopt(zmq.BACKLOG, BACKLOG)
        authenticator = (
            None if keys is None else ZapAuthenticator(context, keys, publishers, subscribers)
        )
        try:
            taken = _bind(publishers, subscribers, host, port)
        except UsageError:
            if authenticator is not None:
                authenticator.close()
            raise
        if authenticator is not None:
            authenticator.open()
        if opened is not None:
            opened(taken)
        with suppress(zmq.ContextTerminated):
            zmq.proxy(publishers, subscribers)


def is_loopback(host: str) -> bool:
    """
    Return whether only this machine can reach `host`. Of all names, only `localhost` counts as
    loopback.
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# ---------------------------------------------------------------- before anything is opened


def _refuse_open_door(host: str, *, allowed: bool) -> None:
    if allowed or is_loopback(host):
        return
    raise UsageError(
        f"a broker at {host} would take orders from anybody who can reach it: bind it to 127.0.0.1, "
        "give it keys with --curve, or allow it with --insecure on a network that only the job's machines "
        "are on"
    )


def _make_room() -> None:
    """
    Raise the limit of open files as far as possible. Every connection is an open file. When none is
    left, the broker would spin without accepting or reporting anything, and libzmq aborts the
    process when libzmq itself needs a file.

    Raises `UsageError` when fewer than `LEAST_DESCRIPTORS` files are allowed.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < LEAST_DESCRIPTORS:
        raise UsageError(
            f"the broker may open only {most} files and needs {LEAST_DESCRIPTORS} or more, two for "
            "each participant of a job: raise the hard limit (ulimit -Hn)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


# ---------------------------------------------------------------- the ports


def _bind(publishers: Socket, subscribers: Socket, host: str, port: int) -> int:
    """
    Bind both sockets. Return the port of the first socket.
    """
    for candidate in [port] if port else unused_ports():
        try:
            _bind_one(publishers, host, candidate)
            _bind_one(subscribers, host, candidate + 1)
        except AddressTaken:
            with suppress(zmq.ZMQError):  # raised when `publishers` itself could not be bound
                publishers.unbind(f"tcp://{host}:{candidate}")
            if port:
                raise
        else:
            return candidate
    raise AddressTaken(f"no two neighbouring ports of {host} are free")


def _bind_one(socket: Socket, host: str, port: int) -> None:
    try:
        socket.bind(f"tcp://{host}:{port}")
    except zmq.ZMQError as error:
        if error.errno == EADDRINUSE:
            raise AddressTaken(
                f"the broker cannot listen at {host}:{port}: another process does; "
                "end it, or choose another port (the broker takes that one and the next)"
            ) from None
        raise UsageError(f"the broker cannot listen at {host}:{port}: {error}") from None


def unused_ports() -> list[int]:
    """
    Return up to 100 ports to try, in random order. The kernel gives none of them to outgoing
    connections, unless no other port exists.

    While a broker is being started again, its peers try to connect to its port many times a second.
    If the kernel could choose the same port for a peer's end of the connection, a peer would
    eventually connect to itself, and the broker would find its port taken.
    """
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [port for port in range(10_000, 65_535) if port + 1 < low or port > high]
    ports = ports or list(range(10_000, 65_535))
    return random.sample(ports, k=min(100, len(ports)))


# ---------------------------------------------------------------- the end


@contextmanager
def _ended_by_signal(context: zmq.Context[Socket]) -> Iterator[None]:
    """
    Terminate the context, and with it the proxy, at SIGTERM or SIGINT.

    A signal handler would not work. Python runs the handler for a signal that comes while the proxy
    is not waiting in the kernel only when the proxy returns, and the proxy never returns.
    """

    def wait() -> None:
        signal.sigwait(_ENDINGS)
        context.term()

    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDINGS)
    threading.Thread(target=wait, name="ended-by-signal", daemon=True).start()
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
