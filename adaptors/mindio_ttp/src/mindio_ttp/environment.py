"""
The variables that programs for MindIO are told things in, each with its range (MindIO TFT 7.3.0). What
is out of its range counts as not said, which is what MindIO makes of it, but is told.
"""

import json
import os
import shlex
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

_CARRIED = "TFT_MINDIO_LAUNCHED"
"""What the launcher of the job had set, for the process that a tft agent starts in its place."""
ORCHESTRATOR = "TFT_MINDIO_ORCHESTRATOR"
"""Where the controller listens for what manages the cluster."""
_OVERWRITTEN = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RUN_ID",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variables:
    """
    What the environment says.
    """

    mindspore: bool
    """MINDIO_FOR_MINDSPORE: the program is one for MindSpore (true or 1)."""
    task: str
    """MINDX_TASK_ID: the orchestrator's name of the job; empty: there is none."""
    wait_orchestrator: int
    """MINDIO_WAIT_MINDX_TIME: seconds that an orchestrator may take to answer (1 to 3600, 30)."""
    action_limit: int
    """TTP_NORMAL_ACTION_TIME_LIMIT: seconds that a function may take (30 to 1800, 180)."""
    retries: int
    """TTP_RETRY_TIMES: how often a connection is tried (1 to 300, 10)."""
    clean_before_dump: bool
    """TTP_STOP_CLEAN_BEFORE_DUMP: stop and clean before a last checkpoint (0 or 1, 0)."""
    framework: int
    """TTP_FRAMEWORK_TYPE: 0, or 1 for X1 (0)."""
    certificate_period: int
    """TTP_ACCLINK_CHECK_PERIOD_HOURS: hours between two looks at certificates (24 to 720, 168)."""
    certificate_ahead: int
    """TTP_ACCLINK_CERT_CHECK_AHEAD_DAYS: how long before their end they are told of (7 to 180, 30)."""
    enters_again: bool = True
    """MS_ENABLE_TFT: MindSpore's loop is entered again after a fault, which takes UCE, HCCE or ARF. Without
    them MindSpore reports whatever leaves its loop as unknown, and ends."""
    ignored: tuple[str, ...] = ()
    """What was said and counts for nothing, a sentence for each."""


def variables(environ: Mapping[str, str] = os.environ) -> Variables:
    """
    Read them.
    """
    ignored: list[str] = []

    def within(name: str, least: int, most: int, default: int) -> int:
        text = environ.get(name)
        if text is None:
            return default
        if text.isascii() and text.isdigit() and least <= int(text) <= most:
            return int(text)
        ignored.append(
            f"{name} is {text!r}, and not a number from {least} to {most}: {default} is used"
        )
        return default

    return Variables(
        mindspore=environ.get("MINDIO_FOR_MINDSPORE", "").lower() in ("true", "1"),
        task=environ.get("MINDX_TASK_ID", ""),
        wait_orchestrator=within("MINDIO_WAIT_MINDX_TIME", 1, 3600, 30),
        action_limit=within("TTP_NORMAL_ACTION_TIME_LIMIT", 30, 1800, 180),
        retries=within("TTP_RETRY_TIMES", 1, 300, 10),
        clean_before_dump=within("TTP_STOP_CLEAN_BEFORE_DUMP", 0, 1, 0) == 1,
        framework=within("TTP_FRAMEWORK_TYPE", 0, 1, 0),
        certificate_period=within("TTP_ACCLINK_CHECK_PERIOD_HOURS", 24, 720, 168),
        certificate_ahead=within("TTP_ACCLINK_CERT_CHECK_AHEAD_DAYS", 7, 180, 30),
        enters_again=_enters_again(environ.get("MS_ENABLE_TFT", "")),
        ignored=tuple(ignored),  # the last: arguments are made in their order
    )


def _enters_again(enabled: str) -> bool:
    """
    By what MindSpore's `Model.train` looks for, and how.
    """
    is_mindspores = any(item in enabled for item in ("TTP:1", "TSP:1"))
    return not is_mindspores or any(item in enabled for item in ("UCE:1", "HCCE:1", "ARF:1"))


LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


@dataclass(frozen=True, slots=True, kw_only=True)
class Logging:
    """
    Where lines go.
    """

    directory: Path | None = None
    """TTP_LOG_PATH: the directory of a file for them (logs). None: they go to standard output, and no file is kept,
    since TTP_LOG_STDOUT is 1."""
    level: str = "INFO"
    """TTP_LOG_LEVEL: the lowest level of a line that is written."""
    shared: bool = False
    """TTP_LOG_MODE is ONLY_ONE: all processes write to one file; else each has its own."""


def logging(environ: Mapping[str, str] = os.environ) -> Logging:
    """
    Read them. What cannot be is taken as not said: there is nowhere yet to tell it.
    """
    level = environ.get("TTP_LOG_LEVEL", "").upper()
    printed = environ.get("TTP_LOG_STDOUT") == "1"
    return Logging(
        directory=None if printed else Path(environ.get("TTP_LOG_PATH") or "logs").absolute(),
        level=level if level in LEVELS else "INFO",
        shared=environ.get("TTP_LOG_MODE") == "ONLY_ONE",
    )


def text(name: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """
    Return a variable as it stands; None where it is not set.
    """
    return environ.get(name)


def clean_before_dump(environ: MutableMapping[str, str] = os.environ) -> None:
    """
    From now on it is as if TTP_STOP_CLEAN_BEFORE_DUMP were 1, here and in what this process starts.
    """
    environ["TTP_STOP_CLEAN_BEFORE_DUMP"] = "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """
    Where the launcher of the job has put this process.
    """

    local_rank: int
    local_world: int
    machine: int


def place(rank: int, world: int, *, alone: bool, environ: Mapping[str, str] = os.environ) -> Place:
    """
    As the variables of launchers say it. Where they do not: `alone` on one machine, or each on its own.
    """
    local_rank, local_world = (rank, world) if alone else (0, 1)
    local_rank = int(environ.get("LOCAL_RANK", local_rank))
    local_world = int(environ.get("LOCAL_WORLD_SIZE", local_world))
    machine = environ.get("GROUP_RANK", environ.get("NODE_RANK", ""))
    return Place(
        local_rank=local_rank,
        local_world=local_world,
        machine=int(machine) if machine.isdigit() else rank // max(1, local_world),
    )


def carry(environ: MutableMapping[str, str] = os.environ) -> None:
    """
    Keep what the launcher has set, where an agent sets its own.
    """
    kept = {name: environ[name] for name in _OVERWRITTEN if name in environ}
    environ[_CARRIED] = json.dumps(kept)


def hub(environ: Mapping[str, str] = os.environ) -> tuple[str, int] | None:
    """
    Return the address of the hub, where the program has no store of its own: None where the launcher's process
    serves one, as torchrun's does. To be asked before `restore`.
    """
    launcher = json.loads(environ.get(_CARRIED, "{}"))
    if launcher.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    return environ["MASTER_ADDR"], int(environ["MASTER_PORT"])


def meet_at(host: str, port: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """
    Have `env://` of torch.distributed lead to a store at this address that no rank opens itself.
    """
    environ["MASTER_ADDR"], environ["MASTER_PORT"] = host, str(port)
    environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"


def restore(environ: MutableMapping[str, str] = os.environ) -> None:
    """
    What the launcher has set is there again: the program meets the others where it always did.
    """
    if _CARRIED not in environ:
        return
    kept = json.loads(environ.pop(_CARRIED))
    for name in _OVERWRITTEN:
        environ.pop(name, None)
    environ.update(kept)


def orchestrator_socket(environ: Mapping[str, str] = os.environ) -> Path | None:
    """
    Where the controller listens; None: it expects nobody.
    """
    return Path(environ[ORCHESTRATOR]) if environ.get(ORCHESTRATOR) else None


def with_orchestrator(path: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """
    The environment of a controller that is to listen there.
    """
    return {**environ, ORCHESTRATOR: str(path)}


def below_tft(environ: Mapping[str, str] = os.environ) -> bool:
    """
    Whether a tft agent has started this process.
    """
    return "TFT_JOB" in environ


def run_options(environ: Mapping[str, str] = os.environ) -> list[str]:
    """
    The options that the user has for `tft run`.
    """
    return shlex.split(environ.get("TFT_RUN_OPTIONS", ""))
