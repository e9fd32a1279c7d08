"""
Tests under abnormal load: silent clients, invalid messages, ten thousand ranks, endless orders.
"""

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.mindio.jobs import job
from tests.mindio.test_jobs import HALVES, assert_same
from tft.bus.ports import free_address
from tft.core.job.policy import Policy
from tft.core.link.hang_detection import HangDetection
from tft.core.link.step_times import StepTimes
from tft.protocol.codec import decode, encode
from tft.protocol.messages import Beat, Envelope, Position, Pulse
from tft.testing.scripted import ScriptedJob

NODES, EACH = 1250, 8


@pytest.mark.soak
def test_unknown_clients_do_not_delay_a_job(tmp_path: Path) -> None:
    """When unknown clients connect to the job's address before any rank and send no bytes or
    invalid messages, then the ranks join all the same, and a lost one is replaced."""
    address = free_address("127.0.0.1")
    host, _, port = address.rpartition(":")
    with (
        ExitStack() as strangers,
        job(
            tmp_path / "job", groups=HALVES, faults=[[3, 4, "loop", "kill"]],
            run_options=f"--broker {address}",
        ) as running,
    ):  # fmt: skip
        for place in range(40):
            stranger = strangers.enter_context(connected(host, int(port) + place % 2))
            if place % 4 > 1:
                stranger.sendall(bytes(range(256)) * 64)
        outcome = running.end()
    assert_same(outcome)
    assert outcome.strategies == ["recover"]


def connected(host: str, port: int) -> socket.socket:
    """
    Connect to a port, retrying until a process listens there.
    """
    while True:
        try:
            return socket.create_connection((host, port))
        # the server does not listen yet, or has just closed the connection
        except (ConnectionRefusedError, ConnectionResetError):
            continue


def beat(node: int, turn: int) -> bytes:
    """
    Return the encoded heartbeat of a node of eight ranks; a node sends ten per second.
    """
    at = turn / 10
    pulses = tuple(
        Pulse(
            rank=node * EACH + place, incarnation=0, position=Position(step=turn, window=False),
            training=True, moved=at,
        )
        for place in range(EACH)
    )  # fmt: skip
    message = Beat(node=node, pulses=pulses, at=at)
    return encode(Envelope(job="j", sender=f"node.{node}", number=turn + 1, message=message))


@pytest.mark.soak
def test_one_silent_node_of_ten_thousand_ranks_is_found() -> None:
    """When 1,250 nodes of eight ranks send beats, and one of them falls silent, then this node is
    reported when its time limit has passed, and no other node is reported."""
    times = StepTimes()
    watch = HangDetection(Policy(node_silence=1.0), times)
    named = {}
    for turn in range(14):
        now = turn / 10
        for node in range(NODES):
            if node != 700 or turn == 0:
                message = decode(beat(node, turn)).message
                assert isinstance(message, Beat)
                assert watch.heard(message, times.heard(message), now) is None
                if silent := watch.silent(now):
                    named[turn] = silent
    assert named == {11: [700]}


@pytest.mark.soak
def test_more_than_20001_orders_are_carried_out() -> None:
    """When a job is paused so often that more than 20,001 orders are given, then the last order is
    carried out like the first, and a rank that is lost after it is replaced."""
    job = ScriptedJob(2, Policy(max_incidents=10**6)).start()
    job.train()
    while len(job.said) <= 20_001:
        job.pause()
        job.settle()
        assert job.doing == "paused"
        job.go_on()
        job.settle()
        job.train()
    job.kill(1)
    job.settle()
    job.train()
    assert [incident.decision.strategy for incident in job.machine.incidents] == ["recover"]
    assert job.doing == "healthy"
