"""
Settings: each declared once, with its unit, its default and one sentence. The environment is
read here and nowhere else.

`JobSettings` is what `tft run` was told and every part of the job is told in turn;
`RankSettings` is what a training process finds in its environment.
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
    One job, as its launcher was told.
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

    @property
    def world(self) -> int:
        """
        How many ranks the job has.
        """
        return self.nnodes * self.nproc_per_node

    @property
    def checkpoints(self) -> Path:
        """
        Where checkpoints are.
        """
        return self.checkpoint_dir or self.run_dir / "checkpoints"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """
    One training process, as its agent started it.
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

    @property
    def checkpoints(self) -> Path:
        """
        Where checkpoints are.
        """
        return self.checkpoint_dir or self.run_dir / "checkpoints"

    def environment(self) -> dict[str, str]:
        """
        The variables that `rank_settings` reads back.
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
            "TFT_CHECKPOINT_EVERY": str(self.checkpoint_every),
            "TFT_CHECKPOINT_DIR": str(self.checkpoint_dir or ""),
            "TFT_CHECKPOINT_NAME": self.checkpoint_name,
            "TFT_KEEP_CHECKPOINTS": str(self.keep_checkpoints),
            "TFT_SAVE_COPIES": self.save_copies,
            "TFT_CURVE": str(self.curve or ""),
            "TFT_SUCCESSOR": str(int(self.successor)),
            "TFT_AUDIT": self.audit,
        }


def rank_settings(environ: Mapping[str, str] = os.environ) -> RankSettings:
    """
    What this training process was told. Raises `UsageError` where it was started by something
    other than a tft agent.
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
            checkpoint_every=int(environ["TFT_CHECKPOINT_EVERY"]),
            checkpoint_dir=_path(environ["TFT_CHECKPOINT_DIR"]),
            checkpoint_name=environ["TFT_CHECKPOINT_NAME"],
            keep_checkpoints=int(environ["TFT_KEEP_CHECKPOINTS"]),
            save_copies=environ["TFT_SAVE_COPIES"],
            curve=_path(environ["TFT_CURVE"]),
            successor=environ["TFT_SUCCESSOR"] == "1",
            audit=environ["TFT_AUDIT"],
        )
    except KeyError as missing:
        raise UsageError(
            f"tft.init needs the variable {missing.args[0]}, which an agent sets for the ranks it "
            "starts: start this script with `tft run SCRIPT`, with torchrun or with srun"
        ) from None
    except ValueError as wrong:
        raise UsageError(f"a variable set for this rank is not a number: {wrong}") from None


def started_by_agent(environ: Mapping[str, str] = os.environ) -> bool:
    """
    Whether an agent of tft has started this process.
    """
    return "TFT_JOB" in environ


def run_options(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """
    The words of TFT_RUN_OPTIONS, cut as a shell cuts them. Raises `UsageError` where that cannot be.
    """
    try:
        return tuple(shlex.split(environ.get(RUN_OPTIONS, "")))
    except ValueError as wrong:
        raise UsageError(f"{RUN_OPTIONS} cannot be split into options: {wrong}") from None


def _path(text: str) -> Path | None:
    return Path(text) if text else None


def inherited_environment() -> dict[str, str]:
    """
    A copy of this process's environment, for the processes it starts.
    """
    return dict(os.environ)


# ---------------------------------------------------------------- from parent to child


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """
    What a training process must know before its script runs.
    """

    rank: int
    """RANK: global rank."""
    adaptor: str
    """TFT_ADAPTOR: see `JobSettings.adaptor`."""
    words: int
    """TFT_WORDS: the inherited file descriptor that takes the last words."""


def launch_settings(environ: Mapping[str, str] = os.environ) -> LaunchSettings:
    """
    What `tft.worker.launch` was told. Raises `UsageError` where no agent started it.
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
    TFT_PAGE and TFT_WORDS: under which numbers a training process has these descriptors, or by which
    paths it opens them.
    """
    return {"TFT_PAGE": str(page), "TFT_WORDS": str(words)}


def descriptor_paths(environ: Mapping[str, str] = os.environ) -> tuple[str, str] | None:
    """
    Where a process can open the page and the file for its last words that could not inherit them, as
    its agent's child would; None for one that has.
    """
    page, words = environ.get("TFT_PAGE", ""), environ.get("TFT_WORDS", "")
    return (page, words) if page.startswith("/") and words.startswith("/") else None


def aside_variables(mark: str) -> dict[str, str]:
    """
    TFT_ASIDE and TFT_REAPER: for a process of the job that holds no rank, which is ended with what the
    reaper that knows this mark ends.
    """
    return {"TFT_ASIDE": "1", "TFT_REAPER": mark}


def stands_aside(environ: Mapping[str, str] = os.environ) -> bool:
    """
    Whether this process is part of a job and holds no rank.
    """
    return "TFT_ASIDE" in environ


@contextmanager
def change_environment(
    changes: Mapping[str, str | None], environ: MutableMapping[str, str] = os.environ
) -> Iterator[None]:
    """
    While this is open, this process has these variables, and not those that are None. What somebody
    else changes meanwhile stays as it is.
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
    From now on this process, its libraries in C too, has these variables, and not those that are None.
    """
    for name, value in variables.items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value


def replace_environment(variables: Mapping[str, str]) -> None:
    """
    From now on this process, its libraries in C too, has these variables and no others.
    """
    os.environ.clear()
    os.environ.update(variables)


def parent_variable(pid: int) -> dict[str, str]:
    """
    TFT_PARENT: the process that the child to be started lives and dies with.
    """
    return {"TFT_PARENT": str(pid)}


def take_parent(environ: MutableMapping[str, str] = os.environ) -> int | None:
    """
    The pid in TFT_PARENT, or None. Taken out of the environment: it is meant for this process,
    not for those that it starts.
    """
    parent = environ.pop("TFT_PARENT", "")
    return int(parent) if parent.isdigit() else None
