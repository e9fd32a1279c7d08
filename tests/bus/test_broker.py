"""
Tests of the broker process: its addresses, its refusals, and its end.
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


def test_broker_listens_at_its_port_and_the_next(broker: Broker) -> None:
    """When the broker chooses the port itself, then it announces the first of two ports, and both
    accept connections."""
    for port in (broker.port, broker.port + 1):
        socket.create_connection(("127.0.0.1", port)).close()


def test_broker_picks_ports_outside_the_ephemeral_range_of_the_kernel(broker: Broker) -> None:
    """When the broker chooses the port itself, then both ports are outside the range that the
    kernel gives to other processes."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())

    assert not low <= broker.port <= high
    assert not low <= broker.port + 1 <= high


@pytest.mark.parametrize("first", [0, -1], ids=["its port is taken", "the next is taken"])
def test_error_names_an_address_that_is_taken(
    processes: Processes, broker: Broker, first: int
) -> None:
    """When another process listens at one of the two ports, then the broker is refused and the
    error names the address."""
    assert refusal(processes, "127.0.0.1", broker.port + first) == (
        f"AddressTaken the broker cannot listen at 127.0.0.1:{broker.port}: another process "
        "listens there; end that process, or choose another port (the broker takes that port and "
        "the next)"
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "*", "node-1"])
def test_broker_refuses_a_public_address_without_insecure(processes: Processes, host: str) -> None:
    """When the address can be reached from other machines, then the broker is refused, and the
    error names the option `--insecure`."""
    line = refusal(processes, host, 0)

    assert line.startswith(f"UsageError a broker at {host} would take orders from anybody")
    assert "--insecure" in line


def test_insecure_broker_listens_at_every_address(processes: Processes) -> None:
    """When the broker is started as insecure for a trusted network, then it listens at every
    address."""
    _, port = processes.start(OPENLY)

    socket.create_connection(("127.0.0.1", int(port))).close()


def test_an_address_of_another_machine_is_refused(processes: Processes) -> None:
    """When the broker cannot listen for a reason other than a taken port, then the error names the
    address."""
    assert refusal(processes, "::1", 5000).startswith(
        "UsageError the broker cannot listen at ::1:5000: "
    )


def test_broker_refuses_to_start_with_too_few_open_files(processes: Processes) -> None:
    """When the system allows the broker only 100 open files, then the broker refuses to start and
    names the needed number."""
    assert refusal(processes, "127.0.0.1", 0, files="100") == (
        "UsageError the broker may open only 100 files and needs 256 or more: raise the hard limit "
        "(ulimit -Hn)"
    )


def test_broker_raises_its_limit_of_open_files_to_the_hard_limit(processes: Processes) -> None:
    """When the soft limit of open files is lower than the hard limit, then the broker raises the
    soft limit to the hard limit."""
    process, _ = processes.start(FEW_FILES)

    assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (300, 300)


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
async def test_signal_ends_the_broker_cleanly_under_load(
    broker: Broker, ending: signal.Signals
) -> None:
    """When SIGTERM or SIGINT comes while messages pass through the broker, then the broker exits
    with 0 and prints nothing."""
    async with open_bus(broker.address, job="job", sender="run", topics=[ORDERS]) as bus:
        await bus.listened(ORDERS)
        for epoch in range(1000):
            bus.publish(ORDERS, Lead(epoch=epoch, heard={}))

        broker.process.send_signal(ending)

        assert broker.process.wait() == 0
        assert output(broker.process).read() == ""


async def test_broker_continues_after_sigstop_and_sigcont(broker: Broker) -> None:
    """When the broker is stopped and continued, then it forwards messages as before."""
    broker.process.send_signal(signal.SIGSTOP)
    broker.process.send_signal(signal.SIGCONT)

    async with open_bus(broker.address, job="job", sender="run", topics=[ORDERS]) as bus:
        await bus.listened(ORDERS)
        await bus.listened(presence("job", "run"))
        bus.publish(ORDERS, Lead(epoch=1, heard={}))

        await bus.receive()
