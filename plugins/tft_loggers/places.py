"""
The names of this plugin's files in a run directory, and functions that read and write them.

    values-rank{rank}.jsonl    the values that a rank has logged; written by the rank
    values.jsonl               the values of each final step, once, merged from all ranks
    values/final.json          the last final step; written by the controller
    values/merged.json         up to which offset the file of each rank was merged
    values/NAME/               the files of the logger NAME
    values/NAME/sent.json      up to which offset `values.jsonl` was sent to the logger
    values/NAME/failed.json    while the logger fails: the number of failures, and the reason
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
    Return the JSON object in the file `path`. Return an empty object if the file does not exist or
    is damaged.
    """
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write(path: Path, content: dict[str, object]) -> None:
    """
    Replace the content of the file `path` in one atomic step. So a reader sees the old or the new
    content, and never a part of it.
    """
    write_whole(path, json.dumps(content))
