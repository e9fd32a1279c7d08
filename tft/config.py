"""
The settings of tft. Each setting is declared once, with its default and a description. In tft, only
this module reads environment variables.

`JobSettings` contains the options of `tft run`, which every process of the job gets. `RankSettings`
contains the values that a training process finds in its environment.
"""

import os
import shlex
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tft.errors import UsageError

RUN_OPTIONS = "TFT_RUN_OPTIONS"
"""The environment variable with options of `tft run`, for a job whose processes another launcher
(such as torchrun) starts."""

BROKER_PORTS = 2
"""The number of ports that the broker uses. It listens at PORT for publishers of messages, and at
PORT + 1 for subscribers."""

CHECKPOINT_NAME = "step-{step:08d}"
"""The default pattern of checkpoint names. Steps are written with leading zeros, so that a
directory listing has them in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """
    The settings of one job, as they were given to its launcher.
    """

    job: str
    """The name of the job. No other job on the same bus may have this name. A rank must send the
    name to fetch state from another rank."""
    run_dir: Path
    """The run directory, in which the run keeps its records, such as logs and the report."""
    broker: str
    """The address of the broker, as HOST:PORT."""
    run: str = ""
    """The identifier of one start of `tft run`. A restarted controller gets the same identifier, so
    it can tell which records belong to its own run, and continues them."""
    nnodes: int = 1
    """The number of nodes of the job, without spare nodes. Each node has one agent."""
    nproc_per_node: int = 1
    """The number of ranks of each node, which the node's agent starts."""
    adaptor: str = "pytorch"
    """The name of the adaptor for the job's framework: an entry point in the group `tft.adaptors`.
    """
    enable: tuple[str, ...] = ()
    """The names of the recovery strategies that tft may use, such as `retry`. Empty: all strategies
    that the adaptor supports."""
    max_incidents: int = 100
    """The number of incidents that the job may have. At the next incident after that, the job saves
    a last checkpoint and ends (strategy `dump`)."""
    max_rank_faults: int = 5
    """The number of incidents that one rank may cause within 10 minutes. If the rank causes one
    more, tft neither lets the rank try again nor replaces its process."""
    replace_nodes: bool = False
    """True: when a process is lost, all processes of its node are replaced. False: only the lost
    process is replaced."""
    spread_savers: bool = False
    """True: the ranks that write the shards of a last checkpoint are chosen on as many different
    nodes as possible. False: the first holder of each shard writes the shard."""
    save_copies: str = "one"
    """How many copies of each shard a checkpoint contains. `one`: one copy. `all`: one copy from
    each rank that holds the shard."""
    skip_batch: bool = False
    """What ranks do after a numeric fault (such as a NaN loss), when they have returned to an
    earlier step. True: the ranks skip the batches up to the faulty step. False: the ranks train on
    these batches again."""
    on_corruption: str = "majority"
    """What tft does when copies of a shard differ and no copy from before the difference is left.
    `majority`: tft uses the content that most copies have; if there is no majority, the job ends.
    `end`: the job ends. `continue`: as `majority`, but if there is no majority, tft uses the copy
    of the lowest rank."""
    backup_every: int = 0
    """The number of steps between two copies of a rank's state in host memory. 0: no such copies
    are made."""
    warm_ranks: int = 0
    """The number of warm processes of each node. A warm process has run the script up to the first
    use of the session, and takes the place of a lost rank at once. It needs memory for its imports
    and its model. 0: no warm processes are kept."""
    checkpoint_every: int = 0
    """The number of steps between two periodic checkpoints. 0: no periodic checkpoints are
    written."""
    checkpoint_dir: Path | None = None
    """The directory for checkpoints. By default `checkpoints` in the run directory."""
    checkpoint_name: str = CHECKPOINT_NAME
    """The pattern of the names of checkpoints. It contains the step."""
    keep_checkpoints: int = 0
    """The number of periodic checkpoints to keep. Older checkpoints are removed. 0: all checkpoints
    are kept."""
    resume: bool = False
    """True: the job continues from the newest checkpoint. False: training starts from the
    beginning."""
    export: Path | None = None
    """The directory in which the last checkpoint is also written in the form of the framework, when
    the job has ended with one. None: only in the form of tft."""
    export_only: bool = False
    """True: the job resumes only to write the newest checkpoint to `export`, and trains no step."""
    curve: Path | None = None
    """The directory with the job's keys, made by `tft keys`. With keys, the bus and all transfers
    of state between ranks are encrypted."""
    audit: str = "first"
    """How much the audit checks. After an incident, code of the training loop that is outside the
    update windows may run twice or not at all. The audit looks for code there whose effect would
    then be repeated or lost. `first`: the audit checks the first 20 steps of each process.
    `strict`: the audit checks all steps and raises an error for such code. `off`: there is no
    audit."""
    last_step: int = 0
    """The step after which training ends, as if the script asked for no more steps. 0: the script
    decides when training ends."""
    record_digests: bool = False
    """True: each rank writes digests of its batches, losses and state to a file in every step, so
    that two runs can be compared."""

    @property
    def world(self) -> int:
        """
        Return the number of ranks of the job.
        """
        return self.nnodes * self.nproc_per_node

    @property
    def checkpoints(self) -> Path:
        """
        Return the directory for checkpoints.
        """
        return self.checkpoint_dir or self.run_dir / "checkpoints"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """
    The settings of one training process. The agent has put each setting into the environment of the
    process. The text of each setting begins with the name of its variable.
    """

    rank: int
    """RANK: the number of this rank in the job."""
    world: int
    """WORLD_SIZE: the number of ranks of the job."""
    job: str
    """TFT_JOB: see `JobSettings.job`."""
    run_dir: Path
    """TFT_RUN_DIR: see `JobSettings.run_dir`."""
    broker: str
    """TFT_BROKER: the address of the broker, as HOST:PORT."""
    adaptor: str
    """TFT_ADAPTOR: see `JobSettings.adaptor`."""
    incarnation: int
    """TFT_INCARNATION: the number of this process among the processes of the rank. The number is 0
    for the first process, and one more for each replacement."""
    page: int
    """TFT_PAGE: the inherited file descriptor of the shared memory of this rank (`tft.page`)."""
    host: str
    """TFT_HOST: the address at which other ranks can reach this node."""
    bell: int | None = None
    """TFT_BELL: the inherited file descriptor of a pipe. This process writes to the pipe to wake
    its agent, which then sends the rank-local state to another node. None (an empty variable) in a
    job with one node."""
    backup_every: int = 0
    """TFT_BACKUP_EVERY: see `JobSettings.backup_every`."""
    checkpoint_every: int = 0
    """TFT_CHECKPOINT_EVERY: see `JobSettings.checkpoint_every`."""
    checkpoint_dir: Path | None = None
    """TFT_CHECKPOINT_DIR: see `JobSettings.checkpoint_dir`. An empty variable means None."""
    checkpoint_name: str = CHECKPOINT_NAME
    """TFT_CHECKPOINT_NAME: see `JobSettings.checkpoint_name`."""
    keep_checkpoints: int = 0
    """TFT_KEEP_CHECKPOINTS: see `JobSettings.keep_checkpoints`."""
    save_copies: str = "one"
    """TFT_SAVE_COPIES: see `JobSettings.save_copies`."""
    curve: Path | None = None
    """TFT_CURVE: see `JobSettings.curve`. An empty variable means None."""
    successor: bool = False
    """TFT_SUCCESSOR: 1 if this process is to take over the rank from another process, which still
    trains. Otherwise 0."""
    skip_batch: bool = False
    """TFT_SKIP_BATCH: see `JobSettings.skip_batch` (1 or 0)."""
    export: Path | None = None
    """TFT_EXPORT: see `JobSettings.export`. An empty variable means None."""
    export_only: bool = False
    """TFT_EXPORT_ONLY: see `JobSettings.export_only` (1 or 0)."""
    audit: str = "first"
    """TFT_AUDIT: see `JobSettings.audit`."""
    last_step: int = 0
    """TFT_LAST_STEP: see `JobSettings.last_step`."""
    record_digests: bool = False
    """TFT_RECORD_DIGESTS: see `JobSettings.record_digests` (1 or 0)."""

    @property
    def checkpoints(self) -> Path:
        """
        Return the directory for checkpoints.
        """
        return self.checkpoint_dir or self.run_dir / "checkpoints"

    def environment(self) -> dict[str, str]:
        """
        Return the environment variables from which `rank_settings` reads these settings again.
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
            "TFT_BELL": "" if self.bell is None else str(self.bell),
            "TFT_BACKUP_EVERY": str(self.backup_every),
            "TFT_CHECKPOINT_EVERY": str(self.checkpoint_every),
            "TFT_CHECKPOINT_DIR": str(self.checkpoint_dir or ""),
            "TFT_CHECKPOINT_NAME": self.checkpoint_name,
            "TFT_KEEP_CHECKPOINTS": str(self.keep_checkpoints),
            "TFT_SAVE_COPIES": self.save_copies,
            "TFT_CURVE": str(self.curve or ""),
            "TFT_SUCCESSOR": str(int(self.successor)),
            "TFT_SKIP_BATCH": str(int(self.skip_batch)),
            "TFT_EXPORT": str(self.export or ""),
            "TFT_EXPORT_ONLY": str(int(self.export_only)),
            "TFT_AUDIT": self.audit,
            "TFT_LAST_STEP": str(self.last_step),
            "TFT_RECORD_DIGESTS": str(int(self.record_digests)),
        }


def ranks_on_node() -> int:
    """
    Return the number of ranks for which this node has room (variable LOCAL_WORLD_SIZE). Return 1 if
    the number is not known.
    """
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(said)) if said.isdecimal() else 1


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
            bell=int(environ["TFT_BELL"]) if environ["TFT_BELL"] else None,
            backup_every=int(environ["TFT_BACKUP_EVERY"]),
            checkpoint_every=int(environ["TFT_CHECKPOINT_EVERY"]),
            checkpoint_dir=_path(environ["TFT_CHECKPOINT_DIR"]),
            checkpoint_name=environ["TFT_CHECKPOINT_NAME"],
            keep_checkpoints=int(environ["TFT_KEEP_CHECKPOINTS"]),
            save_copies=environ["TFT_SAVE_COPIES"],
            curve=_path(environ["TFT_CURVE"]),
            successor=environ["TFT_SUCCESSOR"] == "1",
            skip_batch=environ["TFT_SKIP_BATCH"] == "1",
            export=_path(environ["TFT_EXPORT"]),
            export_only=environ["TFT_EXPORT_ONLY"] == "1",
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
            "one of the environment variables that the agent sets for this rank (RANK, TFT_PAGE "
            f"and others) must be a number, and is not: {wrong}. Do not change them in the script"
        ) from None


def started_by_agent(environ: Mapping[str, str] = os.environ) -> bool:
    """
    Return True if an agent of tft has started this process.
    """
    return "TFT_JOB" in environ


def run_options(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """
    Return the options of `tft run` in the variable TFT_RUN_OPTIONS as separate words, split as a
    shell splits them. Raises `UsageError` if the text cannot be split, for example because a quote
    is not closed.
    """
    try:
        return tuple(shlex.split(environ.get(RUN_OPTIONS, "")))
    except ValueError as wrong:
        raise UsageError(
            f"the environment variable {RUN_OPTIONS} cannot be split into options: {wrong}"
        ) from None


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
    The settings that a training process needs before its script runs. The text of each setting
    begins with the name of its environment variable.
    """

    rank: int
    """RANK: the number of this rank in the job."""
    incarnation: int
    """TFT_INCARNATION: see `RankSettings.incarnation`."""
    adaptor: str
    """TFT_ADAPTOR: see `JobSettings.adaptor`."""
    page: int
    """TFT_PAGE: see `RankSettings.page`."""
    words: int
    """TFT_WORDS: the inherited file descriptor of the file into which the process writes the stacks
    of its threads, or a traceback, before it ends."""


def launch_settings(environ: Mapping[str, str] = os.environ) -> LaunchSettings:
    """
    Read the settings for the module `tft.worker.launch`, which runs a script as a rank, from the
    environment. Raises `UsageError` if no agent of tft has started the process.
    """
    try:
        return LaunchSettings(
            rank=int(environ["RANK"]),
            incarnation=int(environ["TFT_INCARNATION"]),
            adaptor=environ["TFT_ADAPTOR"],
            page=int(environ["TFT_PAGE"]),
            words=int(environ["TFT_WORDS"]),
        )
    except (KeyError, ValueError):
        raise UsageError(
            "tft.worker.launch is started by an agent, which sets RANK, "
            "TFT_INCARNATION, TFT_ADAPTOR, TFT_PAGE and TFT_WORDS: start your script with `tft run SCRIPT`"
        ) from None


def descriptor_variables(
    *, page: int | str, words: int | str, bell: int | str = ""
) -> dict[str, str]:
    """
    Return the variables TFT_PAGE, TFT_WORDS and TFT_BELL for a training process. These variables
    name the shared memory of the process, the file for the stacks of its threads, and the pipe
    through which the process wakes its agent. Each value is the number of an inherited file
    descriptor, or a path. `bell` is empty in a job with one node, which has no such pipe.
    """
    return {"TFT_PAGE": str(page), "TFT_WORDS": str(words), "TFT_BELL": str(bell)}


def descriptor_paths(environ: Mapping[str, str] = os.environ) -> tuple[str, str, str] | None:
    """
    Return three paths from the environment of a training process: the paths of its shared memory,
    of the file for the stacks of its threads, and of the pipe that wakes its agent. The last path
    is empty if there is no such pipe.

    A process gets paths if a program other than the agent has started it. Return None for a process
    that has inherited file descriptors instead.
    """
    page, words = environ.get("TFT_PAGE", ""), environ.get("TFT_WORDS", "")
    there = page.startswith("/") and words.startswith("/")
    return (page, words, environ.get("TFT_BELL", "")) if there else None


def aside_variables(mark: str) -> dict[str, str]:
    """
    Return the variables TFT_ASIDE and TFT_REAPER for a process of the job that is not a rank.
    TFT_REAPER has the value `mark`: when the job is over, the reaper of the node kills all
    processes with this value.
    """
    return {"TFT_ASIDE": "1", "TFT_REAPER": mark}


def stands_aside(environ: Mapping[str, str] = os.environ) -> bool:
    """
    Return True if this process belongs to a job but is not a rank (see `aside_variables`).
    """
    return "TFT_ASIDE" in environ


@contextmanager
def change_environment(
    changes: Mapping[str, str | None], environ: MutableMapping[str, str] = os.environ
) -> Iterator[None]:
    """
    Set the environment variables in `changes` while the context is open, and remove the variables
    whose value is None. Afterwards restore the earlier values of all these variables.
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
    Set the environment variables `variables` for this process, including its C libraries. Remove
    each variable whose value is None.
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
    Return the variable TFT_PARENT, for a process that must die when the process `pid` dies.
    """
    return {"TFT_PARENT": str(pid)}


def take_parent(environ: MutableMapping[str, str] = os.environ) -> int | None:
    """
    Return the pid in the variable TFT_PARENT, or None if the variable is missing or not a number.
    Remove the variable from the environment, because child processes of this process must not see
    the variable.
    """
    parent = environ.pop("TFT_PARENT", "")
    return int(parent) if parent.isdigit() else None
