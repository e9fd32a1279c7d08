"""
The broker of the bus: a process that forwards the messages of a job's processes.

Participants (processes that are connected to the bus) send their messages to port PORT. The broker
forwards each message to the participants that are subscribed to the message's topic. They receive
it from port PORT + 1. The broker stores no messages, only subscriptions. After a restart of the
broker, the participants connect and subscribe again by themselves.
"""

import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from errno import EADDRINUSE
from pathlib import Path

import zmq

from tft.addresses import is_loopback
from tft.bus.sockets import Socket, tuned
from tft.bus.zap_auth import ZapAuthenticator
from tft.errors import AddressTaken, UsageError
from tft.keys import read_keys
from tft.limits import raise_open_files

BACKLOG = 4096
"""The number of connections that may wait to be accepted. It is large because after a restart of
the broker all participants connect at once."""

_ENDINGS = {signal.SIGTERM, signal.SIGINT}
"""The signals that end the broker."""


def main(
    host: str,
    port: int,
    *,
    insecure: bool = False,
    curve: Path | None = None,
    opened: Callable[[int], None] | None = None,
) -> None:
    """
    Run the broker at `host`, ports `port` and `port` + 1, until SIGTERM or SIGINT arrives.

    Call this function on the main thread. With `port` 0, the broker picks a free pair of ports.
    When both ports accept connections, `opened` is called with the number of the first port.
    `curve` is a directory with keys. With `curve`, the broker accepts only participants that have
    these keys, and all bytes are encrypted.

    Raises `AddressTaken` when a port is in use. Raises `UsageError` when `host` is not an address
    of this machine. Without `insecure` and `curve`, also raises `UsageError` when `host` is not a
    loopback address. Also raises `UsageError` when the keys cannot be used, or when the process may
    open too few files.
    """
    keys = None if curve is None else read_keys(curve, broker=True)
    _refuse_open_door(host, allowed=insecure or keys is not None)
    raise_open_files("the broker", highest=True)
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


# ---------------------------------------------------------------- checks before any port is opened


def _refuse_open_door(host: str, *, allowed: bool) -> None:
    if allowed or is_loopback(host):
        return
    raise UsageError(
        f"a broker at {host} would take orders from anybody who can reach it: bind it to "
        "127.0.0.1, give it keys with --curve, or allow it with --insecure on a network that only "
        "the job's machines are on"
    )


# ---------------------------------------------------------------- the ports


def _bind(publishers: Socket, subscribers: Socket, host: str, port: int) -> int:
    """
    Bind `publishers` to a port and `subscribers` to the next port. Return the first port.

    With `port` 0, tries the ports that `unused_ports` returns. Raises `AddressTaken` when the ports
    are in use.
    """
    for candidate in [port] if port else unused_ports():
        try:
            _bind_one(publishers, host, candidate)
            _bind_one(subscribers, host, candidate + 1)
        except AddressTaken:
            # release the first port, so that the next try can use it. If the first port itself was
            # in use, the socket is not bound to it, and `unbind` raises an error
            with suppress(zmq.ZMQError):
                publishers.unbind(f"tcp://{host}:{candidate}")
            if port:
                raise
        else:
            return candidate
    raise AddressTaken(
        f"the broker needs two neighbouring free ports on {host}, and has found none: choose a "
        "port with --port"
    )


def _bind_one(socket: Socket, host: str, port: int) -> None:
    try:
        socket.bind(f"tcp://{host}:{port}")
    except zmq.ZMQError as error:
        if error.errno == EADDRINUSE:
            raise AddressTaken(
                f"the broker cannot listen at {host}:{port}: another process listens there; "
                "end that process, or choose another port (the broker takes that port and the next)"
            ) from None
        raise UsageError(f"the broker cannot listen at {host}:{port}: {error}") from None


def unused_ports() -> list[int]:
    """
    Return up to 100 port numbers for a broker to try, in random order.

    The ports lie outside the range from which the kernel picks ports for outgoing connections. If
    no port lies outside that range, the function picks from all ports from 10000.

    Reason: while a broker is restarted, the participants on its machine try to connect to its port
    many times a second. The kernel could pick the same port for a participant's own end of the
    connection. The participant would then connect to itself, and the broker would find its port in
    use.
    """
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [port for port in range(10_000, 65_535) if port + 1 < low or port > high]
    ports = ports or list(range(10_000, 65_535))
    return random.sample(ports, k=min(100, len(ports)))


# ---------------------------------------------------------------- the end of the broker


@contextmanager
def _ended_by_signal(context: zmq.Context[Socket]) -> Iterator[None]:
    """
    Terminate the ZeroMQ context at SIGTERM or SIGINT. This also ends `zmq.proxy`, the endless
    forwarding loop of the broker.

    A thread waits for the signals, because a Python signal handler would not work: if a signal
    arrives while `zmq.proxy` runs C code, Python calls the handler only after `zmq.proxy` returns.
    But `zmq.proxy` does not return by itself.
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
