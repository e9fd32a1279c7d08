"""
The plan of `tft run`: which processes this command will start, and with which settings. The plan is
checked before anything is started or written, and a wrong plan is refused.
"""

import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, get_args

from tft.addresses import is_loopback
from tft.agent.settings import Placed, StartedElsewhere
from tft.bus.ports import check_free, free_address
from tft.bus.zeromq import host_and_port
from tft.checkpoint import checkpoint_store_of, newest
from tft.config import RUN_OPTIONS, JobSettings
from tft.core.job.policy import STRATEGIES, OnCorruption
from tft.errors import UsageError
from tft.keys import read_keys
from tft.launcher.options import LOOPBACK, job_arguments, job_settings
from tft.launcher.run_directory import (
    check_run_dir,
    holds_story,
    in_use,
    living_run,
    new_run_dir,
    shared_name,
)
from tft.plugins import find_adaptor

LEADER = -1
"""The node number of a launcher that has no node of its own (`tft lead`). This launcher runs only
the broker and the controller. The nodes of the job belong to other launchers."""


EXPORT = "export"
"""The name of a directory inside a job's run directory. It is the run directory of the job that is
started afterwards only to export a checkpoint (`--export-only`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """
    What one launcher (`tft run` or `tft lead`) starts. All options that the user left open have
    values here.
    """

    settings: JobSettings
    node: int
    host: str
    """The address at which other nodes can reach this node."""
    insecure: bool
    report: Path | None
    """The path to which the report of the job is copied when the job is over. None: no copy."""
    script: str
    arguments: tuple[str, ...]
    module: bool = False
    """True if `script` is the name of a module, to be run as `python -m` runs it."""
    placed: Placed | None = None
    """
    The local rank, local world size and node rank that another launcher, such as torchrun, has
    given to the only rank of this node. None: no other launcher has placed the rank.
    """
    starter: StartedElsewhere | None = None
    """The program that starts the processes of the ranks. None: the agent starts them."""
    may_begin: bool = False
    """True if the job begins at step 0 when it is to resume but there is no checkpoint. False: the
    launcher then refuses to start."""
    led_elsewhere: bool = False
    """True if the broker and the controller are run by a launcher that has no node (`tft lead`)."""
    spare: int = 0
    """The number of additional ranks for which the node has room."""
    progress: int | None = None
    """The interval in seconds between two printed lines about the progress of the job. 0: no line.
    None: a terminal shows one line, which is drawn again and again; elsewhere lines are printed at
    intervals that grow."""
    goes_on: bool = False
    """True if the nodes of the job are training already without a controller. This launcher
    (`tft lead`) was started again, so that its controller leads these nodes."""
    token: str = field(default_factory=lambda: secrets.token_hex(4), compare=False)
    """A random word that no other launcher of this node has. Each launcher numbers its reports from
    1, so each needs another name on the bus."""

    @property
    def leads(self) -> bool:
        """
        Return True if this launcher runs the broker and the controller.
        """
        return self.node == LEADER or (self.node == 0 and not self.led_elsewhere)

    @property
    def trains(self) -> bool:
        """
        Return True if this launcher has a node of its own.
        """
        return self.node != LEADER

    @property
    def launched(self) -> bool:
        """
        Return True if the job was started under another launcher.

        That is so in three cases: another launcher has placed the rank of this node, another
        program starts the ranks, or this launcher has no node (`tft lead`).
        """
        return self.placed is not None or self.starter is not None or not self.trains

    @property
    def agent(self) -> str:
        """
        Return the name of this node's agent, as used for its log and its pid file.
        """
        return f"agent-{self.node}"

    @property
    def sender(self) -> str:
        """
        Return the name of this launcher on the bus.
        """
        return f"run.{self.node}/{self.token}"

    @property
    def command(self) -> list[str]:
        """
        Return the words at the end of a `tft` command line that name the script or module and its
        arguments.
        """
        started = ["-m", self.script] if self.module else [self.script]
        return [*started, *self.arguments]

    @property
    def again(self) -> str:
        """
        Return words that tell the operator how to continue from a checkpoint of this run. The words
        are part of a sentence.
        """
        run_dir = self.settings.run_dir
        if not self.launched:
            return f"the same command, with --run-dir {run_dir} --resume, continues"
        return f"the same start, with --run-dir {run_dir} in {RUN_OPTIONS}, continues"

    def commands(self) -> dict[str, list[str]]:
        """
        Return the processes that this launcher starts: by the name of the process, the arguments
        for the command `tft` that runs the process.
        """
        job = job_arguments(self.settings)
        parts = self._agent(job) if self.trains else {}
        if not self.leads:
            return parts
        host, port = host_and_port(self.settings.broker)
        broker = ["broker", "--host", host, "--port", str(port)]
        if self.settings.curve is not None:
            broker += ["--curve", str(self.settings.curve)]
        if self.insecure:
            broker.append("--insecure")
        return {"broker": broker, "controller": ["controller", *job], **parts}

    def _agent(self, job: list[str]) -> dict[str, list[str]]:
        agent = ["agent", *job, "--node", str(self.node), "--host", self.host]
        if self.spare:
            agent += ["--spare", str(self.spare)]
        if self.placed is not None:
            agent += self.placed.words()
        if self.starter is not None:
            agent += self.starter.words()
        return {self.agent: [*agent, *self.command]}

    def inherited(self, part: str) -> tuple[int, ...]:
        """
        Return the file descriptors that one of the launcher's processes inherits. `part` is the
        name of that process. Only the agent inherits a descriptor: the socket to the program that
        starts the ranks.
        """
        return (self.starter.descriptor,) if self.starter and part == self.agent else ()


def make_plan(options: Mapping[str, Any]) -> Plan:  # Any: the options have different types
    """
    Return the plan for the options of `tft run`. Options that the user left open get values here,
    except the name of a job under another launcher (see `named`).

    Raises `UsageError` if the job has several nodes, and an option that must be the same on all
    nodes is missing. Raises `UsageError` if the job is to resume, and neither a run directory nor a
    checkpoint directory is given.
    """
    placed = Placed.read(options["placed"]) if options["placed"] else None
    starter = StartedElsewhere.read(options["starter"]) if options["starter"] else None
    node, spare = options["node_rank"], options["spare"]
    launched = placed is not None or starter is not None or node == LEADER
    led_elsewhere = options["led_elsewhere"]
    _check_shared(options, alone=options["nnodes"] == 1 and placed is None, launched=launched)
    curve: Path | None = options["curve"]
    export: Path | None = options["export"]
    _check_resume(options)
    _check_export(options, launched=launched)
    run_dir, checkpoint_dir = _directories(options)
    living = living_run(run_dir) if node == LEADER else None
    found = {
        # The name of the job is random, because no other job on the same bus may have this name.
        # The name is no secret: it is in every message and in the command lines of the processes.
        "job": options["job"] or ("" if launched else secrets.token_hex(8)),
        "run": options.get("run") or living or secrets.token_hex(4),
        "broker": options["broker"] or free_address(LOOPBACK),
        "run_dir": run_dir,
        "checkpoint_dir": checkpoint_dir,
        "curve": curve and curve.absolute(),
        "export": export and export.absolute(),
    }
    settings = job_settings({**options, **found})
    if options["spare_if_taken"] and in_use(run_dir, node):
        node, spare = _another(settings, node), settings.nproc_per_node
    # Only the launcher that runs the controller decides whether the job resumes. The launcher of
    # another node may look later. It would then find the story that this run has just begun, and
    # take it for the story of an earlier run.
    if options["resume_if_any"] and (node == LEADER or (node == 0 and not led_elsewhere)):
        there = holds_story(run_dir) or newest(checkpoint_store_of(settings)) is not None
        settings = replace(settings, resume=settings.resume or there)
    return Plan(
        settings=settings,
        node=node,
        host=options["host"],
        insecure=options["insecure"],
        report=options["report"],
        script=options["script"],
        arguments=options["arguments"],
        module=options["module"],
        placed=placed,
        starter=starter,
        may_begin=options["resume_if_any"] and not options["resume"],
        led_elsewhere=led_elsewhere,
        spare=spare,
        progress=options.get("progress"),
        goes_on=settings.run == living,
    )


# Any: the options have different types
def _directories(options: Mapping[str, Any]) -> tuple[Path, Path | None]:
    """
    Return the run directory and the directory for checkpoints (None: the one in the run directory).

    A job that only exports a checkpoint gets its own run directory, inside the run directory of the
    job that wrote the checkpoint. So it does not replace the report of that job.
    """
    run_dir: Path = (options["run_dir"] or new_run_dir()).absolute()
    checkpoint_dir: Path | None = options["checkpoint_dir"] and options["checkpoint_dir"].absolute()
    if options["export_only"]:
        return run_dir / EXPORT, checkpoint_dir or run_dir / "checkpoints"
    return run_dir, checkpoint_dir


def _another(settings: JobSettings, node: int) -> int:
    """
    Return a free node number for a spare launcher that is started although the launcher of `node`
    runs already. The number is higher than those of all nodes with ranks of their own, and no
    running launcher uses it.
    """
    numbers = count(settings.nnodes + node, settings.nnodes)
    return next(number for number in numbers if not in_use(settings.run_dir, number))


def _check_resume(options: Mapping[str, Any]) -> None:
    if options["resume"] and options["run_dir"] is None and options["checkpoint_dir"] is None:
        raise UsageError(
            "--resume needs the --run-dir of the run to continue, or the --checkpoint-dir that "
            "has its checkpoints"
        )


# Any: the options have different types
def _check_export(options: Mapping[str, Any], *, launched: bool) -> None:
    """
    Check the options about a checkpoint in the form of the framework. Raises `UsageError` if they
    do not fit together. `launched` is True if the job runs under another launcher.
    """
    export, only = options["export"], options["export_only"]
    if only and (export is None or not options["resume"]):
        raise UsageError(
            "--export-only writes the newest checkpoint in the form of the framework: add --resume, "
            "and --export with the directory for it"
        )
    if export is not None and not only and (launched or options["nnodes"] > 1):
        raise UsageError(
            "--export starts the ranks once more when the job has ended, which `tft run` does only "
            "for a job of one node that it has started itself: leave it out, and run the job with "
            "--resume --export DIR --export-only afterwards"
        )


def named(plan: Plan) -> Plan:
    """
    Return the plan with the name of its job filled in. If the operator has given no name, all
    launchers of the job read the same name from the run directory.
    """
    if plan.settings.job:
        return plan
    name = shared_name(plan.settings.run_dir)
    return replace(plan, settings=replace(plan.settings, job=name))


def _check_shared(options: Mapping[str, Any], *, alone: bool, launched: bool) -> None:
    """
    Check that the options that must have the same value on all nodes were given.

    Raises `UsageError` if such an option is missing. `alone` is True for a job of one node, which
    needs none of these options. `launched` is True if the job runs under another launcher. Such a
    job does not need `--job`, because its nodes read the name of the job from the run directory.
    """
    needed = ("broker", "run_dir") if launched else ("job", "broker", "run_dir")
    missing = [name for name in needed if options[name] is None]
    if not missing or alone:
        return
    wanted = ", ".join("--" + name.replace("_", "-") for name in missing)
    where = f"; set this in the environment variable {RUN_OPTIONS}" if launched else ""
    raise UsageError(
        f"a job of {options['nnodes']} nodes needs {wanted}, the same on every node{where}"
    )


def check_settings(settings: JobSettings) -> None:
    """
    Check that every setting has an allowed value. Raises `UsageError` otherwise.
    """
    for option, value, least in (
        ("--nnodes", settings.nnodes, 1),
        ("--nproc-per-node", settings.nproc_per_node, 1),
        ("--max-incidents", settings.max_incidents, 0),
        ("--max-rank-faults", settings.max_rank_faults, 0),
        ("--warm-ranks", settings.warm_ranks, 0),
        ("--backup-every", settings.backup_every, 0),
        ("--checkpoint-every", settings.checkpoint_every, 0),
        ("--keep-checkpoints", settings.keep_checkpoints, 0),
        ("--last-step", settings.last_step, 0),
    ):
        if value < least:
            raise UsageError(f"{option} must be at least {least}, not {value}")
    if settings.on_corruption not in get_args(OnCorruption):
        raise UsageError(
            f"--on-corruption must be one of {', '.join(get_args(OnCorruption))}, not "
            f"{settings.on_corruption}"
        )
    if settings.save_copies not in ("one", "all"):
        raise UsageError(
            f"--save-copies must have the value one or all, not {settings.save_copies}"
        )
    if settings.audit not in ("first", "strict", "off"):
        raise UsageError(f"--audit must have the value first, strict or off, not {settings.audit}")
    checkpoint_store_of(settings).check()
    unknown = [name for name in settings.enable if name not in STRATEGIES]
    if unknown:
        raise UsageError(
            f"--enable does not know {', '.join(unknown)}; the strategies are "
            f"{', '.join(STRATEGIES)}"
        )


def check_plan(plan: Plan) -> None:
    """
    Check that the job can be run as planned. Otherwise raises `UsageError`, or `CheckpointCorrupt`
    if the checkpoint to resume from is damaged.
    """
    settings = plan.settings
    check_settings(settings)
    if plan.progress is not None and plan.progress < 0:
        raise UsageError(f"--progress must be at least 0, not {plan.progress}")
    if plan.spare < 0:
        raise UsageError(f"--spare must be at least 0, not {plan.spare}")
    if plan.trains and not (0 <= plan.node < settings.nnodes or (plan.node > 0 and plan.spare)):
        raise UsageError(
            f"--node-rank must be 0 to {settings.nnodes - 1} in a job of --nnodes "
            f"{settings.nnodes}, not {plan.node}; a node with a higher number has room for ranks "
            "of other nodes only, and needs --spare"
        )
    if plan.placed is not None and settings.nproc_per_node != 1:
        raise UsageError(
            "--placed is only for a node with one rank, not for --nproc-per-node "
            f"{settings.nproc_per_node}"
        )
    if plan.starter is not None:
        # the start program starts the ranks with a script that this process does not know. So
        # check the start program, and no script
        _check_starter(plan.starter, settings)
    elif plan.trains and not plan.module and not Path(plan.script).is_file():
        raise UsageError(f"the script {plan.script} does not exist")
    find_adaptor(settings.adaptor)
    if settings.curve is not None:
        read_keys(settings.curve, broker=plan.leads)
        from tft.transfer.tls import read_tls  # import it only if there are keys

        read_tls(settings.curve)
    allowed = plan.insecure or settings.curve is not None
    check_open(plan.host, "--host", allowed=allowed)
    broker, port = host_and_port(settings.broker)
    check_open(broker, "--broker", allowed=allowed)
    if plan.report is not None and not plan.report.absolute().parent.is_dir():
        raise UsageError(
            f"the file of --report {plan.report} cannot be written: the directory "
            f"{plan.report.parent} does not exist"
        )
    check_run_dir(
        settings, plan.node, leads=plan.leads, may_begin=plan.may_begin, goes_on=plan.goes_on
    )
    if plan.leads:
        check_free(broker, port)


def _check_starter(starter: StartedElsewhere, settings: JobSettings) -> None:
    if settings.warm_ranks:
        raise UsageError(
            "--warm-ranks is only for jobs whose agents start the ranks: another program, which "
            "starts the ranks of this node (--starter), cannot give a warm process its rank"
        )
    try:
        there = stat.S_ISSOCK(os.fstat(starter.descriptor).st_mode)
    except OSError:
        there = False
    if not there:
        raise UsageError(
            f"--starter {starter.descriptor} is not a socket of this process: it is for a program "
            "that starts the ranks itself (tft.spi.launcher), not for a command line"
        )


def check_open(host: str, option: str, *, allowed: bool) -> None:
    """
    Check that other machines can connect to the address `host` only if the operator has allowed
    this (`allowed`).

    Raises `UsageError` otherwise. `option` is the command-line option that `host` comes from.
    """
    if not allowed and not is_loopback(host):
        raise UsageError(
            f"{option} {host} can be reached from other machines, and the job's messages are not "
            "encrypted: whoever reaches this address can run the job's processes. Encrypt the "
            "messages with --curve DIR (`tft keys DIR` makes the keys), or add --insecure if the "
            "network is trusted"
        )
