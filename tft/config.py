"""
The settings of tft. Each is declared once, with its unit, its default and one sentence. Only this
module reads the environment.

`JobSettings` has the options of `tft run`, which every process of the job gets. `RankSettings` has
the values that a training process finds in its environment.
"""

import os
import shlex
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tft.errors import UsageError

RUN_OPTIONS = "TFT_RUN_OPTIONS"
"""The variable with options of `tft run` for a job whose processes another launcher starts."""

BROKER_PORTS = 2
"""The broker listens at PORT for publishers and at PORT + 1 for subscribers."""

CHECKPOINT_NAME = "step-{step:08d}"
"""With zeros, so that a listing is in the order of the steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """
    The settings of one job, as they were given to its launcher.
    """

    job: str
    """A name no other job on the bus has; also the key that opens the transfer ports."""
    run_dir: Path
    """Where the records of the run are kept."""
    broker: str
    """HOST:PORT of the broker."""
    run: str = ""
    """One start of `tft run`, which chooses it: a restarted controller goes on with its own run."""
    nnodes: int = 1
    """How many agents take part."""
    nproc_per_node: int = 1
    """How many ranks each agent starts."""
    adaptor: str = "pytorch"
    """The entry point in `tft.adaptors` that knows the job's framework."""
    enable: tuple[str, ...] = ()
    """The strategies that may be used; empty: all that the adaptor can do."""
    max_incidents: int = 100
    """After so many incidents the next one ends in `dump`."""
    max_rank_faults: int = 5
    """After causing so many incidents within 10 minutes a rank is neither retried nor replaced."""
    replace_nodes: bool = False
    """When a rank loses its process, all processes of its node are replaced, not that one alone."""
    spread_savers: bool = False
    """A last checkpoint is written by as many nodes as can, not by the lowest-placed holders."""
    save_copies: str = "one"
    """How often a shard is in a checkpoint: once (`one`), or by each rank that holds it (`all`)."""
    skip_batch: bool = False
    """When bad numbers took everyone back, the batches up to that step are left out."""
    backup_every: int = 0
    """Steps between two copies of a rank's state in host memory; 0: no copies are kept."""
    checkpoint_every: int = 0
    """Steps between two periodic checkpoints; 0: there are none."""
    checkpoint_dir: Path | None = None
    """Where checkpoints are; not given: in `checkpoints` in the run directory."""
    checkpoint_name: str = CHECKPOINT_NAME
    """What a checkpoint is called, with the step in it."""
    keep_checkpoints: int = 0
    """When a periodic checkpoint is complete, so many of the newest are kept; 0: all."""
    resume: bool = False
    """Continue from the newest checkpoint."""
    curve: Path | None = None
    """The directory with the job's keys, of `tft keys`: the bus and the state that moves are encrypted."""
    audit: str = "first"
    """What a loop does outside its update windows is looked at in the `first` 20 steps of a process, or in all, and refused (`strict`), or not at all (`off`)."""
    last_step: int = 0
    """Training ends with this step, as if the script asked for no more; 0: it ends as the script says."""
    record_digests: bool = False
    """Each rank writes the digests of its batches, losses and state after every step, to compare runs."""

    @property
    def world(self) -> int:
        """
        Return the number of ranks of the job.
        """
        return self.nnodes * self.nproc_per_node

    @property
    def checkpoints(self) -> Path:
        """
        Return the directory of the checkpoints.
        """
        return self.checkpoint_dir or self.run_dir / "checkpoints"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """
    The settings of one training process, as its agent has set them in the environment.
    """

    rank: int
    """RANK: global rank."""
    world: int
    """WORLD_SIZE: how many ranks the job has."""
    job: str
    """TFT_JOB: see `JobSettings.job`."""
    run_dir: Path
    """TFT_RUN_DIR: see `JobSettings.run_dir`."""
    broker: str
    """TFT_BROKER: HOST:PORT of the broker."""
    adaptor: str
    """TFT_ADAPTOR: see `JobSettings.adaptor`."""
    incarnation: int
    """TFT_INCARNATION: how many processes held this rank before."""
    page: int
    """TFT_PAGE: the inherited file descriptor of this rank's page."""
    host: str
    """TFT_HOST: the address other ranks reach this node at."""
    backup_every: int = 0
    """TFT_BACKUP_EVERY: see `JobSettings.backup_every`."""
    checkpoint_every: int = 0
    """TFT_CHECKPOINT_EVERY: see `JobSettings.checkpoint_every`."""
    checkpoint_dir: Path | None = None
    """TFT_CHECKPOINT_DIR: see `JobSettings.checkpoint_dir`; empty: it is not given."""
    checkpoint_name: str = CHECKPOINT_NAME
    """TFT_CHECKPOINT_NAME: see `JobSettings.checkpoint_name`."""
    keep_checkpoints: int = 0
    """TFT_KEEP_CHECKPOINTS: see `JobSettings.keep_checkpoints`."""
    save_copies: str = "one"
    """TFT_SAVE_COPIES: see `JobSettings.save_copies`."""
    curve: Path | None = None
    """TFT_CURVE: see `JobSettings.curve`; empty: it is not given."""
    successor: bool = False
    """TFT_SUCCESSOR: it is to take over from a process that still trains (1), or not (0)."""
    audit: str = "first"
    """TFT_AUDIT: see `JobSettings.audit`."""
    last_step: int = 0
    """TFT_LAST_STEP: see `JobSettings.last_step`."""
    record_digests: bool = False
    """TFT_RECORD_DIGESTS: see `JobSettings.record_digests` (1 or 0)."""

    @property
    def checkpoints(self) -> Path:
        """
        Return the directory of the checkpoints.
        """
        return self.checkpoint_dir or self.run_dir / "checkpoints"

    def environment(self) -> dict[str, str]:
        """
        Return the environment variables from which `rank_settings` makes the same settings.
        """
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world),
            "TFT_JOB": self.job,
            "TFT_RUN_DIR": str(self.run_dir),
            "TFT_BROKER": self.broker,
            "TFT_ADAPTOR": self.adaptor,
            "TFT_INCARNATION": str(self.incarnation),
            "TFT_PAGE": str(self.page),
            "TFT_HOST": self.host,
            "TFT_BACKUP_EVERY": str(self.backup_every),
            "TFT_CHECKPOINT_EVERY": str(self.checkpoint_every),
            "TFT_CHECKPOINT_DIR": str(self.checkpoint_dir or ""),
            "TFT_CHECKPOINT_NAME": self.checkpoint_name,
            "TFT_KEEP_CHECKPOINTS": str(self.keep_checkpoints),
            "TFT_SAVE_COPIES": self.save_copies,
            "TFT_CURVE": str(self.curve or ""),
            "TFT_SUCCESSOR": str(int(self.successor)),
            "TFT_AUDIT": self.audit,
            "TFT_LAST_STEP": str(self.last_step),
            "TFT_RECORD_DIGESTS": str(int(self.record_digests)),
        }


def rank_settings(environ: Mapping[str, str] = os.environ) -> RankSettings:
    """
    Read the settings of this training process from the environment. Raises `UsageError` if no agent
    of tft has started the process.
    """
    try:
        return RankSettings(
            rank=int(environ["RANK"]),
            world=int(environ["WORLD_SIZE"]),
            job=environ["TFT_JOB"],
            run_dir=Path(environ["TFT_RUN_DIR"]),
            broker=environ["TFT_BROKER"],
            adaptor=environ["TFT_ADAPTOR"],
            incarnation=int(environ["TFT_INCARNATION"]),
            page=int(environ["TFT_PAGE"]),
            host=environ["TFT_HOST"],
            backup_every=int(environ["TFT_BACKUP_EVERY"]),
            checkpoint_every=int(environ["TFT_CHECKPOINT_EVERY"]),
            checkpoint_dir=_path(environ["TFT_CHECKPOINT_DIR"]),
            checkpoint_name=environ["TFT_CHECKPOINT_NAME"],
            keep_checkpoints=int(environ["TFT_KEEP_CHECKPOINTS"]),
            save_copies=environ["TFT_SAVE_COPIES"],
            curve=_path(environ["TFT_CURVE"]),
            successor=environ["TFT_SUCCESSOR"] == "1",
            audit=environ["TFT_AUDIT"],
            last_step=int(environ["TFT_LAST_STEP"]),
            record_digests=environ["TFT_RECORD_DIGESTS"] == "1",
        )
    except KeyError as missing:
        raise UsageError(
            f"tft.init needs the variable {missing.args[0]}, which an agent sets for the ranks it "
            "starts: start this script with `tft run SCRIPT`, with torchrun or with srun"
        ) from None
    except ValueError as wrong:
        raise UsageError(
            f"the environment variable of this rank must be a number: {wrong}"
        ) from None


def started_by_agent(environ: Mapping[str, str] = os.environ) -> bool:
    """
    Return True if an agent of tft has started this process.
    """
    return "TFT_JOB" in environ


def run_options(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """
    Return the words of TFT_RUN_OPTIONS, split as a shell splits them. Raises `UsageError` if the
    text cannot be split, for example because a quote is not closed.
    """
    try:
        return tuple(shlex.split(environ.get(RUN_OPTIONS, "")))
    except ValueError as wrong:
        raise UsageError(f"{RUN_OPTIONS} cannot be split into options: {wrong}") from None


def _path(text: str) -> Path | None:
    return Path(text) if text else None


def inherited_environment() -> dict[str, str]:
    """
    Return a copy of the environment of this process, for the processes that it starts.
    """
    return dict(os.environ)


# ---------------------------------------------------------------- variables for child processes


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """
    The settings that a training process needs before its script runs.
    """

    rank: int
    """RANK: global rank."""
    adaptor: str
    """TFT_ADAPTOR: see `JobSettings.adaptor`."""
    words: int
    """TFT_WORDS: the inherited file descriptor that takes the last words."""


def launch_settings(environ: Mapping[str, str] = os.environ) -> LaunchSettings:
    """
    Read the settings for `tft.worker.launch` from the environment. Raises `UsageError` if no agent
    of tft has started the process.
    """
    try:
        return LaunchSettings(
            rank=int(environ["RANK"]),
            adaptor=environ["TFT_ADAPTOR"],
            words=int(environ["TFT_WORDS"]),
        )
    except (KeyError, ValueError):
        raise UsageError(
            "tft.worker.launch is started by an agent, which sets RANK, TFT_ADAPTOR and "
            "TFT_WORDS: start your script with `tft run SCRIPT`"
        ) from None


def descriptor_variables(*, page: int | str, words: int | str) -> dict[str, str]:
    """
    Return the variables TFT_PAGE and TFT_WORDS for a training process. They name the page and the
    file for its last words, by the numbers of inherited descriptors or by paths.
    """
    return {"TFT_PAGE": str(page), "TFT_WORDS": str(words)}


def descriptor_paths(environ: Mapping[str, str] = os.environ) -> tuple[str, str] | None:
    """
    Return the paths of the page and of the file for the last words, for a process that could not
    inherit their descriptors. Return None for a process that has inherited them.
    """
    page, words = environ.get("TFT_PAGE", ""), environ.get("TFT_WORDS", "")
    return (page, words) if page.startswith("/") and words.startswith("/") else None


def aside_variables(mark: str) -> dict[str, str]:
    """
    Return the variables TFT_ASIDE and TFT_REAPER for a process of the job that holds no rank. The
    reaper with the mark `mark` ends this process.
    """
    return {"TFT_ASIDE": "1", "TFT_REAPER": mark}


def stands_aside(environ: Mapping[str, str] = os.environ) -> bool:
    """
    Return True if this process belongs to a job but holds no rank.
    """
    return "TFT_ASIDE" in environ


@contextmanager
def change_environment(
    changes: Mapping[str, str | None], environ: MutableMapping[str, str] = os.environ
) -> Iterator[None]:
    """
    Set these variables while the context is open, and remove those whose value is None. Afterwards
    restore the earlier values, except for variables that other code has changed meanwhile.
    """
    earlier = {name: environ.get(name) for name in changes}
    set_environment(changes, environ)
    try:
        yield
    finally:
        set_environment(earlier, environ)


def set_environment(
    variables: Mapping[str, str | None], environ: MutableMapping[str, str] = os.environ
) -> None:
    """
    Set these variables for this process, including its C libraries, and remove those whose value is
    None.
    """
    for name, value in variables.items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value


def replace_environment(variables: Mapping[str, str]) -> None:
    """
    Make `variables` the whole environment of this process, including its C libraries.
    """
    os.environ.clear()
    os.environ.update(variables)


def parent_variable(pid: int) -> dict[str, str]:
    """
    Return the variable TFT_PARENT for a process that must die when the process `pid` dies.
    """
    return {"TFT_PARENT": str(pid)}


def take_parent(environ: MutableMapping[str, str] = os.environ) -> int | None:
    """
    Return the pid in TFT_PARENT, or None. Remove the variable from the environment: it is meant for
    this process, not for the processes that it starts.
    """
    parent = environ.pop("TFT_PARENT", "")
    return int(parent) if parent.isdigit() else None
