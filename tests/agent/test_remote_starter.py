"""
Ranks that another program starts: the part of the protocol that runs in the agent.
"""

import asyncio
import socket

import msgspec

from tft.agent.remote_starter import Elsewhere
from tft.spi.launcher import Ask


async def test_kill_requests_arrive_in_order_at_a_busy_program() -> None:
    """When the program reads nothing for a while and its socket is full, then all kill requests
    arrive later and in order. A start request that was made last arrives last."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.settimeout(5.0)
    elsewhere = Elsewhere(ours.detach(), lost=lambda error: None)
    elsewhere.open()
    processes = [
        elsewhere.start(number, {}, began=lambda one: None, ended=lambda one: None)
        for number in range(4)
    ]
    kills = 3000  # more than a socket's buffer can hold
    for _ in range(kills):
        processes[0].end()
    for process in processes[1:]:
        process.end()
    late = elsewhere.start(9, {}, began=lambda one: None, ended=lambda one: None)
    heard = [
        msgspec.json.decode(await asyncio.to_thread(theirs.recv, 65536), type=Ask)
        for _ in range(len(processes) + kills + 4)
    ]
    assert [ask.kind for ask in heard] == ["start"] * 4 + ["kill"] * (kills + 3) + ["start"]
    assert [ask.number for ask in heard[-5:]] == [1, 2, 3, 4, late.number]
    elsewhere.close()
    processes[0].end()  # an agent that shuts down may still kill a process
    theirs.close()
