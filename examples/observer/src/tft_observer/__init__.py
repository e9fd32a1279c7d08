"""
A plugin that only observes: it writes a line of JSON for every event of a job.

    tft run --observe FILE ...         or TFT_OBSERVE=FILE in the environment of `tft controller`

It runs in the controller and in no training process, so training does not wait for it.
"""

import json
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from tft.spi import hookimpl

VARIABLE = "TFT_OBSERVE"
"""The variable that names the file, in every process of the job."""


@hookimpl
def tft_options() -> Sequence[click.Option]:
    return [
        click.Option(
            ["--observe"],
            type=click.Path(dir_okay=False, path_type=Path),
            help="Add a line of JSON to this file for everything that happens to the job.",
        )
    ]


@hookimpl
def tft_environment(options: Mapping[str, Any]) -> Mapping[str, str]:  # Any: each option's own
    file: Path | None = options["observe"]
    return {} if file is None else {VARIABLE: str(file.absolute())}


@hookimpl
def tft_on_event(event: str, facts: Mapping[str, object]) -> None:
    path = os.environ.get(VARIABLE)
    if not path:
        return
    line = {"at": datetime.now(UTC).isoformat(), "event": event, **facts}
    with open(path, "a") as file:  # a local file: the controller waits for this
        file.write(json.dumps(line, default=str) + "\n")
