"""
The broker as a process: where it listens, what it refuses, how it ends.
"""

import resource
import signal
import socket
from pathlib import Path

import pytest

from tests.bus.conftest import Broker, Processes, output
from tft.bus.zeromq import open_bus
from tft.protocol.messages import Lead
from tft.protocol.topics import ORDERS, presence

REFUSED = """
import resource, sys
from tft.bus.broker import main
from tft.errors import UsageError
host, port, files = sys.argv[1:]
if files:
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(files), int(files)))
try:
    main(host, int(port), opened=lambda port: print("opened", port, flush=True))
except UsageError as error:
    print(type(error).__name__, error)
"""

OPENLY = """
from tft.bus.broker import main
main("0.0.0.0", 0, insecure=True, opened=lambda port: print(port, flush=True))
"""

FEW_FILES = """
import resource
from tft.bus.broker import main
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 300))
main("localhost", 0, opened=lambda port: print(port, flush=True))
"""


def refusal(processes: Processes, host: str, port: int, files: str = "") -> str:
    _, line = processes.start(REFUSED, host, str(port), files)
    return line


def test_it_listens_at_its_port_and_the_next(broker: Broker) -> None:
    """
    When the port is left to the broker, then it announces the first of two that both accept.
    """
    for port in (broker.port, broker.port + 1):
        socket.create_connection(("127.0.0.1", port)).close()


def test_it_picks_no_port_that_the_kernel_gives_to_others(broker: Broker) -> None:
    """
    When the port is left to the broker, then it is one nobody else is given while it is away.
    """
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())

    assert not low <= broker.port <= high
    assert not low <= broker.port + 1 <= high


@pytest.mark.parametrize("first", [0, -1], ids=["its port is taken", "the next is taken"])
def test_a_taken_address_is_named(processes: Processes, broker: Broker, first: int) -> None:
    """
    When something listens at either of the two ports already, then the refusal names the address.
    """
    assert refusal(processes, "127.0.0.1", broker.port + first) == (
        f"AddressTaken the broker cannot listen at 127.0.0.1:{broker.port}: another process does; "
        "end it, or choose another port (the broker takes that one and the next)"
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "*", "node-1"])
def test_beyond_loopback_it_listens_only_when_told_to(processes: Processes, host: str) -> None:
    """
    When the address can be reached from elsewhere, then the broker refuses it, and says how to
    insist.
    """
    line = refusal(processes, host, 0)

    assert line.startswith(f"UsageError a broker at {host} would take orders from anybody")
    assert "--insecure" in line


def test_beyond_loopback_it_listens_when_told_to(processes: Processes) -> None:
    """
    When it is told that the network is to be trusted, then it listens at every address.
    """
    _, port = processes.start(OPENLY)

    socket.create_connection(("127.0.0.1", int(port))).close()


def test_an_address_of_another_machine_is_refused(processes: Processes) -> None:
    """
    When it cannot listen for another reason than a taken port, then that is said.
    """
    assert refusal(processes, "::1", 5000).startswith(
        "UsageError the broker cannot listen at ::1:5000: "
    )


def test_too_few_open_files_are_refused_at_the_start(processes: Processes) -> None:
    """
    When the system allows it too few connections, then it says so before anyone connects.
    """
    assert refusal(processes, "127.0.0.1", 0, files="100") == (
        "UsageError the broker may open only 100 files and needs 256 or more, two for each "
        "participant of a job: raise the hard limit (ulimit -Hn)"
    )


def test_it_takes_all_the_open_files_it_is_allowed(processes: Processes) -> None:
    """
    When the soft limit is lower than the hard one, then it is raised: it is a shell's habit, and
    no limit to respect.
    """
    process, _ = processes.start(FEW_FILES)

    assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (300, 300)


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_cleanly_under_load(broker: Broker, ending: signal.Signals) -> None:
    """
    When it is told to end while messages pass through it, then it ends with 0 and says nothing.
    """
    async with open_bus(broker.address, job="job", sender="run", topics=[ORDERS]) as bus:
        await bus.listened(ORDERS)
        for epoch in range(1000):
            bus.publish(ORDERS, Lead(epoch=epoch, heard={}))

        broker.process.send_signal(ending)

        assert broker.process.wait() == 0
        assert output(broker.process).read() == ""


async def test_it_goes_on_after_being_stopped(broker: Broker) -> None:
    """
    When it is stopped and continued, which interrupts its waiting, then it forwards as before.
    """
    broker.process.send_signal(signal.SIGSTOP)
    broker.process.send_signal(signal.SIGCONT)

    async with open_bus(broker.address, job="job", sender="run", topics=[ORDERS]) as bus:
        await bus.listened(ORDERS)
        await bus.listened(presence("run"))
        bus.publish(ORDERS, Lead(epoch=1, heard={}))

        await bus.receive()
