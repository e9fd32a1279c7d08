"""
What the ranks of a job tell each other beside their program's own groups: who has come anew, who can
send what. A process that an agent keeps passes it on, as lines of JSON.
"""

import json
import socket
import socketserver
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

Body = Mapping[str, Any]
"""What is said. Any: JSON."""
Heard = Callable[[int, Body], None]
"""Called on a thread of the exchange with the rank that says something, and what."""


class Hub(socketserver.ThreadingTCPServer):
    """
    The process in the middle.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 1024  # all ranks come at once

    def __init__(self, host: str, port: int) -> None:
        super().__init__((host, port), _Member)
        self._turn = threading.Condition()
        self._members: dict[str, dict[int, tuple[_Member, Body]]] = {}

    def join(self, group: str, rank: int, world: int, member: "_Member", facts: Body) -> None:
        """
        One more has come; when that is all of them everyone is told what each has said of itself.
        """
        with self._turn:
            members = self._members.setdefault(group, {})
            members[rank] = (member, facts)
            if len(members) < world:
                return
            said = [[each, told] for each, (_, told) in sorted(members.items())]
            for other, _ in members.values():
                other.tell({"joined": said})

    def part(self, group: str, rank: int, member: "_Member") -> None:
        """
        One has gone.
        """
        with self._turn:
            members = self._members.get(group, {})
            if members.get(rank, (None,))[0] is member:
                del members[rank]

    def say(self, group: str, rank: int, to: int | None, body: Body) -> None:
        """
        Pass on to one member, or to all others.
        """
        with self._turn:
            for other, (member, _) in self._members.get(group, {}).items():
                if other == to or (to is None and other != rank):
                    member.tell({"from": rank, "body": body})


class _Member(socketserver.StreamRequestHandler):
    server: Hub

    def handle(self) -> None:
        group, rank = "", -1
        try:
            for line in self.rfile:
                said = json.loads(line)
                if "group" in said:
                    group, rank = said["group"], said["rank"]
                    self.server.join(group, rank, said["world"], self, said["facts"])
                else:
                    self.server.say(group, rank, said["to"], said["body"])
        except OSError:
            pass  # how a killed process leaves
        finally:
            self.server.part(group, rank, self)

    def tell(self, said: Body) -> None:
        """
        A line; a member that is gone does not hear it.
        """
        with suppress(OSError):
            self.wfile.write(json.dumps(said).encode() + b"\n")


class Membership:
    """
    A rank's place in one group.
    """

    def __init__(self, host: str, port: int, heard: Heard) -> None:
        self._socket = socket.create_connection((host, port), timeout=10.0)
        self._socket.settimeout(None)
        self._reading = self._socket.makefile("rb")
        self._heard = heard
        self._writing = threading.Lock()

    def join(self, group: str, rank: int, world: int, facts: Body) -> dict[int, Body]:
        """
        Waits until all have come; what each has said of itself. Raises `ConnectionError` when the hub
        is gone, or `shut` was called.
        """
        self._send({"group": group, "rank": rank, "world": world, "facts": facts})
        line = self._reading.readline()
        if not line:
            raise ConnectionError("the others are not met any more: the exchange has ended")
        threading.Thread(target=self._listen, name="mindio-exchange", daemon=True).start()
        return dict(json.loads(line)["joined"])

    def say(self, body: Body, to: int | None = None) -> None:
        """
        To one rank, or to all others.
        """
        self._send({"to": to, "body": body})

    def shut(self) -> None:
        """
        Whoever waits in `join` gets a `ConnectionError`. From any thread.
        """
        with suppress(OSError):  # shut before
            self._socket.shutdown(socket.SHUT_RDWR)

    def _send(self, said: Body) -> None:
        with self._writing:
            self._socket.sendall(json.dumps(said).encode() + b"\n")

    def _listen(self) -> None:
        with suppress(OSError), self._socket, self._reading:
            for line in self._reading:
                said = json.loads(line)
                self._heard(said["from"], said["body"])


def serve(host: str, port: int, opened: Callable[[int], None]) -> None:
    """
    Be the hub, until this process is ended.
    """
    with Hub(host, port) as hub:
        opened(int(hub.server_address[1]))
        hub.serve_forever()
