"""
`tft checkpoint`: what can be asked of checkpoints that lie on a disk.
"""

from pathlib import Path

import click

from tft import checkpoint
from tft.errors import UsageError


def verify(path: Path) -> int:
    """
    Read every file of a checkpoint and say that it is whole. `path` may be a run directory, which
    means its newest. Raises `CheckpointCorrupt` naming what is not as it was written, `UsageError`
    where there is no checkpoint.
    """
    directory = path
    if not (path / checkpoint.MANIFEST).is_file():
        newest = checkpoint.newest(path)
        if newest is None:
            raise UsageError(
                f"{path} is no checkpoint, nor a run directory with one: a checkpoint that was "
                "finished has a " + checkpoint.MANIFEST
            )
        directory = newest
    known = checkpoint.verify(directory)
    size = sum(file.size for file in known.files)
    click.echo(
        f"{directory}: whole; the end of step {known.step} of {known.world} ranks, "
        f"{len(known.files)} files with {size} bytes, written with the adaptor {known.adaptor}"
    )
    return 0


def checkpoint_command() -> click.Command:
    """
    `tft checkpoint`.
    """
    path = click.Argument(["path"], type=click.Path(path_type=Path))
    one = click.Command(
        "verify",
        callback=verify,
        params=[path],
        help="Read every file of a checkpoint, or of the newest one of a run directory, and compare "
        "it with what was written.",
    )
    return click.Group(
        "checkpoint", commands=[one], help="Asks something of a checkpoint on a disk."
    )
