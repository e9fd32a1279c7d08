"""
What has fired never fires again, and the moment of a fault is known from it.
"""

import signal
import subprocess
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
from tft_chaos.outside import strike_processes
from tft_chaos.record import Firing, Ledger
from tft_chaos.spec import parse

from tests.plugins.stage import Scene

Start = Callable[[Scene], ForkServerProcess]

PATIENCE = 30.0
"""Seconds a fact may take to come true on a busy machine."""


def endings(start: Start, scenes: list[Scene]) -> list[int | None]:
    """
    How each scene ends, one played after the other.
    """
    codes: list[int | None] = []
    for scene in scenes:
        process = start(scene)
        process.join(PATIENCE)
        codes.append(process.exitcode)
    return codes


def test_a_spec_fires_once_per_job(start: Start, tmp_path: Path) -> None:
    """
    When the process that replaces a killed one computes the same step, then it lives; and so
    does the next one, after the job was resumed.
    """
    chaos = ("kill:rank=0,step=2",)
    scenes = [Scene(run_dir=tmp_path, chaos=chaos, incarnation=i, first=2) for i in range(3)]

    assert endings(start, scenes) == [-signal.SIGKILL, 0, 0]


def test_a_count_fires_at_one_step_after_the_other(start: Start, tmp_path: Path) -> None:
    """
    When a spec has `count=2`, then it fires at its step and at the next, and then no more.
    """
    chaos = ("kill:rank=0,step=2,phase=update,count=2",)
    scenes = [Scene(run_dir=tmp_path, chaos=chaos, incarnation=i, first=2) for i in range(3)]

    assert endings(start, scenes) == [-signal.SIGKILL, -signal.SIGKILL, 0]
    assert sorted(firing.step for firing in Ledger(tmp_path).firings()) == [2, 3]


def test_equal_specs_fire_one_after_the_other(start: Start, tmp_path: Path) -> None:
    """
    When the same spec is given twice, then the replacement meets the second one.
    """
    chaos = ("kill:rank=0,step=2", "kill:rank=0,step=2")
    scenes = [Scene(run_dir=tmp_path, chaos=chaos, incarnation=i, first=2) for i in range(3)]

    assert endings(start, scenes) == [-signal.SIGKILL, -signal.SIGKILL, 0]


def test_a_repair_can_be_struck_again_and_again(start: Start, tmp_path: Path) -> None:
    """
    When phase `repair` has a count, then the replacement dies of the same incident too.
    """
    chaos = ("kill:rank=0,phase=repair,count=2",)
    orders = (("regroup", 1),)
    scenes = [
        Scene(run_dir=tmp_path, chaos=chaos, incarnation=i, orders=orders)  # type: ignore[arg-type]
        for i in range(3)
    ]

    assert endings(start, scenes) == [-signal.SIGKILL, -signal.SIGKILL, 0]


class Victims:
    """
    Processes that stand for tft's own, with their pid files.
    """

    def __init__(self, run_dir: Path) -> None:
        self._pids = run_dir / "pids"
        self._pids.mkdir()
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, name: str) -> "subprocess.Popen[bytes]":
        """
        One that lives until it is killed.
        """
        process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        self._started.append(process)
        (self._pids / f"{name}.pid").write_text(str(process.pid))
        return process

    def end(self) -> None:
        """
        Leave none behind.
        """
        for process in self._started:
            process.kill()
            process.communicate()


@pytest.fixture
def victims(tmp_path: Path) -> Iterator[Victims]:
    """
    They all end with the test.
    """
    victims = Victims(tmp_path)
    yield victims
    victims.end()


@pytest.mark.parametrize(
    ("target", "name", "node"),
    [
        ("broker", "broker", 0),
        ("controller", "controller", 0),
        ("store", "store-0", 0),
        ("agent=0", "agent-0", 0),
        ("agent=1", "agent-1", 1),
    ],
)
def test_a_process_of_tft_is_killed_when_its_step_is_done(
    tmp_path: Path, victims: Victims, target: str, name: str, node: int
) -> None:
    """
    When the first rank has completed the step, then the process dies by the hand of its own
    node's agent, not before; the one that is started in its place lives.
    """
    specs = [parse(f"kill:{target},step=20")]
    first = victims.start(name)

    strike_processes(specs, tmp_path, node, 19)
    strike_processes(specs, tmp_path, 1 - node, 20)
    assert list(Ledger(tmp_path).firings()) == []
    strike_processes(specs, tmp_path, node, 20)
    assert first.wait(PATIENCE) == -signal.SIGKILL
    second = victims.start(name)
    strike_processes(specs, tmp_path, node, 21)

    (firing,) = Ledger(tmp_path).firings()
    assert (firing.rank, firing.step, firing.evidence) == (
        None,
        20,
        {"process": name, "pid": first.pid},
    )
    second.stdin.close()  # type: ignore[union-attr]
    assert second.wait(PATIENCE) == 0


def test_a_process_that_is_not_up_is_struck_when_it_is(tmp_path: Path, victims: Victims) -> None:
    """
    When the target is being started again, then the strike waits for it, and for its next step.
    """
    specs = [parse("kill:broker,step=20,count=2")]

    strike_processes(specs, tmp_path, 0, 20)
    first = victims.start("broker")
    strike_processes(specs, tmp_path, 0, 21)
    assert first.wait(PATIENCE) == -signal.SIGKILL
    strike_processes(specs, tmp_path, 0, 22)
    second = victims.start("broker")
    strike_processes(specs, tmp_path, 0, 23)

    assert second.wait(PATIENCE) == -signal.SIGKILL
    assert sorted(firing.step for firing in Ledger(tmp_path).firings()) == [21, 23]


def fired(run_dir: Path, index: int, spec: str, at: float) -> None:
    """
    Write a firing down as if it had been.
    """
    target = spec.partition("rank=")[2].partition(",")[0]
    firing = Firing(
        spec=spec,
        at=at,
        rank=int(target) if target else None,
        incarnation=0,
        step=1,
        phase="forward",
        evidence={},
    )
    assert Ledger(run_dir).enter(index, 1, firing)


def test_a_firing_is_entered_once(tmp_path: Path) -> None:
    """
    When a firing stands in the ledger, then nobody else can enter it.
    """
    fired(tmp_path, 0, "kill:rank=2", 10.0)

    with pytest.raises(AssertionError):
        fired(tmp_path, 0, "kill:rank=2", 11.0)

    assert [firing.at for firing in Ledger(tmp_path).firings()] == [10.0]


def test_the_moment_of_a_fault_is_that_of_the_newest_firing_before_it(tmp_path: Path) -> None:
    """
    When a rank was struck twice, then a fault belongs to the last strike before it was seen.
    """
    fired(tmp_path, 0, "kill:rank=2", 10.0)
    fired(tmp_path, 1, "kill:rank=2,step=9", 20.0)
    ledger = Ledger(tmp_path)

    assert ledger.moment("process", 2, 9.0) is None
    assert ledger.moment("process", 2, 10.5) == 10.0
    assert ledger.moment("process", 2, 21.0) == 20.0


@pytest.mark.parametrize(
    ("spec", "kinds"),
    [
        ("kill:rank=2", {"process"}),
        ("stop:rank=2", {"process", "hang"}),
        ("hang:rank=2", {"process", "hang"}),
        ("raise:rank=2,kind=memory", {"memory"}),
        ("raise:rank=2,kind=network", {"network"}),
        ("raise:rank=2,kind=numeric", {"numeric"}),
        ("raise:rank=2,kind=bug", {"software"}),
        ("bitflip:rank=2,target=param", {"numeric"}),
        ("slow:rank=2,factor=2", set()),
        ("kill:agent=1", {"node"}),
        ("kill:broker", set()),
    ],
)
def test_a_fault_is_explained_by_what_can_cause_it(
    tmp_path: Path, spec: str, kinds: set[str]
) -> None:
    """
    When a fault of another kind or of another rank is seen, then chaos does not claim it.
    """
    fired(tmp_path, 0, spec, 10.0)
    ledger = Ledger(tmp_path)
    all_kinds = ("process", "node", "memory", "network", "numeric", "hang", "software")

    assert {kind for kind in all_kinds if ledger.moment(kind, 2, 11.0) == 10.0} == kinds
    assert {kind for kind in all_kinds if ledger.moment(kind, 3, 11.0)} == kinds & {"node"}
