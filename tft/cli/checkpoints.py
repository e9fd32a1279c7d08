"""
`tft checkpoint`: commands for checkpoints on a disk.
"""

from pathlib import Path

import click

from tft import checkpoint
from tft.checkpoint import CheckpointStore
from tft.config import CHECKPOINT_NAME
from tft.errors import UsageError
from tft.launcher.run_directory import checkpoint_store_there, known_unfit
from tft.plugins import checkpoint_commands


def verify(path: Path, checkpoint_name: str = CHECKPOINT_NAME) -> int:
    """
    Read every file of a checkpoint, and print whether it is undamaged.

    `path` may be a checkpoint, a run directory, or a directory with checkpoints of the pattern
    `checkpoint_name`. If there are several checkpoints, the newest is read. Raises
    `CheckpointCorrupt` with a message about the damage if the checkpoint is damaged. Raises
    `UsageError` if there is no checkpoint.
    """
    directory = path
    if not (path / checkpoint.MANIFEST).is_file():
        there = CheckpointStore(directory=path, name=checkpoint_name)
        there.check()
        newest = checkpoint.newest(checkpoint_store_there(path)) or checkpoint.newest(there)
        if newest is None:
            raise UsageError(
                f"{path} is no checkpoint, and no run directory or directory of checkpoints that "
                f"contains one: a complete checkpoint has a file {checkpoint.MANIFEST}"
            )
        directory = newest
    known = checkpoint.verify(directory)
    named = CheckpointStore(directory=directory.parent, name=checkpoint_name)
    checkpoint.check_name(named, directory, known)
    size = sum(file.size for file in known.files)
    for why in checkpoint.damaged(directory) if known.copies else ():
        click.echo(f"{why}; another copy is whole")
    click.echo(
        f"{directory}: whole; the end of step {known.step} of {known.world} ranks, "
        f"{len(known.files)} files with {size} bytes, written with the adaptor {known.adaptor}"
    )
    if lacking := known_unfit(named, directory):
        click.echo(f"tft run --resume does not go on from it: {lacking}")
    return 0


def checkpoint_command() -> click.Command:
    """
    Return the command `tft checkpoint`.
    """
    path = click.Argument(["path"], type=click.Path(path_type=Path))
    name = click.Option(
        ["--checkpoint-name"],
        default=CHECKPOINT_NAME,
        show_default=True,
        help=(
            "How the checkpoints of a --checkpoint-dir are named; the value that `tft run` was "
            "given."
        ),
    )
    one = click.Command(
        "verify",
        callback=verify,
        params=[path, name],
        help="Read every file of a checkpoint, or of the newest one of a run directory or of a "
        "--checkpoint-dir, and compare it with what was written.",
    )
    return click.Group(
        "checkpoint",
        commands=[one, *checkpoint_commands()],
        help="Inspect checkpoints on a disk, or restore one.",
    )
