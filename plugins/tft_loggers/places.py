"""
Where the files of this plugin are in a run directory, and how they are written.

    values-rank{rank}.jsonl    what each rank has logged; the ranks write it
    values.jsonl               the values of each final step, once
    values/final.json          up to which step the steps are final; the controller writes it
    values/merged.json         how far the files of the ranks are merged
    values/NAME/               the files of the logger NAME, among them how far it has been sent, and,
                               while it fails, how often it has failed and why
"""

import json
from pathlib import Path
from typing import Any

from tft.spi import write_whole

STATE = "values"
FINAL = "final.json"
MERGED = "merged.json"
SENT = "sent.json"
FAILED = "failed.json"
VALUES = "values.jsonl"


def read(path: Path) -> dict[str, Any]:  # Any: parsed JSON
    """
    Return the object in a file, or an empty one if the file does not exist or is damaged.
    """
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write(path: Path, content: dict[str, object]) -> None:
    """
    Replace the content of a file as a whole. Readers see the old or the new content.
    """
    write_whole(path, json.dumps(content))
