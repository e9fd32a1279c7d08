"""
Tests of MindIO's environment variables: the range and default of each, and the effect of those that
tft uses.
"""

import logging
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mindio_ttp import environment, logs
from mindio_ttp.handlers import Handlers

RANGES = [
    ("MINDIO_WAIT_MINDX_TIME", "wait_orchestrator", 1, 3600, 30),
    ("TTP_NORMAL_ACTION_TIME_LIMIT", "action_limit", 30, 1800, 180),
    ("TTP_RETRY_TIMES", "retries", 1, 300, 10),
    ("TTP_FRAMEWORK_TYPE", "framework", 0, 1, 0),
    ("TTP_ACCLINK_CHECK_PERIOD_HOURS", "certificate_period", 24, 720, 168),
    ("TTP_ACCLINK_CERT_CHECK_AHEAD_DAYS", "certificate_ahead", 7, 180, 30),
    ("TTP_STOP_CLEAN_BEFORE_DUMP", "clean_before_dump", 0, 1, 0),
]


@pytest.mark.parametrize(("name", "field", "least", "most", "default"), RANGES)
def test_a_number_out_of_range_is_logged_and_replaced_by_its_default(
    name: str, field: str, least: int, most: int, default: int
) -> None:
    """When a variable is a number within its range, then it is used; otherwise its default is, and
    the ignored value is logged."""
    assert getattr(environment.variables({}), field) == default
    for good in (least, most):
        read = environment.variables({name: str(good)})
        assert (getattr(read, field), read.ignored) == (good, ())
    for bad in (str(least - 1), str(most + 1), "", "x", " 1", "1.0", "+1", "²"):
        read = environment.variables({name: bad})
        assert getattr(read, field) == default
        assert read.ignored == (
            f"{name} is {bad!r}, and not a number from {least} to {most}: {default} is used",
        )


@pytest.mark.parametrize(
    ("text", "mindspore"),
    [("true", True), ("True", True), ("1", True), ("false", False), ("0", False), ("", False)],
)
def test_mindio_for_mindspore_selects_the_framework(text: str, mindspore: bool) -> None:
    """When MINDIO_FOR_MINDSPORE is true or 1, then the program is one for MindSpore."""
    assert environment.variables({"MINDIO_FOR_MINDSPORE": text}).mindspore is mindspore
    assert not environment.variables({}).mindspore


@pytest.mark.parametrize(
    ("enabled", "again"),
    [
        ("", True),
        ("{RSC:1}", True),
        ("{TTP:1}", False),
        ("{TTP:1,TSP:1,UCE:0}", False),
        ("{TTP:1,UCE:1}", True),
        ("{TTP:1,HCCE:1}", True),
        ("{TTP:1,ARF:1}", True),
    ],
)
def test_mindspores_loop_is_reentered_only_when_that_is_enabled(enabled: str, again: bool) -> None:
    """When only last checkpoints are enabled for MindSpore, then the program's loop is not entered
    again after a fault."""
    assert environment.variables({"MS_ENABLE_TFT": enabled}).enters_again is again


@pytest.mark.parametrize(("mindspore", "told"), [(False, (7, "args")), (True, (7, "ctx"))])
def test_the_arguments_of_rename_depend_on_the_framework(
    mindspore: bool, told: tuple[Any, ...]
) -> None:
    """When the program is one for MindSpore, then its rename function gets its context; otherwise
    it gets the arguments."""
    calls: list[tuple[Any, ...]] = []
    handlers = Handlers(mindspore=mindspore)
    handlers.register("rename", lambda *got: calls.append(got), "ctx")
    handlers.call("rename", *((7,) if mindspore else (7, "args")))
    assert calls == [told]


class Ticking:
    """
    A clock that returns the given moments one after the other.
    """

    def __init__(self, *moments: float) -> None:
        self._moments = list(moments)

    def now(self) -> float:
        """
        Return the next moment.
        """
        return self._moments.pop(0)


@pytest.mark.parametrize(("took", "told"), [(180.0, False), (180.5, True)])
def test_a_slow_function_is_logged(
    took: float, told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """When a function takes longer than TTP_NORMAL_ACTION_TIME_LIMIT, then a log line names it."""
    handlers = Handlers(clock=Ticking(0.0, took))
    handlers.register("stop", lambda *got: None, None)
    handlers.call("stop", "args")
    assert (
        "event=function_slow name=stop took_s=180.5 limit_s=180.0" in capsys.readouterr().out
    ) is told


# ---------------------------------------------------------------- destinations of log lines


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, environment.Logging(directory=Path("logs").absolute())),
        ({"TTP_LOG_PATH": ""}, environment.Logging(directory=Path("logs").absolute())),
        ({"TTP_LOG_PATH": "/a/b"}, environment.Logging(directory=Path("/a/b"))),
        ({"TTP_LOG_PATH": "/a", "TTP_LOG_LEVEL": "error"},
         environment.Logging(directory=Path("/a"), level="ERROR")),
        ({"TTP_LOG_PATH": "/a", "TTP_LOG_LEVEL": "LOUD"}, environment.Logging(directory=Path("/a"))),
        ({"TTP_LOG_PATH": "/a", "TTP_LOG_MODE": "PER_PROC"}, environment.Logging(directory=Path("/a"))),
        ({"TTP_LOG_PATH": "/a", "TTP_LOG_MODE": "x"}, environment.Logging(directory=Path("/a"))),
        ({"TTP_LOG_PATH": "/a", "TTP_LOG_MODE": "ONLY_ONE"},
         environment.Logging(directory=Path("/a"), shared=True)),
        ({"TTP_LOG_PATH": "/a", "TTP_LOG_STDOUT": "1"}, environment.Logging()),
        ({"TTP_LOG_PATH": "/a", "TTP_LOG_STDOUT": "yes"}, environment.Logging(directory=Path("/a"))),
    ],
)  # fmt: skip
def test_the_log_destination_is_read_from_variables(
    variables: dict[str, str], expected: environment.Logging
) -> None:
    """When a variable gives a valid log directory, then it is used; an invalid one is ignored.
    Without a variable the directory is `logs`; with TTP_LOG_STDOUT there is none."""
    assert environment.logging(variables) == expected


@pytest.mark.parametrize("shared", [False, True])
def test_log_lines_go_to_a_file_of_the_process_or_of_all(
    shared: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """When there is a log directory, then log lines are in a file there that other users cannot
    write, and nowhere else."""
    wanted = environment.Logging(directory=tmp_path / "logs", shared=shared, level="WARNING")
    log = logs.get_logger(wanted)
    log.warning("seen", rank=3)
    log.info("not_seen")
    [file] = (tmp_path / "logs").iterdir()
    assert file.name == ("ttp_log.log" if shared else f"ttp_log.log.{os.getpid()}")
    [line] = file.read_text().splitlines()
    assert line.endswith("level=warning event=seen rank=3")
    assert stat.S_IMODE(file.stat().st_mode) & 0o137 == 0
    assert stat.S_IMODE(file.parent.stat().st_mode) & 0o027 == 0
    assert capsys.readouterr() == ("", "")


def test_log_lines_go_to_standard_output_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    """When TTP_LOG_STDOUT is 1, then log lines go to standard output."""
    logs.get_logger(environment.logging({"TTP_LOG_STDOUT": "1"})).info("seen")
    out, err = capsys.readouterr()
    assert (out.endswith("event=seen\n"), out.count("\n"), err) == (True, 1, "")


def test_a_line_that_operators_search_for_is_in_the_output_and_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """When operators search the output of a rank for a line, then the line is once in that output
    and once in the log file."""
    logs.get_logger(environment.Logging(directory=tmp_path), printed=True).info("seen")
    [file] = tmp_path.iterdir()
    assert capsys.readouterr().out == file.read_text()
    logs.get_logger(environment.Logging(), printed=True).info("seen")
    assert capsys.readouterr().out.count("event=seen") == 1


@pytest.mark.parametrize("wrong", ["a file", "a link", "a linked file"])
def test_log_lines_go_to_the_output_when_the_file_cannot_be_written(
    wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """When the directory cannot be made, or the directory or the file is a link, then log lines go
    to standard output, the reason is written once to standard error for all loggers together, and
    no line is lost."""
    directory, real = tmp_path / "logs", tmp_path / "real"
    real.mkdir()
    match wrong:
        case "a file":
            directory.write_text("")
        case "a link":
            directory.symlink_to(real)
        case _:
            directory.mkdir()
            (directory / "ttp_log.log").symlink_to(real / "file")
    wanted = environment.Logging(directory=directory, shared=True)
    logs.get_logger(wanted).error("one")
    logs.get_logger(wanted).error("two")
    out, err = capsys.readouterr()
    assert [line.rpartition("=")[2] for line in out.splitlines()] == ["one", "two"]
    assert err.count("\n") == 1
    assert err.startswith(f"mindio_ttp: {directory}/ttp_log.log cannot be written: ")
    assert "Set TTP_LOG_PATH to a directory that can be written" in err
    assert list(real.iterdir()) == []


def imported(where: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """
    Import the package in a new process, with a variable out of range so that a warning is logged.
    """
    environ = {**os.environ, "TTP_RETRY_TIMES": "301", "TTP_LOG_STDOUT": "0", **more}
    return subprocess.run(
        [sys.executable, "-c", "import mindio_ttp.framework_ttp"],
        env=environ, cwd=where, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_ignored_variables_are_logged_at_import(tmp_path: Path) -> None:
    """When a variable is out of its range, then the process logs that when it imports the package.
    The log is in `logs` below the working directory by default."""
    done = imported(tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    [file] = (tmp_path / "logs").iterdir()
    assert file.name.removeprefix("ttp_log.log.").isdigit()
    assert (
        "TTP_RETRY_TIMES is '301', and not a number from 1 to 300: 10 is used" in file.read_text()
    )


def test_a_process_survives_a_log_directory_that_cannot_be_made(tmp_path: Path) -> None:
    """When TTP_LOG_PATH is below a file, then the process reports that on standard error and logs
    to standard output."""
    (tmp_path / "file").write_text("")
    done = imported(tmp_path, TTP_LOG_PATH=str(tmp_path / "file" / "logs"))
    assert done.returncode == 0
    assert "TTP_RETRY_TIMES is '301'" in done.stdout
    assert done.stderr.count("\n") == 1
    assert "cannot be written: Not a directory; lines go to standard output" in done.stderr


# ---------------------------------------------------------------- variables of the launcher


def test_a_process_gets_its_node_from_the_launcher() -> None:
    """When a launcher gives the node of the process, then it is used. Otherwise the process is
    alone on its machine, or all processes are on one machine."""
    torchrun = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "3"}
    assert environment.place(7, 8, alone=False, environ=torchrun) == environment.Place(
        local_rank=1, local_world=2, machine=3
    )
    assert environment.place(7, 8, alone=False, environ={}) == environment.Place(
        local_rank=0, local_world=1, machine=7
    )
    assert environment.place(7, 8, alone=True, environ={}) == environment.Place(
        local_rank=7, local_world=8, machine=0
    )


def test_the_launchers_variables_are_restored_for_the_program() -> None:
    """When an agent has set variables of its own, then the program finds those of its launcher."""
    launched = {"MASTER_ADDR": "a", "MASTER_PORT": "29500", "LOCAL_RANK": "1", "OTHER": "kept"}
    environ = dict(launched)
    environment.carry(environ)
    environ |= {"MASTER_ADDR": "b", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "1"}
    environment.restore(environ)
    assert environ == launched
    environment.restore(environ)
    assert environ == launched


def test_log_levels_are_those_of_python() -> None:
    """When a log level is known to this package, then Python's logging knows it."""
    assert all(isinstance(getattr(logging, level), int) for level in environment.LEVELS)
