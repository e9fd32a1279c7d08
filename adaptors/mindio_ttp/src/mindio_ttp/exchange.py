"""
The all-gather of facts beside the program's own process groups. A process that an agent keeps is the hub; each rank
sends it one line of JSON and gets back the lines of all.
"""

import json
import socket
import socketserver
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from mindio_ttp import torch_groups

STORE_LIMIT = 60.0
"""Seconds for the hub to open a store: it imports torch for that, on a machine where all ranks do so too."""

Body = Mapping[str, Any]
"""What a rank says of itself. Any: JSON."""


class Hub(socketserver.ThreadingTCPServer):
    """
    Answer all ranks of a gathering when the last of them has come.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 1024  # all ranks come at once

    def __init__(self, host: str, port: int) -> None:
        super().__init__((host, port), _Member)
        self._turn = threading.Lock()
        self._opening = threading.Lock()
        self._store: Any = None
        """A store of torch's, from when a program asks for it."""
        self._members: dict[str, dict[int, tuple[_Member, Body]]] = {}

    def gather(self, name: str, rank: int, world: int, member: "_Member", facts: Body) -> None:
        """
        Note that one more rank has come. When that makes `world` ranks, tell each of them the facts of all.
        """
        with self._turn:
            members = self._members.setdefault(name, {})
            members[rank] = (member, facts)
            if len(members) < world:
                return
            said = [[each, told] for each, (_, told) in sorted(members.items())]
            for other, _ in members.values():
                other.tell({"gathered": said})

    def torch_store(self) -> int:
        """
        Return the port of a store for `torch.distributed`, which is opened when the first rank asks for it.
        """
        with self._opening:
            if self._store is None:
                self._store = torch_groups.open_store(str(self.server_address[0]))
            return int(self._store.port)

    def part(self, name: str, rank: int, member: "_Member") -> None:
        """
        Forget a rank whose connection has ended: what it has said no longer counts.
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
        name, rank = "", -1
        try:
            for line in self.rfile:
                said = json.loads(line)
                if said.get("wants") == "store":
                    self.tell({"port": self.server.torch_store()})
                    continue
                name, rank = said["name"], said["rank"]
                self.server.gather(name, rank, said["world"], self, said["facts"])
        except OSError:
            pass  # how a killed process leaves
        finally:
            self.server.part(name, rank, self)

    def tell(self, said: Body) -> None:
        """
        Send a line; a member that is gone does not hear it.
        """
        with suppress(OSError):
            self.wfile.write(json.dumps(said).encode() + b"\n")


class Gathering:
    """
    One rank's part in one all-gather.
    """

    def __init__(self, host: str, port: int) -> None:
        self._socket = socket.create_connection((host, port), timeout=10.0)
        self._socket.settimeout(None)

    def join(self, name: str, rank: int, world: int, facts: Body) -> dict[int, Body]:
        """
        Wait until `world` ranks have come under this name; return what each has said. Raises `ConnectionError`
        when the hub is gone, or `abort` was called.
        """
        said = {"name": name, "rank": rank, "world": world, "facts": facts}
        with self._socket, self._socket.makefile("rwb") as line:
            line.write(json.dumps(said).encode() + b"\n")
            line.flush()
            answer = line.readline()
        if not answer:
            raise ConnectionError("the other ranks are not waited for any more: the hub has ended")
        return dict(json.loads(answer)["gathered"])

    def abort(self) -> None:
        """
        Have whoever waits in `join` get a `ConnectionError`. From any thread.
        """
        with suppress(OSError):  # ended before
            self._socket.shutdown(socket.SHUT_RDWR)


def torch_store(host: str, port: int) -> int:
    """
    Ask the hub at this address for its store; return the port. Raises `ConnectionError` where nothing answers as a
    hub does.
    """
    try:
        with socket.create_connection((host, port), timeout=STORE_LIMIT) as hub:
            line = hub.makefile("rwb")
            line.write(b'{"wants": "store"}\n')
            line.flush()
            return int(json.loads(line.readline())["port"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConnectionError(
            f"no hub of this job has answered at {host}:{port} with a store for torch.distributed ({error!r}): a program "
            "must not set MASTER_ADDR or MASTER_PORT before tft_start_processor"
        ) from None


def serve(host: str, port: int, opened: Callable[[int], None]) -> None:
    """
    Be the hub, until this process is ended.
    """
    with Hub(host, port) as hub:
        opened(int(hub.server_address[1]))
        hub.serve_forever()
