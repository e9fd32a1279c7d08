"""
The rendezvous store: a separate process through which the ranks of a group learn the addresses of
the other ranks.

A group is formed when all its members have connected to the store. Then each member gets the
addresses of all members, and a token by which the members recognise each other. After that the
store forgets the group, so the store process may end and be started again without harm.
"""

import asyncio
import json
import secrets
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from tft.errors import AddressTaken, MalformedMessage

_LINE = 64 * 1024
"""The largest number of bytes in the request of a member. A request is one line with the name of a
group, a rank, the number of members and a port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """
    The request of a member to join a group.
    """

    name: str
    """The name of the group that the member wants to join."""
    rank: int
    world: int
    port: int
    """The port at which the member listens. The request has no address, because the store takes the
    remote address of the member's connection."""

    @classmethod
    def read(cls, line: bytes) -> "Asked":
        """
        Parse the request in `line`. Raises `MalformedMessage` if `line` is no valid request.
        """
        try:
            told = json.loads(line)
            asked = cls(
                name=str(told["name"]), rank=int(told["rank"]), world=int(told["world"]),
                port=int(told["port"]),
            )  # fmt: skip
        except (ValueError, KeyError, TypeError) as error:
            raise MalformedMessage(
                f"the rendezvous store received {line[:200]!r}, which is not a name, a rank, a "
                "world size and a port"
            ) from error
        if not 0 <= asked.rank < asked.world:
            raise MalformedMessage(
                f"rank {asked.rank} wants to join a process group of {asked.world} ranks, but "
                "ranks are counted from 0, so the group has no such rank"
            )
        return asked


@dataclass(slots=True)
class _Forming:
    """
    A group that still waits for members to connect.
    """

    world: int
    writers: dict[int, StreamWriter] = field(default_factory=dict)
    addresses: dict[int, tuple[str, int]] = field(default_factory=dict)


class Store:
    """
    The rendezvous store, with the groups that still wait for members.
    """

    def __init__(self) -> None:
        self._forming: dict[str, _Forming] = {}

    async def serve(self, host: str, port: int, opened: Callable[[int], None]) -> None:
        """
        Listen at the address `host` only, and serve members until this coroutine is cancelled.

        The function `opened` is called with the port on which the store listens. Raises
        `AddressTaken` if the store cannot listen at `host` and `port`.
        """
        try:
            server = await asyncio.start_server(self._welcome, host, port, limit=_LINE)
        except OSError as error:
            raise AddressTaken(
                f"the rendezvous store cannot listen at {host}:{port}: {error}"
            ) from None
        async with server:
            opened(int(server.sockets[0].getsockname()[1]))
            await server.serve_forever()

    async def _welcome(self, reader: StreamReader, writer: StreamWriter) -> None:
        asked: Asked | None = None
        try:
            asked = Asked.read(await reader.readline())
            self._come(asked, writer)
            # this read waits until the member of the group has closed the connection
            await reader.read()
        except (
            MalformedMessage,
            OSError,
            ValueError,
        ) as error:  # `readline` raises ValueError if the line is too long
            with suppress(OSError):
                writer.write(_line({"refused": str(error)}))
                await writer.drain()
        finally:
            if asked is not None:
                self._gone(asked, writer)
            writer.close()

    def _come(self, asked: Asked, writer: StreamWriter) -> None:
        group = self._forming.setdefault(asked.name, _Forming(world=asked.world))
        if group.world != asked.world:
            raise MalformedMessage(
                f"the ranks do not agree on the size of the process group {asked.name!r}: some say "
                f"{group.world} members, but rank {asked.rank} says {asked.world}"
            )
        group.writers[asked.rank] = writer
        group.addresses[asked.rank] = (writer.get_extra_info("peername")[0], asked.port)
        if len(group.writers) == group.world:
            del self._forming[asked.name]
            members = [group.addresses[rank] for rank in range(group.world)]
            told = _line({"members": members, "token": secrets.token_hex(16)})
            for each in group.writers.values():
                each.write(told)

    def _gone(self, asked: Asked, writer: StreamWriter) -> None:
        group = self._forming.get(asked.name)
        if group is not None and group.writers.get(asked.rank) is writer:
            del group.writers[asked.rank], group.addresses[asked.rank]
            if not group.writers:
                del self._forming[asked.name]


def serve(host: str, port: int, opened: Callable[[int], None]) -> None:
    """
    Serve the rendezvous store at `host` and `port` until this process ends. The function `opened`
    is called with the port on which the store listens.
    """
    asyncio.run(Store().serve(host, port, opened))


def _line(told: Mapping[str, object]) -> bytes:
    return json.dumps(told).encode() + b"\n"
