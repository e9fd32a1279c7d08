"""
The record of chaos: no fault is injected twice, and the time of each fault is known.
"""

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tft_chaos import group
from tft_chaos.actions import ChaosMissed
from tft_chaos.barrier_files import BarrierFiles
from tft_chaos.outside import strike_processes
from tft_chaos.record import Firing, Ledger
from tft_chaos.spec import parse
from tft_chaos.striker import open_striker

from tests.plugins.stage import Scene

Start = Callable[[Scene], ForkServerProcess]

PATIENCE = 30.0
"""The time limit of a wait on a busy machine, in seconds."""


def endings(start: Start, scenes: list[Scene]) -> list[int | None]:
    """
    Play the scenes one after another, and return how each process ends.
    """
    codes: list[int | None] = []
    for scene in scenes:
        process = start(scene)
        process.join(PATIENCE)
        codes.append(process.exitcode)
    return codes


def test_spec_fires_once_per_job(start: Start, tmp_path: Path) -> None:
    """When a spec has killed a rank, then its successor survives the same step, and so does the
    process after a resume of the job."""
    chaos = ("kill:rank=0,step=2",)
    scenes = [Scene(run_dir=tmp_path, chaos=chaos, incarnation=i, first=2) for i in range(3)]

    assert endings(start, scenes) == [-signal.SIGKILL, 0, 0]


def test_spec_with_a_count_fires_at_successive_steps(start: Start, tmp_path: Path) -> None:
    """When a spec has `count=2`, then it fires at its step and at the next step, and then no more."""
    chaos = ("kill:rank=0,step=2,phase=update,count=2",)
    scenes = [Scene(run_dir=tmp_path, chaos=chaos, incarnation=i, first=2) for i in range(3)]

    assert endings(start, scenes) == [-signal.SIGKILL, -signal.SIGKILL, 0]
    assert sorted(firing.step for firing in Ledger(tmp_path).firings()) == [2, 3]


def test_equal_specs_fire_one_for_each_process(start: Start, tmp_path: Path) -> None:
    """When the same spec is given twice, then the first kills the rank and the second kills its
    successor. The third process survives."""
    chaos = ("kill:rank=0,step=2", "kill:rank=0,step=2")
    scenes = [Scene(run_dir=tmp_path, chaos=chaos, incarnation=i, first=2) for i in range(3)]

    assert endings(start, scenes) == [-signal.SIGKILL, -signal.SIGKILL, 0]


def test_repair_spec_with_a_count_also_kills_the_successor(start: Start, tmp_path: Path) -> None:
    """When a spec with `phase=repair` has `count=2`, then it kills the rank and also its successor
    in the same incident."""
    chaos = ("kill:rank=0,phase=repair,count=2",)
    orders = (("regroup", 1),)
    scenes = [
        Scene(run_dir=tmp_path, chaos=chaos, incarnation=i, orders=orders)  # type: ignore[arg-type]
        for i in range(3)
    ]

    assert endings(start, scenes) == [-signal.SIGKILL, -signal.SIGKILL, 0]


def test_ranks_of_one_spec_are_killed_together(start: Start, tmp_path: Path) -> None:
    """When a spec names two ranks, then the rank that comes first is killed only when the other one
    is at the same place. Their successors survive the step."""
    chaos = ("kill:ranks=0+2,step=2,phase=update",)
    scenes = [Scene(run_dir=tmp_path, chaos=chaos, rank=rank) for rank in (0, 2)]

    first = start(scenes[0])
    waiting = tmp_path / "chaos" / "waits-rank0"
    deadline = time.monotonic() + PATIENCE
    while not waiting.exists():
        assert time.monotonic() < deadline
        assert first.exitcode is None
        time.sleep(0.005)
    assert list(Ledger(tmp_path).firings()) == []
    second = start(scenes[1])
    first.join(PATIENCE)
    second.join(PATIENCE)

    assert (first.exitcode, second.exitcode) == (-signal.SIGKILL, -signal.SIGKILL)
    firings = {firing.rank: firing for firing in Ledger(tmp_path).firings()}
    assert {(rank, firing.step) for rank, firing in firings.items()} == {(0, 2), (2, 2)}
    again = [replace(scene, incarnation=1, first=2) for scene in scenes]
    assert endings(start, again) == [0, 0]


def test_rank_of_a_group_is_not_struck_when_another_one_does_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a rank of a spec does not come to the place of the fault in time, then the rank that
    waits for it raises an error that names it, and nothing is recorded as fired."""
    monkeypatch.setattr(group, "PATIENCE", 0.05)
    marks = BarrierFiles(tmp_path, 0)
    BarrierFiles(tmp_path, 1).wait("0-1")
    BarrierFiles(tmp_path, 2).wait("0-2")

    with pytest.raises(ChaosMissed, match=r"the ranks \[2\] did not reach"):
        group.Victim(0, (0, 1, 2), 0).await_others(1, Ledger(tmp_path), marks)

    assert list(Ledger(tmp_path).firings()) == []


class Victims:
    """
    Processes that stand for processes of tft, with their pid files.
    """

    def __init__(self, run_dir: Path) -> None:
        self._pids = run_dir / "pids"
        self._pids.mkdir()
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, name: str) -> "subprocess.Popen[bytes]":
        """
        Start a process that lives until it is killed.
        """
        process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        self._started.append(process)
        (self._pids / f"{name}.pid").write_text(str(process.pid))
        return process

    def end(self) -> None:
        """
        End all processes that are left.
        """
        for process in self._started:
            process.kill()
            process.communicate()


@pytest.fixture
def victims(tmp_path: Path) -> Iterator[Victims]:
    """
    Return the victims. They end with the test.
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
def test_tft_process_is_killed_by_its_agent_after_the_named_step(
    tmp_path: Path, victims: Victims, target: str, name: str, node: int
) -> None:
    """When the named step is complete, then the agent of the same node kills the tft process, and
    not earlier. The process that is started in its place survives."""
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


def test_kill_waits_until_the_target_process_runs(tmp_path: Path, victims: Victims) -> None:
    """When the target process does not run at the named step, then the kill is delayed until the
    process runs and the next step is complete."""
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
    Write the record of a firing.
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
    assert Ledger(run_dir).enter(str(index), 1, firing)


def test_firing_is_entered_in_the_ledger_once(tmp_path: Path) -> None:
    """When a firing is already in the ledger, then entering it a second time is refused."""
    fired(tmp_path, 0, "kill:rank=2", 10.0)

    with pytest.raises(AssertionError):
        fired(tmp_path, 0, "kill:rank=2", 11.0)

    assert [firing.at for firing in Ledger(tmp_path).firings()] == [10.0]


def test_fault_has_the_time_of_the_newest_firing_before_it(tmp_path: Path) -> None:
    """When two specs fired at the same rank, then a fault gets the time of the last firing before
    the fault was detected."""
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
def test_fault_is_matched_only_with_firings_that_can_cause_it(
    tmp_path: Path, spec: str, kinds: set[str]
) -> None:
    """When a fault has another kind or another rank than a firing can cause, then the ledger gives
    no time for that fault."""
    fired(tmp_path, 0, spec, 10.0)
    ledger = Ledger(tmp_path)
    all_kinds = ("process", "node", "memory", "network", "numeric", "hang", "software")

    assert {kind for kind in all_kinds if ledger.moment(kind, 2, 11.0) == 10.0} == kinds
    assert {kind for kind in all_kinds if ledger.moment(kind, 3, 11.0)} == kinds & {"node"}


def test_faults_that_were_not_made_are_told_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a rank ends and has not come to the place of a fault, then it prints which fault was not
    made. A fault that was made is not mentioned."""
    monkeypatch.setattr("atexit.register", lambda function: None)
    session = SimpleNamespace(rank=0, run_dir=tmp_path, step=9, incarnation=0)
    specs = [parse(text) for text in ("kill:rank=0,step=2", "kill:rank=0,step=5,phase=evaluation")]
    made = Firing(
        spec="kill:rank=0,step=2", at=0.0, rank=0, incarnation=0, step=2, phase=None, evidence={}
    )
    Ledger(tmp_path).enter("0", 1, made)
    striker = open_striker(specs, cast(Any, session))
    assert striker is not None
    striker._tell_unmade()
    said = capsys.readouterr().err
    assert said.startswith("chaos: kill:rank=0,step=5,phase=evaluation was not made: ")
    assert said.count("\n") == 1


def test_spec_that_needs_an_optimizer_is_refused_without_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a script adopts no optimizer, then one sentence refuses each spec that needs one. Others
    are carried out, and nothing more is said of the refused ones at the end."""
    monkeypatch.setattr("atexit.register", lambda function: None)
    kill, flip = "kill:rank=0,step=5,phase=update", "bitflip:rank=0,step=5,target=exp_avg"
    specs = [parse(text) for text in (kill, flip, "kill:rank=0,step=6,phase=between")]
    striker = open_striker(specs, cast(Any, SimpleNamespace(rank=0, run_dir=tmp_path, step=4)))
    assert striker is not None

    striker.tft_on_adopted(parts={"model": object()})

    assert capsys.readouterr().err.splitlines() == [
        f"chaos: {spec} is not made: {needed} needs an optimizer, and the script gives none to "
        "session.adopt"
        for spec, needed in ((kill, "phase=update"), (flip, "target=exp_avg"))
    ]
    striker._tell_unmade()
    assert capsys.readouterr().err.count("\n") == 1


def test_optimizer_without_parameter_groups_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the optimizer is not like those of torch, then a spec with `phase=update` is refused when
    the optimizer is adopted. Its step is not touched, so that the script does not fail in it."""
    monkeypatch.setattr("atexit.register", lambda function: None)
    specs = [parse("kill:rank=0,step=5,phase=update")]
    striker = open_striker(specs, cast(Any, SimpleNamespace(rank=0, run_dir=tmp_path, step=4)))
    assert striker is not None
    optimizer = SimpleNamespace(step=len)
    with pytest.raises(ChaosMissed, match="SimpleNamespace has none: choose another phase"):
        striker.tft_on_adopted(parts={"model": object(), "optimizer": optimizer})
    assert vars(optimizer) == {"step": len}
