"""
The sending end of a transfer: a server from which the other ranks of a job fetch this rank's
shards.

One thread accepts connections. Each connection has a thread of its own, and one more thread while
the shard is being prepared. The training thread is not involved. The server sends the bytes
directly from the memory of the shard, and computes the digests while it sends. Bytes on a device
are first copied to host memory.
"""

import hmac
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress

import structlog

from tft.errors import InternalError, MalformedMessage, OrderRefused, UsageError
from tft.limits import no_thread
from tft.protocol.messages import VERSION
from tft.spi.types import ShardPayload
from tft.transfer.staging import run_of
from tft.transfer.tls import Tls, reader, sender
from tft.transfer.wire import (
    FROM_CLIENT,
    Hello,
    Preparing,
    Refusal,
    Request,
    ShardOffer,
    fingerprint,
    frame,
    read_frame,
    send_chunk,
)

log = structlog.get_logger()

Give = Callable[[str, int], ShardPayload]

_MANNERS = 5.0
"""How many seconds the server waits for the next bytes of a client that has not sent its whole
`Hello` yet."""
_SIGN_OF_LIFE = 1.0
"""The time in seconds between two signs of life (`Preparing` messages), which the server sends to a
client while it prepares a shard. A client gives up a source that is silent for
`tft.transfer.client.PATIENCE` seconds."""
_SIGNS = 120
"""The maximum number of signs of life (`Preparing` messages) that one client gets. If the shard is
still not prepared then, the server refuses the request. The client still has time to fetch from
another source: the time limit `repair` of its order is longer."""
_VANISHED = 30
"""The time in seconds after which the server closes the connection to a client whose machine does
not answer, or which reads no bytes."""
_LEAVING = 2.0
"""The time in seconds that `close` waits for each thread of a connection. A thread takes that long
only if it runs code of the adaptor (called through `give`), which `close` cannot interrupt."""
_BREATH = 0.1
"""The time in seconds before the server tries again to accept a connection or to start its thread.
An attempt fails when the process has no more file descriptors, or the system no more threads."""
_STARTS = 20
"""The maximum number of attempts to start the thread of a connection. After the last attempt, the
server closes the connection, and the client asks another source. The attempts take less time than a
client waits for a silent source."""


class ShardServer:
    """
    A server that sends this rank's shards to clients that know the job's name.

    With `tls`, a client must also have the job's keys. `give(shard, step)` returns the content of a
    shard at the end of `step`. The server calls it once for each client, on a thread of its own, so
    several calls may run at once.

    The server reads the memory of the returned payload until the client disconnects. Until then
    this memory must hold the state at the end of `step`. If `give` raises `OrderRefused`, the
    server sends the message of the exception to the client.
    """

    def __init__(self, host: str, job: str, give: Give, tls: Tls | None = None) -> None:
        self._host = host
        self.tls = tls
        self._job = job
        self._give = give
        self._listener: socket.socket | None = None
        self._accepting: threading.Thread | None = None
        self._guests: list[tuple[threading.Thread, socket.socket]] = []
        self._closing = threading.Event()

    @property
    def address(self) -> str:
        """
        The address HOST:PORT of the server. Raises `InternalError` if the server has not been
        started.
        """
        if self._listener is None:
            raise InternalError("the shard server has no address before it is started")
        return f"{self._host}:{self._listener.getsockname()[1]}"

    def start(self) -> None:
        """
        Listen at a free port of the host, and start to accept connections.

        Raises `UsageError` when the server cannot listen, for example because the host is not an
        address of this machine.
        """
        try:
            family = socket.getaddrinfo(self._host, 0, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((self._host, 0), family=family, backlog=1024)
        except OSError as error:
            raise UsageError(
                f"the shards of this rank cannot be served at {self._host}: {error}; give a "
                "--host that is an address of this machine"
            ) from None
        self._accepting = threading.Thread(
            target=self._accept, args=(self._listener,), name="tft-shards", daemon=True
        )
        try:
            self._accepting.start()
        except RuntimeError as error:
            self._accepting = None
            self._listener.close()
            raise UsageError(
                f"the shards of this rank cannot be served: {no_thread(error)}"
            ) from None

    def close(self) -> None:
        """
        Close every connection and end the server's threads. A second call has no effect.
        """
        self._closing.set()
        if self._listener is None or self._accepting is None:
            return
        # shut the listening socket down before it is closed: `close` alone would not wake the
        # thread that waits in `accept`
        _end(self._listener)
        self._accepting.join()
        self._listener.close()
        for _, connection in self._guests:
            _end(connection)
        for thread, _ in self._guests:
            thread.join(_LEAVING)
            if thread.is_alive():
                log.warning("shard_server_left_behind", thread=thread.name)

    def _accept(self, listener: socket.socket) -> None:
        while not self._closing.is_set():
            try:
                connection, peer = listener.accept()
                # do no TLS handshake here: the thread of the connection does it later, so a slow
                # client does not block other clients
                if self.tls is not None:
                    connection = self.tls.giving.wrap_socket(
                        connection, server_side=True, do_handshake_on_connect=False
                    )
            except OSError as error:
                if not self._closing.is_set():
                    log.warning("shard_server_cannot_accept", error=str(error))
                    self._closing.wait(_BREATH)
                continue
            name = f"{peer[0]}:{peer[1]}"
            thread = threading.Thread(
                target=self._host_guest,
                args=(connection, name),
                name=f"tft-shards-{name}",
                daemon=True,
            )
            if not self._started(thread, name):
                connection.close()
                continue
            self._guests = [guest for guest in self._guests if guest[0].is_alive()]
            self._guests.append((thread, connection))

    def _started(self, thread: threading.Thread, peer: str) -> bool:
        """
        Start the thread of a connection, and return True. If the system has no more threads, try
        again for a while. Return False if the thread could not be started.
        """
        for attempt in range(_STARTS):
            try:
                thread.start()
            except RuntimeError as error:
                if attempt == 0:
                    log.warning("shard_client_waits", peer=peer, why=no_thread(error))
                if self._closing.wait(_BREATH):
                    return False
            else:
                return True
        log.warning(
            "shard_client_dropped", peer=peer, why="no thread could be started for this client"
        )
        return False

    def _host_guest(self, connection: socket.socket, peer: str) -> None:
        try:
            self._serve(connection, peer)
        except MalformedMessage as error:
            log.warning("shard_client_dropped", peer=peer, why=str(error))
        except TimeoutError:
            log.warning("shard_client_dropped", peer=peer, why="the client was silent for too long")
        except (EOFError, OSError):
            # log nothing: a client closes the connection when it has the shard, or when it has
            # failed, and a client that has failed logs the reason itself
            pass
        finally:
            connection.close()

    def _serve(self, connection: socket.socket, peer: str) -> None:
        read, send = reader(connection), sender(connection)
        _prepare(connection)
        connection.settimeout(_MANNERS)
        _shake_hands(connection)
        match read_frame(read, FROM_CLIENT):
            case Hello() as hello:
                answer = self._prepared(hello, peer, connection)
            case other:
                raise MalformedMessage(
                    f"the client sent {other!r:.80} as its first message, not a hello"
                )
        if isinstance(answer, Refusal):
            connection.sendall(frame(answer))
            return
        run = run_of(answer.buffers)
        offer = ShardOffer(
            meta=answer.meta,
            buffers=tuple((buffer.name, buffer.size) for buffer in answer.buffers),
        )
        key = fingerprint(offer)
        connection.settimeout(None)
        connection.sendall(frame(offer))
        while True:
            match read_frame(read, FROM_CLIENT):
                case Request() as chunk if chunk.offset + chunk.length <= run.size:
                    send_chunk(run, chunk, key, send)
                case other:
                    raise MalformedMessage(
                        f"the client requested {other!r:.80}, which is not a range of the "
                        f"{run.size} bytes of shard {hello.shard!r}"
                    )

    def _prepared(
        self, hello: Hello, peer: str, connection: socket.socket
    ) -> ShardPayload | Refusal:
        """
        Prepare the answer to a client and return it: the content of the shard, or a refusal.
        Meanwhile, send `Preparing` to the client, so that the client does not count this rank as
        silent.
        """
        answers: list[ShardPayload | Refusal] = []
        preparing = threading.Thread(
            target=lambda: answers.append(self._answer(hello, peer)),
            name=f"tft-prepares-{hello.shard}",
            daemon=True,
        )
        try:
            preparing.start()
        except RuntimeError as error:
            # prepare the shard on this thread, which can send no signs of life meanwhile. If this
            # takes long, the client turns to another source
            log.warning("shard_prepared_without_thread", peer=peer, why=no_thread(error))
            return self._answer(hello, peer)
        for _ in range(_SIGNS):
            preparing.join(_SIGN_OF_LIFE)
            if not preparing.is_alive():
                return answers[0]
            connection.sendall(frame(Preparing()))
        log.warning("shard_not_prepared", shard=hello.shard, step=hello.step, to=hello.rank)
        return Refusal(
            why=f"shard {hello.shard!r} was not ready after {_SIGNS * _SIGN_OF_LIFE:.0f} s"
        )

    def _answer(self, hello: Hello, peer: str) -> ShardPayload | Refusal:
        if not hmac.compare_digest(hello.job.encode(), self._job.encode()):
            log.warning(
                "shard_client_refused", peer=peer, of=hello.rank, why="the client named another job"
            )
            return Refusal(why="this port serves another job")
        if hello.version != VERSION:
            return Refusal(
                why=f"the protocol version is {VERSION} here, but {hello.version} at the client: "
                "start all ranks from one installation of tft"
            )
        try:
            return self._give(hello.shard, hello.step)
        except OrderRefused as refused:
            return Refusal(why=str(refused))
        # the adaptor may raise any exception; the client gets it as the reason of the refusal
        except Exception as error:
            log.exception("shard_not_given", shard=hello.shard, step=hello.step, to=hello.rank)
            return Refusal(why=f"shard {hello.shard!r} could not be prepared: {error!r}")


def _shake_hands(connection: socket.socket) -> None:
    if not isinstance(connection, ssl.SSLSocket):
        return
    try:
        connection.do_handshake()
    except ssl.SSLError as refused:
        raise MalformedMessage(
            f"the TLS handshake with the client failed ({refused.reason}): was the client started "
            "with the same --curve?"
        ) from None


def _prepare(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A machine that vanishes does not close its connections, so this rank would keep the payload in
    # memory forever. Therefore the kernel probes an idle client, and closes the connection if the
    # client does not answer or reads nothing.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _VANISHED // 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _VANISHED // 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _VANISHED * 1000)


def _end(connection: socket.socket) -> None:
    # `shutdown` raises OSError if the connection has ended already. SSLSocket.shutdown would drop the
    # TLS state, and the thread that serves the connection would then read raw bytes.
    with suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
