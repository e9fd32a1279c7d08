"""
The log of the command line: one line for each event, on stderr only.
"""

import re
import subprocess
import sys
from pathlib import Path

CODE = """
import structlog
from tft.logs import configure_logs
configure_logs(verbose={verbose})
log = structlog.get_logger()
log.debug("looked")
log.info("rank_silent", rank=3, why="no beat\\nfor long")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("plugin_failed", plugin="mine")
"""


def lines(*, verbose: bool) -> list[str]:
    """
    Return the lines that a process with these settings writes.
    """
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(verbose=verbose)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_event_is_logged_as_one_line_of_keys_and_values() -> None:
    """When events are logged, then each event is one line with its time, also when its values have
    line breaks."""
    silent, failed = lines(verbose=False)
    stamp = r"at=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z"

    assert re.fullmatch(
        rf'{stamp} level=info event=rank_silent rank=3 why="no beat\\nfor long"', silent
    )
    assert re.match(rf"{stamp} level=error event=plugin_failed plugin=mine exception=", failed)
    assert failed.endswith('ZeroDivisionError: division by zero"')


def test_log_on_a_full_disk_does_not_end_the_process() -> None:
    """When stderr is a file on a full disk, then events are left out and the process goes on."""
    with Path("/dev/full").open("w") as full:
        code = f"{CODE.format(verbose=False)}print('went on')"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, stderr=full, text=True, check=False,
        )  # fmt: skip
    assert done.stdout == "went on\n"


def test_quiet_events_of_a_rank_are_only_in_its_file(tmp_path: Path) -> None:
    """When a script has set up structlog in its own way, then quiet events are lines of the file, and
    events that cannot be written to a file are logged as all others."""
    file = tmp_path / "rank-0.0.log"
    code = f"""
import structlog
from pathlib import Path
from tft.logs import quiet_log
structlog.configure(processors=[lambda *_: "the script's own"])
quiet_log.open(Path({str(tmp_path / "none" / "log")!r}))
quiet_log.info("first")
quiet_log.open(Path({str(file)!r}))
quiet_log.info("checkpointed", step=20, why="\\ud800")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("the script's own\n", "")
    assert re.fullmatch(r"at=\S+ level=info event=checkpointed step=20 why=\S+\n", file.read_text())


def test_debug_events_are_logged_when_the_log_is_verbose() -> None:
    """When the log is verbose, then it contains events of level debug."""
    assert "event=looked" in lines(verbose=True)[0]
