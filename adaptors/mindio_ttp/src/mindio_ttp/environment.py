"""
Reads the environment variables that configure the library MindIO in a training program.

The names of the variables and the ranges of their values are those of MindIO TFT 7.3.0. As in
MindIO, a value out of its range is logged, and the default is used instead.
"""

import json
import os
import shlex
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

_CARRIED = "TFT_MINDIO_LAUNCHED"
"""The environment variable that carries saved variables of the launcher, as JSON, to the process
that a tft agent starts."""
ORCHESTRATOR = "TFT_MINDIO_ORCHESTRATOR"
"""The environment variable with the path of the socket at which the controller listens for an
orchestrator (the manager of a cluster)."""
# The launcher's variables that an agent of tft overwrites in the worker processes that it starts.
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
    The values of the environment variables that configure MindIO in a training program.

    The text of each field begins with the name of its environment variable.
    """

    mindspore: bool
    """MINDIO_FOR_MINDSPORE: True if the variable says that the program uses MindSpore (`true` or
    `1`)."""
    task: str
    """MINDX_TASK_ID: the name that an orchestrator (the manager of a cluster) gave to the job.
    Empty without an orchestrator."""
    wait_orchestrator: int
    """MINDIO_WAIT_MINDX_TIME: the seconds that an orchestrator (the manager of a cluster) may take
    to answer (1 to 3600, default 30)."""
    action_limit: int
    """TTP_NORMAL_ACTION_TIME_LIMIT: the seconds that a registered function of the training program
    may take (30 to 1800, default 180)."""
    retries: int
    """TTP_RETRY_TIMES: in MindIO, the number of attempts to connect to the controller. tft checks
    the value, but does not use it (1 to 300, default 10)."""
    clean_before_dump: bool
    """TTP_STOP_CLEAN_BEFORE_DUMP: True if the program's registered functions `stop` and `clean` are
    called before the program saves a last checkpoint (0 or 1, default 0)."""
    framework: int
    """TTP_FRAMEWORK_TYPE: the training framework of the program, 1 for the framework X1 (0 or 1,
    default 0)."""
    certificate_period: int
    """TTP_ACCLINK_CHECK_PERIOD_HOURS: in MindIO, the hours between two checks of certificates. tft
    checks the value, but does not use it (24 to 720, default 168)."""
    certificate_ahead: int
    """TTP_ACCLINK_CERT_CHECK_AHEAD_DAYS: a warning is logged if a certificate expires within this
    number of days (7 to 180, default 30)."""
    enters_again: bool = True
    """MS_ENABLE_TFT: False if MindSpore cannot enter its training loop again after a fault. The
    value is False if the variable switches on TTP or TSP, but none of the features UCE, HCCE and
    ARF. MindSpore then reports every error that leaves its loop as unknown, and ends."""
    ignored: tuple[str, ...] = ()
    """For each environment variable whose value was ignored because it is out of its range, a
    sentence that says so."""


def variables(environ: Mapping[str, str] = os.environ) -> Variables:
    """
    Read the environment variables that configure MindIO from `environ`. Return their values."""
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
        # must be the last argument, because the calls of `within` above fill this list
        ignored=tuple(ignored),
    )


def _enters_again(enabled: str) -> bool:
    """
    Return whether MindSpore's `Model.train` enters its training loop again after a fault.

    `enabled` is the value of the environment variable MS_ENABLE_TFT. This function searches the
    value for the same texts as `Model.train` does. The result is also True if the value switches on
    neither of the features TTP and TSP.
    """
    is_mindspores = any(item in enabled for item in ("TTP:1", "TSP:1"))
    return not is_mindspores or any(item in enabled for item in ("UCE:1", "HCCE:1", "ARF:1"))


LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


@dataclass(frozen=True, slots=True, kw_only=True)
class Logging:
    """
    The settings of the log of this package, from the environment variables TTP_LOG_PATH,
    TTP_LOG_STDOUT, TTP_LOG_LEVEL and TTP_LOG_MODE.
    """

    directory: Path | None = None
    """TTP_LOG_PATH: the directory of the log file (default `logs`). None if TTP_LOG_STDOUT is 1:
    then lines go to standard output, and there is no file."""
    level: str = "INFO"
    """TTP_LOG_LEVEL: the lowest level of the log lines that are written."""
    shared: bool = False
    """True if TTP_LOG_MODE is ONLY_ONE: then all processes write to one log file. Otherwise each
    process has its own log file."""


def logging(environ: Mapping[str, str] = os.environ) -> Logging:
    """
    Read the environment variables that configure the log of this package. Return the settings. An
    invalid value is ignored without a message, because no log exists yet.
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
    Return the value of the environment variable `name`. Return None if the variable is not set.
    """
    return environ.get(name)


def clean_before_dump(environ: MutableMapping[str, str] = os.environ) -> None:
    """
    Set the environment variable TTP_STOP_CLEAN_BEFORE_DUMP to 1, for this process and its child
    processes. The program's functions `stop` and `clean` are then called before a last checkpoint.
    """
    environ["TTP_STOP_CLEAN_BEFORE_DUMP"] = "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """
    The place of this process among the processes of its machine, as the launcher of the job has set
    it.
    """

    local_rank: int
    local_world: int
    """The number of ranks on this machine."""
    machine: int
    """The number of this machine among the machines of the job, counted from 0."""


def place(rank: int, world: int, *, alone: bool, environ: Mapping[str, str] = os.environ) -> Place:
    """
    Return the place of this process among the processes of its machine, from the environment
    variables that launchers such as torchrun set.

    If these variables are not set, the place is computed from `rank` and `world`. With `alone=True`
    all ranks are assumed to be on one machine. With `alone=False` each rank is assumed to be on a
    machine of its own.
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
    Save the environment variables that the launcher has set, because an agent of tft overwrites
    them. Their values are saved in one other variable, from which `restore` sets them again.
    """
    kept = {name: environ[name] for name in _OVERWRITTEN if name in environ}
    environ[_CARRIED] = json.dumps(kept)


def hub(environ: Mapping[str, str] = os.environ) -> tuple[str, int] | None:
    """
    Return the address of the hub, which is the process of tft that serves the rendezvous store of
    the training program.

    Return None if the launcher itself serves a rendezvous store, as torchrun does. Call this
    function before `restore`, which overwrites the variables that this function reads.
    """
    launcher = json.loads(environ.get(_CARRIED, "{}"))
    if launcher.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    return environ["MASTER_ADDR"], int(environ["MASTER_PORT"])


def meet_at(host: str, port: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """
    Set the environment variables from which `init_process_group` of torch.distributed learns the
    address of its rendezvous store (method `env://`). The store at `host` and `port` is then used.

    The variable TORCHELASTIC_USE_AGENT_STORE is set too, so that rank 0 serves no store itself.
    """
    environ["MASTER_ADDR"], environ["MASTER_PORT"] = host, str(port)
    environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"


def restore(environ: MutableMapping[str, str] = os.environ) -> None:
    """
    Set the environment variables of the launcher again that `carry` has saved. The training program
    then uses the launcher's rendezvous address. Do nothing if `carry` has saved no variables.
    """
    if _CARRIED not in environ:
        return
    kept = json.loads(environ.pop(_CARRIED))
    for name in _OVERWRITTEN:
        environ.pop(name, None)
    environ.update(kept)


def orchestrator_socket(environ: Mapping[str, str] = os.environ) -> Path | None:
    """
    Return the path of the socket at which the controller listens for an orchestrator (the manager
    of a cluster). Return None if no orchestrator is expected.
    """
    return Path(environ[ORCHESTRATOR]) if environ.get(ORCHESTRATOR) else None


def with_orchestrator(path: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """
    Return environment variables for a controller process that must listen for an orchestrator at
    the socket `path`. They are a copy of `environ` with one more variable.
    """
    return {**environ, ORCHESTRATOR: str(path)}


def below_tft(environ: Mapping[str, str] = os.environ) -> bool:
    """
    Return whether a tft agent has started this process.
    """
    return "TFT_JOB" in environ


def run_options(environ: Mapping[str, str] = os.environ) -> list[str]:
    """
    Return the options of the command `tft run` that the user has set in the environment variable
    TFT_RUN_OPTIONS.
    """
    return shlex.split(environ.get("TFT_RUN_OPTIONS", ""))
