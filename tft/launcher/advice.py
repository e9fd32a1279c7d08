"""
Tells the user which package makes the framework of a script fault tolerant. `tft run` prints this
advice if the script has trained no step under tft.

A package registers a sentence in the entry point group `FRAMEWORKS`. The name of the entry point is
the module that scripts of the framework import.
"""

import re
from importlib.metadata import entry_points
from pathlib import Path

import structlog

from tft.plugins import FAILURES

FRAMEWORKS = "tft.frameworks"
"""The entry point group of sentences about frameworks."""

log = structlog.get_logger()


def advice(script: Path) -> list[str]:
    """
    Return a sentence for each framework that `script` imports and that a package can protect. A
    script that imports the package already gets no sentence.

    The script is not run, only read. A script that cannot be read gets no advice.
    """
    try:
        text = script.read_text(errors="replace")
    except OSError:
        return []
    found = []
    for entry in entry_points(group=FRAMEWORKS):
        package = entry.module.partition(".")[0]
        if _imports(text, entry.name) and not _imports(text, package):
            try:
                found.append(f"{script.name} imports {entry.name}: {entry.load()}")
            except FAILURES:  # importing a third-party module may raise any exception
                log.exception("advice_not_loaded", framework=entry.name)
    return found


def _imports(text: str, module: str) -> bool:
    found = re.search(rf"^\s*(?:import|from)\s+{re.escape(module)}\b", text, re.MULTILINE)
    return found is not None
