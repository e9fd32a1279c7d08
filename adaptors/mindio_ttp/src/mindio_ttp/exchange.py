"""
An all-gather of facts among all ranks, independent of the program's own process groups: each rank
sends some facts about itself, and receives the facts of all ranks.

One process, the hub, serves the all-gathers. An agent starts the hub, and starts a new hub when the
hub ends. Each rank sends one line of JSON to the hub, and gets back the facts of all ranks. At the
same port the hub also offers a rendezvous store of torch (TCPStore). For clients that speak the
protocol of this store, the hub forwards bytes between the client and the store.
"""

import json
import os
import secrets
import select
import socket
import socketserver
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mindio_ttp import torch_groups

_HUB = "hub-"
"""The beginning of the names of the files by which all nodes agree on one hub (the process that
serves all-gathers). Each file contains the address and the token of a hub."""
_ANSWER = 5.0
"""The seconds within which a hub must answer the request for its token, the random text by which
the hub is recognised."""
_BLOCK = 2**16
"""The largest number of bytes that the hub forwards at a time between a client and the store of
torch."""

Body = Mapping[str, Any]
"""The facts that a rank sends about itself. Any: values that JSON can represent."""


class Hub(socketserver.ThreadingTCPServer):
    """
    The server of the all-gathers, in which ranks exchange facts about themselves. When the last
    rank of an all-gather has sent its facts, the hub sends the facts of all ranks to each rank.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 1024  # the queue is large, because all ranks may connect at the same time

    def __init__(self, host: str, port: int) -> None:
        super().__init__((host, port), _Member)
        self._turn = threading.Lock()
        self._opening = threading.Lock()
        self._store: Any = None
        """The rendezvous store of torch (TCPStore) that the hub offers. None until a client of the
        store first connects."""
        self.token = secrets.token_hex(16)
        """A random text by which this hub is recognised. Another process that listens at the same
        address later has another token, or none."""
        self._members: dict[str, dict[int, tuple[_Member, Body]]] = {}

    def gather(self, name: str, rank: int, world: int, member: "_Member", facts: Body) -> None:
        """
        Record that one more rank takes part in the all-gather `name`. When `world` ranks take part,
        send the facts of all ranks to each rank.

        `facts` are the facts of the rank `rank`, and `member` is the connection to it.
        """
        with self._turn:
            members = self._members.setdefault(name, {})
            members[rank] = (member, facts)
            if len(members) < world:
                return
            said = [[each, told] for each, (_, told) in sorted(members.items())]
            for other, _ in members.values():
                other.tell({"gathered": said})

    def torch_store(self) -> tuple[str, int]:
        """
        Return the host and the port of the rendezvous store for `torch.distributed`. The first call
        opens the store.
        """
        host = str(self.server_address[0])
        with self._opening:
            if self._store is None:
                self._store = torch_groups.open_store(host)
            return host, int(self._store.port)

    def part(self, name: str, rank: int, member: "_Member") -> None:
        """
        Remove a rank from the all-gather `name`, because the connection of the rank has ended. An
        all-gather that is not complete yet then waits until the rank joins again, for example with
        a new process.

        Do nothing if the rank has joined again over another connection than `member`.
        """
        with self._turn:
            members = self._members.get(name, {})
            if members.get(rank, (None,))[0] is member:
                del members[rank]
            if not members:
                self._members.pop(name, None)


class _Member(socketserver.StreamRequestHandler):
    server: Hub

    def handle(self) -> None:
        # A rank sends JSON, which begins with a brace. Any other client wants to use torch's store,
        # so its bytes are passed on.
        if self.connection.recv(1, socket.MSG_PEEK) not in (b"{", b""):
            return self._relay()
        name, rank = "", -1
        try:
            for line in self.rfile:
                said = json.loads(line)
                if said.get("wants") == "token":
                    self.tell({"token": self.server.token})
                    continue
                name, rank = said["name"], said["rank"]
                self.server.gather(name, rank, said["world"], self, said["facts"])
        except OSError:
            pass  # the connection was reset, for example because the process of the rank was killed
        finally:
            self.server.part(name, rank, self)

    def _relay(self) -> None:
        """
        Forward bytes in both directions between a client and torch's rendezvous store. Return when
        the connection to the client or to the store has ended.
        """
        with suppress(OSError), socket.create_connection(self.server.torch_store()) as store:
            other = {self.connection: store, store: self.connection}
            while True:
                for end in select.select(list(other), [], [])[0]:
                    said = end.recv(_BLOCK)
                    if not said:
                        return
                    other[end].sendall(said)

    def tell(self, said: Body) -> None:
        """
        Send `said` to the rank as a line of JSON. Do nothing if the connection to the rank has
        ended.
        """
        with suppress(OSError):
            self.wfile.write(json.dumps(said).encode() + b"\n")


class Gathering:
    """
    The connection of one rank to the hub (the server of all-gathers), for one all-gather.
    """

    def __init__(self, host: str, port: int) -> None:
        self._socket = socket.create_connection((host, port), timeout=10.0)
        self._socket.settimeout(None)

    def join(self, name: str, rank: int, world: int, facts: Body) -> dict[int, Body]:
        """
        Take part in the all-gather `name`: send `facts` about this rank to the hub, and wait until
        `world` ranks take part. Return the facts of each rank, by rank.

        Raises `ConnectionError` if the hub has ended, or if `abort` was called.
        """
        said = {"name": name, "rank": rank, "world": world, "facts": facts}
        with self._socket, self._socket.makefile("rwb") as line:
            line.write(json.dumps(said).encode() + b"\n")
            line.flush()
            answer = line.readline()
        if not answer:
            raise ConnectionError(
                "the hub of the job, a process through which the ranks exchange facts, has closed "
                "the connection, so this rank no longer waits for the other ranks"
            )
        return dict(json.loads(answer)["gathered"])

    def abort(self) -> None:
        """
        Make a call of `join` that waits raise `ConnectionError`. This method may be called from any
        thread.
        """
        with suppress(OSError):  # the connection may have ended already
            self._socket.shutdown(socket.SHUT_RDWR)


def hub_of_all(directory: Path, host: str, port: int) -> tuple[str, int]:
    """
    Return the address of the hub that all ranks of a job use before the controller's first order. A
    hub is a process that serves all-gathers and a rendezvous store.

    Each node may have a hub, but all ranks must use the same hub. The address of that hub is in the
    newest file in `directory`, which all nodes can read. If there is no such file, this function
    writes a file with the hub of this node. It writes a new file also if the hub that the newest
    file names no longer answers. `host` and `port` are the address of the hub of this node.

    Raises `ConnectionError` if the hub of this node is needed and does not answer.
    """
    while True:
        known = sorted(directory.glob(f"{_HUB}*"), key=lambda path: int(path.name[len(_HUB) :]))
        if known:
            there, at, token = known[-1].read_text().split()
            if token_of(there, int(at)) == token:
                return there, int(at)
        number = int(known[-1].name[len(_HUB) :]) + 1 if known else 0
        own = token_of(host, port)
        if not own:
            raise ConnectionError(
                "no hub of this job (a process that the agent starts, through which the ranks "
                f"exchange facts) answers at {host}:{port}: the training script must not set "
                "MASTER_ADDR or MASTER_PORT before it calls tft_start_processor"
            )
        beside = directory / f".{_HUB}{secrets.token_hex(8)}"
        beside.write_text(f"{host} {port} {own}")
        try:
            # `os.link` fails if the file exists already, so only one rank can create this file
            os.link(beside, directory / f"{_HUB}{number}")
        except FileExistsError:
            continue
        finally:
            beside.unlink()
        return host, port


def token_of(host: str, port: int) -> str:
    """
    Return the token of the hub at this address. The token is a random text by which a hub is
    recognised. Return an empty text if no hub answers.
    """
    try:
        with socket.create_connection((host, port), timeout=_ANSWER) as hub:
            line = hub.makefile("rwb")
            line.write(b'{"wants": "token"}\n')
            line.flush()
            return str(json.loads(line.readline())["token"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def serve(host: str, port: int, opened: Callable[[int], None]) -> None:
    """
    Run the hub, the server of all-gathers and of a rendezvous store, until this process ends. When
    the hub listens at its port, call the function `opened` with the port. If `port` is 0, the
    system chooses a free port.
    """
    with Hub(host, port) as hub:
        opened(int(hub.server_address[1]))
        hub.serve_forever()
