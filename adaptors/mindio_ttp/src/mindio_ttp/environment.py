"""
The environment variables of programs for MindIO, each with its range (MindIO TFT 7.3.0).

A value out of its range counts as not set, as in MindIO, but is logged.
"""

import json
import os
import shlex
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

_CARRIED = "TFT_MINDIO_LAUNCHED"
"""The variable that carries the launcher's variables to the process that a tft agent starts."""
ORCHESTRATOR = "TFT_MINDIO_ORCHESTRATOR"
"""The variable with the path of the socket where the controller listens for an orchestrator."""
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
    The values of the variables. Each line gives the range and the default in parentheses.
    """

    mindspore: bool
    """MINDIO_FOR_MINDSPORE: the program is one for MindSpore (true or 1)."""
    task: str
    """MINDX_TASK_ID: the orchestrator's name of the job; empty where there is no orchestrator."""
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
    """TTP_ACCLINK_CHECK_PERIOD_HOURS: hours between two checks of certificates (24 to 720, 168)."""
    certificate_ahead: int
    """TTP_ACCLINK_CERT_CHECK_AHEAD_DAYS: days before their end from which certificates are warned
    of (7 to 180, 30)."""
    enters_again: bool = True
    """MS_ENABLE_TFT: MindSpore's loop is entered again after a fault. This needs UCE, HCCE or ARF.
    Without these MindSpore reports every error that leaves its loop as unknown, and ends."""
    ignored: tuple[str, ...] = ()
    """A sentence for each value that was ignored."""


def variables(environ: Mapping[str, str] = os.environ) -> Variables:
    """
    Read the variables.
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
        ignored=tuple(ignored),  # last, since arguments are evaluated in their order
    )


def _enters_again(enabled: str) -> bool:
    """
    Return whether the loop is entered again, by the same substring tests as MindSpore's
    `Model.train`.
    """
    is_mindspores = any(item in enabled for item in ("TTP:1", "TSP:1"))
    return not is_mindspores or any(item in enabled for item in ("UCE:1", "HCCE:1", "ARF:1"))


LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


@dataclass(frozen=True, slots=True, kw_only=True)
class Logging:
    """
    The variables that say where log lines are written.
    """

    directory: Path | None = None
    """TTP_LOG_PATH: the directory of the log file (default `logs`). None: lines go to standard
    output and no file is kept, since TTP_LOG_STDOUT is 1."""
    level: str = "INFO"
    """TTP_LOG_LEVEL: the lowest level of a line that is written."""
    shared: bool = False
    """TTP_LOG_MODE is ONLY_ONE: all processes write to one file. Else each process has its own
    file."""


def logging(environ: Mapping[str, str] = os.environ) -> Logging:
    """
    Read the variables of logging. An invalid value counts as not set: no log exists yet to report
    it.
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
    Return the value of a variable; None where it is not set.
    """
    return environ.get(name)


def clean_before_dump(environ: MutableMapping[str, str] = os.environ) -> None:
    """
    Set TTP_STOP_CLEAN_BEFORE_DUMP to 1, for this process and the processes that it starts.
    """
    environ["TTP_STOP_CLEAN_BEFORE_DUMP"] = "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """
    The place of this process, as the launcher of the job has set it.
    """

    local_rank: int
    local_world: int
    machine: int


def place(rank: int, world: int, *, alone: bool, environ: Mapping[str, str] = os.environ) -> Place:
    """
    Return the place of this process from the variables of launchers.

    Where they are not set: `alone` means that all ranks are on one machine, else each rank has its
    own.
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
    Copy the launcher's variables to other names, because an agent sets its own values.
    """
    kept = {name: environ[name] for name in _OVERWRITTEN if name in environ}
    environ[_CARRIED] = json.dumps(kept)


def hub(environ: Mapping[str, str] = os.environ) -> tuple[str, int] | None:
    """
    Return the address of the hub, where the program has no store of its own.

    None where the launcher's process serves a store, as torchrun's does. To be called before
    `restore`.
    """
    launcher = json.loads(environ.get(_CARRIED, "{}"))
    if launcher.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    return environ["MASTER_ADDR"], int(environ["MASTER_PORT"])


def meet_at(host: str, port: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """
    Set the variables of torch.distributed's `env://` to a store at this address, which no rank
    serves.
    """
    environ["MASTER_ADDR"], environ["MASTER_PORT"] = host, str(port)
    environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"


def restore(environ: MutableMapping[str, str] = os.environ) -> None:
    """
    Restore the launcher's variables: the program meets the other ranks at the usual address.
    """
    if _CARRIED not in environ:
        return
    kept = json.loads(environ.pop(_CARRIED))
    for name in _OVERWRITTEN:
        environ.pop(name, None)
    environ.update(kept)


def orchestrator_socket(environ: Mapping[str, str] = os.environ) -> Path | None:
    """
    Return the path where the controller listens; None where no orchestrator is expected.
    """
    return Path(environ[ORCHESTRATOR]) if environ.get(ORCHESTRATOR) else None


def with_orchestrator(path: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """
    Return the environment of a controller that must listen at `path`.
    """
    return {**environ, ORCHESTRATOR: str(path)}


def below_tft(environ: Mapping[str, str] = os.environ) -> bool:
    """
    Return whether a tft agent has started this process.
    """
    return "TFT_JOB" in environ


def run_options(environ: Mapping[str, str] = os.environ) -> list[str]:
    """
    Return the user's options for `tft run`.
    """
    return shlex.split(environ.get("TFT_RUN_OPTIONS", ""))
