"""
The plugin `tft_loggers`: values of final steps reach `values.jsonl` and a logger once.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tft_loggers import Plugin, checked
from tft_loggers.final import Final
from tft_loggers.merging import Merger
from tft_loggers.mlflow import Mlflow
from tft_loggers.places import SENT, STATE
from tft_loggers.sending import BATCH, Sender

from tests.e2e.jobs import until
from tft.errors import UsageError
from tft.spi import LoggerJob

Row = tuple[int, dict[str, float]]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """
    Return an empty run directory.
    """
    (tmp_path / STATE).mkdir()
    return tmp_path


def logged(run_dir: Path, rank: int, *rows: Row) -> None:
    """
    Let a rank log values, as `session.log` does.
    """
    with (run_dir / f"values-rank{rank}.jsonl").open("a") as file:
        for step, values in rows:
            file.write(json.dumps({"step": step, "unix": 1.5, "values": values}) + "\n")


def merged(run_dir: Path) -> list[dict[str, object]]:
    """
    Return the rows of `values.jsonl` without their times.
    """
    rows = [json.loads(line) for line in (run_dir / "values.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "unix"} for row in rows]


# ---------------------------------------------------------------- the file of all ranks


def test_only_final_steps_are_merged_and_each_once(run_dir: Path) -> None:
    """When steps become final one after another, then each row is appended once, also by a process
    that goes on."""
    logged(run_dir, 0, (1, {"loss": 0.5}), (2, {"loss": 0.25}), (3, {"loss": 0.125}))
    merger = Merger(run_dir)
    assert not merger.merge(Final(step=0))
    assert merger.merge(Final(step=2))
    assert not merger.merge(Final(step=2))
    Merger(run_dir).merge(Final(step=3))
    assert merged(run_dir) == [
        {"step": 1, "values": {"loss": 0.5}},
        {"step": 2, "values": {"loss": 0.25}},
        {"step": 3, "values": {"loss": 0.125}},
    ]


def test_lowest_rank_counts_and_higher_ranks_complete_it(run_dir: Path) -> None:
    """When several ranks log, then a step has the value of the lowest rank for each name. Of
    several calls of one rank the last one counts."""
    logged(run_dir, 10, (1, {"loss": 9.0, "b": 10.0}), (2, {"loss": 8.0}))
    logged(run_dir, 2, (1, {"loss": 0.0}), (1, {"loss": 2.0, "c": 3.0}))
    Merger(run_dir).merge(Final(step=2))
    assert merged(run_dir) == [
        {"step": 1, "values": {"loss": 2.0, "b": 10.0, "c": 3.0}},
        {"step": 2, "values": {"loss": 8.0}},
    ]


def test_rows_that_a_rollback_removes_were_not_merged(run_dir: Path) -> None:
    """When a rank drops the rows of steps that are not final, then only its new rows are merged."""
    logged(run_dir, 0, (1, {"loss": 0.5}), (2, {"loss": 0.7}), (3, {"loss": 0.9}))
    merger = Merger(run_dir)
    merger.merge(Final(step=1))
    (run_dir / "values-rank0.jsonl").unlink()
    logged(run_dir, 0, (1, {"loss": 0.5}), (2, {"loss": 0.25}))
    merger.merge(Final(step=2))
    assert [row["values"] for row in merged(run_dir)] == [{"loss": 0.5}, {"loss": 0.25}]


def test_steps_that_come_again_are_corrected_where_they_differ(run_dir: Path) -> None:
    """When the job goes back before a final step, then a step with equal values is left alone, and
    one with other values is appended again with what differs. A process that goes on does not
    forget this."""
    steps = [(step, {"loss": 1.0 * step, "lr": 0.5}) for step in range(1, 6)]
    logged(run_dir, 0, *steps)
    merger, final = Merger(run_dir), Final()
    final.reached(5)
    merger.merge(final)
    assert final.reached(2)
    (run_dir / "values-rank0.jsonl").unlink()
    logged(run_dir, 0, *steps[:3], (4, {"loss": 9.0, "lr": 0.5}))
    merger.merge(final)
    final.reached(3)
    merger.merge(final)
    logged(run_dir, 0, (5, {"loss": float("nan"), "lr": 0.25}), (6, {"loss": 6.0}))
    final.reached(6)
    Merger(run_dir).merge(final)
    assert merged(run_dir)[5:7] == [
        {"step": 4, "values": {"loss": 9.0}, "again": True},
        {"step": 5, "values": {"loss": pytest.approx(float("nan"), nan_ok=True), "lr": 0.25}, "again": True},
    ]  # fmt: skip
    assert merged(run_dir)[7:] == [{"step": 6, "values": {"loss": 6.0}}]


def test_file_that_comes_late_adds_only_new_names(run_dir: Path) -> None:
    """When a network file system shows the rows of a rank late, then names that other ranks have
    given keep their values, and new names are added."""
    logged(run_dir, 1, (1, {"loss": 1.0}))
    merger = Merger(run_dir)
    merger.merge(Final(step=1))
    logged(run_dir, 0, (1, {"loss": 0.0, "lr": 0.5}))
    merger.merge(Final(step=1))
    assert merged(run_dir) == [
        {"step": 1, "values": {"loss": 1.0}},
        {"step": 1, "values": {"lr": 0.5}, "again": True},
    ]


def test_process_killed_between_its_two_files_repeats_nothing(run_dir: Path) -> None:
    """When a process is killed after it has appended rows, and before it has noted that, then the
    next one appends nothing twice. A row that was cut off is written anew."""
    logged(run_dir, 0, (1, {"loss": 0.5}), (2, {"loss": 0.25}))
    Merger(run_dir).merge(Final(step=2))
    (run_dir / STATE / "merged.json").unlink()
    path = run_dir / "values.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    Merger(run_dir).merge(Final(step=2))
    assert [row["step"] for row in merged(run_dir)] == [1, 2]


def test_incomplete_row_waits_and_damaged_row_is_left_out(run_dir: Path) -> None:
    """When the last row has no end yet, then it is read later. A row that is damaged is passed
    over."""
    path = run_dir / "values-rank0.jsonl"
    path.write_text('{"step": 1, "unix": 1.5, "val')
    merger = Merger(run_dir)
    assert not merger.merge(Final(step=3))
    path.write_text('{"step": 1, "unix": 1.5, "values": {"a": 1.0}}\n{"st\n')
    logged(run_dir, 0, (2, {"a": 2.0}))
    merger.merge(Final(step=3))
    assert [row["step"] for row in merged(run_dir)] == [1, 2]


# ---------------------------------------------------------------- sending to a logger


class Kept:
    """
    A logger that keeps what it gets. It fails in the calls of `flush` that are in `fails`.
    """

    def __init__(self, *fails: int, last: int | None = None, safe: bool = True) -> None:
        self.got: list[tuple[int, bool]] = []
        self.flushes = 0
        self.opened: list[LoggerJob] = []
        self.result = ""
        self._fails = fails
        self._last = last
        self._safe = safe

    def open(self, job: LoggerJob) -> "Kept":
        """
        Return this logger.
        """
        self.opened.append(job)
        return self

    def log(self, step: int, values: Mapping[str, float], at: float, *, again: bool) -> None:
        assert at == 1.5
        self.got.append((step, again))

    def last_step(self) -> int | None:
        return self._last

    def flush(self) -> bool:
        self.flushes += 1
        if self.flushes in self._fails:
            raise OSError("the server does not answer")
        return self._safe

    def close(self, result: str) -> None:
        self.result = result


def sent(run_dir: Path, logger: Kept, *, persists: bool = False) -> Sender:
    """
    Send all rows to a logger, and return the sender, which has ended.
    """
    sender = Sender("kept", "j", run_dir, logger.open, persists=persists)
    sender.start()
    sender.finish("completed")
    sender.join()
    return sender


def test_logger_gets_each_step_once_and_the_result(run_dir: Path) -> None:
    """When rows are sent in two processes, then the second one sends what is new, and each tells
    its logger how the run has ended."""
    logged(run_dir, 0, *((step, {"a": 1.0}) for step in range(1, BATCH + 3)))
    Merger(run_dir).merge(Final(step=BATCH + 1))
    first, second = Kept(), Kept()
    assert not sent(run_dir, first).failed
    Merger(run_dir).merge(Final(step=BATCH + 2))
    sent(run_dir, second)
    assert [step for step, _ in first.got] == [*range(1, BATCH + 2)]
    assert (first.flushes, first.result, first.opened[0].job) == (2, "completed", "j")
    assert second.got == [(BATCH + 2, False)]


def test_failed_logger_is_opened_again_and_asked_what_it_has(run_dir: Path) -> None:
    """When a logger fails after it has taken rows, then it is opened again, asked for its last
    step, and gets the later ones."""
    logged(run_dir, 0, *((step, {"a": 1.0}) for step in (1, 2, 3)))
    Merger(run_dir).merge(Final(step=3))
    logger = Kept(1, last=2)
    sender = sent(run_dir, logger, persists=True)
    assert logger.got == [(1, False), (2, False), (3, False), (3, False)]
    assert len(logger.opened) == 2
    assert not sender.failed


def test_failure_by_hand_ends_and_the_next_call_sends_all(run_dir: Path) -> None:
    """When a logger fails that an operator has called by hand, then that is reported, and the next
    call sends the rows again."""
    logged(run_dir, 0, (1, {"a": 1.0}))
    Merger(run_dir).merge(Final(step=1))
    assert sent(run_dir, Kept(*range(1, 9))).failed
    assert json.loads((run_dir / STATE / "kept" / SENT).read_text()) == {
        "safe": 0,
        "given": (run_dir / "values.jsonl").stat().st_size,
    }
    logger = Kept()
    assert not sent(run_dir, logger).failed
    assert logger.got == [(1, False)]


def test_rows_that_a_logger_could_not_make_safe_are_asked_for(run_dir: Path) -> None:
    """When a process is killed before its logger has made rows safe, then the next logger is asked
    what it has, and gets the steps after it."""
    logged(run_dir, 0, *((step, {"a": 1.0}) for step in (1, 2, 3)))
    Merger(run_dir).merge(Final(step=3))
    killed = Kept(safe=False)
    sender = Sender("kept", "j", run_dir, killed.open, persists=True)
    sender.start()
    until(lambda: killed.flushes == 1, "the rows are given")
    logger = Kept(last=1)
    sent(run_dir, logger)
    assert [step for step, _ in killed.got] == [1, 2, 3]
    assert [step for step, _ in logger.got] == [2, 3]
    sent(run_dir, logger)
    assert len(logger.got) == 2


# ---------------------------------------------------------------- names of loggers


@pytest.mark.parametrize(("steps", "names"), [(400, 3), (2, 1500)])
def test_failed_request_to_mlflow_loses_no_value(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, steps: int, names: int
) -> None:
    """When one of several requests to MLflow fails, then it has all values of all steps at the end,
    also if the values of one step need several requests. No request has more than 1000 values."""
    got: list[SimpleNamespace] = []
    sizes: list[int] = []

    def log_batch(run_id: str, metrics: list[SimpleNamespace]) -> None:
        sizes.append(len(metrics))
        if len(sizes) == 2:
            raise OSError("502 Bad Gateway")
        got.extend(metrics)

    entities = ModuleType("mlflow.entities")
    vars(entities)["Metric"] = lambda name, value, at, step: SimpleNamespace(name=name, step=step)
    monkeypatch.setitem(sys.modules, "mlflow", ModuleType("mlflow"))
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    client = SimpleNamespace(
        log_batch=log_batch,
        get_run=lambda _: SimpleNamespace(data=SimpleNamespace(metrics={m.name: 0 for m in got})),
        get_metric_history=lambda _, name: [m for m in got if m.name == name],
        set_terminated=lambda *_: None,
    )
    logged(run_dir, 0, *((s, {f"v{n}": 1.0 for n in range(names)}) for s in range(1, steps + 1)))
    Merger(run_dir).merge(Final(step=steps))

    def opened(job: LoggerJob) -> Mlflow:
        return Mlflow(client, "run", job.directory)

    for _ in range(2):
        sender = Sender("mlflow", "j", run_dir, opened, persists=False)
        sender.start()
        sender.finish("completed")
        sender.join()
    assert not sender.failed
    wanted = {(step, f"v{number}") for step in range(1, steps + 1) for number in range(names)}
    assert {(metric.step, metric.name) for metric in got} == wanted
    assert max(sizes) <= 1000


def test_unknown_logger_is_refused_with_the_known_ones() -> None:
    """When a name is no logger, then the error lists those that are installed."""
    with pytest.raises(UsageError, match=r"no logger 'wb'; installed: jsonl, mlflow, tensorboard"):
        checked("jsonl,wb", "--log")


def test_logger_without_its_package_is_refused() -> None:
    """When the package of a logger is missing, then the error says what to install."""
    with pytest.raises(UsageError, match=r"pip install 'tft-bus\[wandb\]'"):
        checked("wandb", "--log")
    assert checked("jsonl, jsonl", "--log") == ["jsonl"]


def options(**given: Any) -> dict[str, Any]:  # Any: values of options
    """
    Return options of `tft run`.
    """
    return {"log": "jsonl", "led_elsewhere": False, "node_rank": 0, **given}


def test_only_node_0_gets_and_needs_the_loggers() -> None:
    """When a job has several nodes, then node 0 gets the names of the loggers. Others need no
    packages for them."""
    asked = Plugin().tft_environment
    assert asked(options(log="jsonl, jsonl")) == {"TFT_LOG": "jsonl"}
    assert asked(options(log="wandb", node_rank=1)) == {}
    assert asked(options(log=None)) == {}


def test_loggers_beside_tft_lead_are_refused() -> None:
    """When `tft lead` runs the controller, then the error names the variable to set there."""
    with pytest.raises(
        UsageError, match=r"set the environment variable TFT_LOG=jsonl for `tft lead`"
    ):
        Plugin().tft_environment(options(led_elsewhere=True))
