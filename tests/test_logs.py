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


def test_debug_events_are_logged_when_the_log_is_verbose() -> None:
    """When the log is verbose, then it contains events of level debug."""
    assert "event=looked" in lines(verbose=True)[0]
