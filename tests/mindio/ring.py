"""
An all-reduce of one number per rank, for programs without a framework.

The server runs in the test's own process. When one rank disconnects, all others get a
`ConnectionError`, and all ranks must join again.
"""

import json
import socket
import threading
from contextlib import suppress


class Ring:
    """
    The server, which adds up the numbers of all ranks. `close` stops it.
    """

    def __init__(self, world: int) -> None:
        self._world = world
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """
        The port that the server listens at.
        """
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """
        Stop the server.
        """
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                members: dict[int, socket.socket] = {}
                try:
                    self._gather(members)
                    with suppress(OSError, ValueError):
                        self._turn([members[rank] for rank in sorted(members)])
                finally:
                    for connection in members.values():
                        with suppress(OSError):
                            connection.shutdown(socket.SHUT_RDWR)
                        connection.close()

    def _gather(self, members: dict[int, socket.socket]) -> None:
        world = self._world
        while len(members) < world:
            connection, _ = self._listener.accept()
            with connection.makefile("rb") as file:
                rank, told = json.loads(file.readline())
            wanted = told or self._world
            if wanted != world:  # the members so far waited for a ring of another size
                for stale in members.values():
                    stale.close()
                members.clear()
            world = wanted
            if rank in members:
                members[rank].close()
            members[rank] = connection

    def _turn(self, members: list[socket.socket]) -> None:
        files = [member.makefile("rb") for member in members]
        for member in members:
            member.sendall(b"0\n")
        while True:
            numbers = [float(json.loads(file.readline())) for file in files]
            for member in members:
                member.sendall(json.dumps(sum(numbers)).encode() + b"\n")


class Member:
    """
    A rank's connection to the server. `world` is the number of ranks to wait for; 0 means all.
    """

    def __init__(self, rank: int, port: int, world: int = 0) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._file = self._socket.makefile("rb")
        self._socket.sendall(json.dumps([rank, world]).encode() + b"\n")

    def join(self) -> None:
        """
        Wait until all ranks have joined.
        """
        self._read()

    def add(self, number: float) -> float:
        """
        Return the total of the numbers of all ranks. Raises `ConnectionError` if a rank has left.
        """
        try:
            self._socket.sendall(json.dumps(number).encode() + b"\n")
        except OSError as error:
            raise ConnectionError("the ring is broken") from error
        return self._read()

    def shut(self) -> None:
        """
        Disconnect, so that a thread that waits in `add`, now or later, gets a `ConnectionError`.
        """
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self) -> float:
        try:
            line = self._file.readline()
        except OSError as error:
            raise ConnectionError("the ring is broken") from error
        if not line:
            raise ConnectionError("the ring is broken")
        return float(json.loads(line))
