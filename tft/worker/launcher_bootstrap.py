"""
The start of a job by `tft.init` in processes that another launcher, such as torchrun or srun, has
started.

Each of these processes replaces itself by the command `tft run`, for a node with one rank. This
`tft run` starts a process for the rank, in which the script runs. After a fault it starts another
process for the rank.

The process keeps its pid (`exec`), so its launcher still watches it. It also keeps the cores,
devices and limits that the launcher gave it. The launcher does not notice when a rank dies and is
replaced.
"""

import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NoReturn

import msgspec

from tft.bus.ports import free_address, host_for_all, may_be_reached, own_address
from tft.config import JobSettings, inherited_environment, run_options
from tft.errors import UsageError
from tft.plugins import load_adaptor
from tft.spi.launcher import check_options
from tft.worker.launchers import Launcher, launcher_of

LOOPBACK = "127.0.0.1"

_STORES_ADAPTOR = "pytorch"
"""The only adaptor that can read the store of torchrun. It is loaded for this purpose even if the
job trains with another adaptor."""
_PYTHON_WITH_WORD = "WX"
"""The one-letter options of Python that take a value. The value is the rest of the word
(`-Wignore`) or the next word (`-W ignore`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """
    The address of the broker and the run directory, on which all nodes of a job must agree.
    """

    broker: str
    run_dir: str
    """The run directory. Empty if only the user's options name it."""


def become_launcher(launcher: Launcher | None = None, options: Sequence[str] = ()) -> None:
    """
    If another launcher has started this process, replace the process by the command `tft run`, for
    a node with one rank. Otherwise return.

    If `launcher` is None, the rank of this process and the machine on which it runs are read from
    the environment. `options` are options of `tft run`. The options that the user has set in the
    environment are put after `options`, and so take precedence. Raises `UsageError` if this process
    cannot be started again, or cannot find the other processes.
    """
    environment = inherited_environment()
    launcher = launcher or launcher_of(environment)
    if launcher is None:
        return
    options = (*options, *run_options())
    check_options(options)
    command = started_as(sys.orig_argv, getattr(sys.modules["__main__"], "__file__", None))
    _check_nothing_begun(options)
    host = _host(launcher, options)
    meeting = _meet(launcher, host)
    words = node_words(launcher, meeting, host=own_address(host))
    _replace([*words, *options, *command], environment)


# ---------------------------------------------------------------- command lines


def adaptor_of(options: Sequence[str]) -> str:
    """
    Return the adaptor that the options of `tft run` name, or the default adaptor.
    """
    chosen = next(str(each.default) for each in fields(JobSettings) if each.name == "adaptor")
    for word, following in zip(options, [*options, ""][1:], strict=True):
        name, given, value = word.partition("=")
        if name == "--adaptor":
            chosen = value if given else following
    return chosen


def started_as(python: Sequence[str], file: str | None) -> list[str]:
    """
    Return the script or module that this Python runs, with its arguments, as words of a command
    line for `tft run`.

    `python` is the command line of this Python, `file` the file of its main module. Raises
    `UsageError` if the program cannot be started again (`python -c`, standard input).
    """
    rest = iter(python[1:])
    for word in rest:
        if not word.startswith("-") or word == "-":
            if word == "-" or file is None:
                break
            return [file, *rest]
        if word.startswith("--"):
            if word == "--check-hash-based-pycs":
                next(rest, "")
            continue
        for place, letter in enumerate(word[1:], start=2):
            if letter == "m":
                module = word[place:] or next(rest, "")
                return ["-m", module, *rest]
            if letter == "c":
                raise _not_again("`python -c`")
            if letter in _PYTHON_WITH_WORD:
                if not word[place:]:
                    next(rest, "")
                break
    raise _not_again("a script that Python read from its standard input")


def node_words(launcher: Launcher, meeting: Meeting, *, host: str) -> list[str]:
    """
    Return the options of `tft run` that set the nodes, the rank and the broker. This process, which
    a launcher has started, replaces itself (exec) by `tft run` with these options.
    """
    words = [
        *("--nnodes", str(launcher.world), "--node-rank", str(launcher.rank)),
        *("--nproc-per-node", "1", "--resume-if-any", "--placed", str(launcher.local_rank)),
        *(str(launcher.local_world), str(launcher.machine)),
        *("--broker", meeting.broker, "--host", host),
    ]
    return [*words, "--run-dir", meeting.run_dir] if meeting.run_dir else words


def default_run_dir(start: str) -> str:
    """
    Return the default run directory of a job. `start` is the launcher's name for this job.
    """
    return str(Path("tft-runs", re.sub(r"[^\w.-]", "-", start)).absolute())


def _not_again(what: str) -> UsageError:
    return UsageError(
        f"under a launcher tft.init starts the script a second time, but this process runs {what}, "
        "which cannot be started again: save the script to a file, or start the job with `tft run`"
    )


# ---------------------------------------------------------------- the meeting of the nodes


def _check_nothing_begun(options: Sequence[str]) -> None:
    begun = load_adaptor(adaptor_of(options)).hook.tft_begun()
    if begun:
        raise UsageError(
            f"{begun} exists already: under a launcher, tft.init starts the script again in "
            "another process. Call tft.init before anything else; tft forms the process groups "
            "itself"
        )


def _host(launcher: Launcher, options: Sequence[str]) -> str:
    """
    Return the address at which this machine reaches process 0 (the process with rank 0 of the
    launcher).

    Raises `UsageError` if other machines cannot use the address, or if the options do not allow
    ports that other machines can reach.
    """
    if launcher.alone:
        return LOOPBACK
    return host_for_all(launcher.address, trusted=may_be_reached(options), named="MASTER_ADDR")


def _meet(launcher: Launcher, host: str) -> Meeting:
    """
    Agree with the other processes on the broker and the run directory.

    If the launcher serves no store, the port that the launcher names (`MASTER_PORT`) is free, and
    the broker uses that port. If the launcher serves a store, process 0 chooses the broker's port
    and the run directory, and passes both to the other processes through the store.
    """
    named = default_run_dir(launcher.start) if launcher.start else ""
    if not launcher.serves:
        return Meeting(broker=f"{host}:{launcher.port}", run_dir=named)
    adaptor = load_adaptor(_STORES_ADAPTOR)
    store = adaptor.hook.tft_launcher_store(host=launcher.address, port=launcher.port)
    # The launcher's store outlives the processes, which the launcher may restart. So each key
    # contains the number of restarts: processes must not read values that were written before a
    # restart.
    prefix = f"tft/{launcher.attempt}"
    if launcher.rank:
        return msgspec.json.decode(store.take(f"{prefix}/{launcher.rank}"), type=Meeting)
    fresh = default_run_dir(f"{launcher.name}-{secrets.token_hex(4)}")
    meeting = Meeting(broker=free_address(host), run_dir=named or store.keep("tft/run-dir", fresh))
    words = msgspec.json.encode(meeting).decode()
    for rank in range(1, launcher.world):
        store.put(f"{prefix}/{rank}", words)
    return meeting


def _replace(words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    # -P: modules in the working directory must not hide modules of tft
    python = [sys.executable, "-P", "-m", "tft", "run"]
    os.execve(sys.executable, [*python, *words], environment)
