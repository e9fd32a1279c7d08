"""
What `tft run` is about to do, and every reason not to: all of it is checked before anything is
started or written.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tft.bus.broker import is_loopback
from tft.bus.ports import check_free, free_address
from tft.bus.zeromq import host_and_port
from tft.cli.rundir import check_run_dir
from tft.cli.settings import LOOPBACK, job_arguments, job_settings
from tft.config import JobSettings
from tft.core.policy import STRATEGIES
from tft.errors import UsageError
from tft.plugins import find_adaptor


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """
    One node's share of a job, ready to be started.
    """

    settings: JobSettings
    node: int
    host: str
    """The address other nodes reach this one at."""
    insecure: bool
    report: Path | None
    """Where a copy of the report goes when the job is over."""
    script: str
    arguments: tuple[str, ...]

    @property
    def leads(self) -> bool:
        """
        Whether broker and controller run beside this launcher.
        """
        return self.node == 0

    @property
    def agent(self) -> str:
        """
        The name of this node's agent among the parts.
        """
        return f"agent-{self.node}"

    @property
    def sender(self) -> str:
        """
        What this launcher is called on the bus.
        """
        return f"run.{self.node}/0"

    def commands(self) -> dict[str, list[str]]:
        """
        The parts that this launcher starts, each with the arguments of `tft`.
        """
        job = job_arguments(self.settings)
        agent = ["agent", *job, "--node", str(self.node), "--host", self.host]
        parts = {self.agent: [*agent, self.script, *self.arguments]}
        if not self.leads:
            return parts
        host, port = host_and_port(self.settings.broker)
        broker = ["broker", "--host", host, "--port", str(port)]
        if self.insecure:
            broker.append("--insecure")
        return {"broker": broker, "controller": ["controller", *job], **parts}


def make_plan(options: Mapping[str, Any]) -> Plan:  # Any: each option's own type
    """
    The plan that the options of `tft run` stand for, with all that was left to us decided.

    Raises `UsageError` for a job of several nodes that was not told what its nodes must share,
    and for one that is to resume what it was not told.
    """
    missing = [name for name in ("job", "broker", "run_dir") if options[name] is None]
    if missing and options["nnodes"] > 1:
        wanted = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise UsageError(
            f"a job of {options['nnodes']} nodes needs {wanted}, the same on every node"
        )
    if options["resume"] and options["run_dir"] is None:
        raise UsageError("--resume needs the --run-dir of the run to be continued")
    found = {
        # Also the key of the job's ports, so it is not to be guessed.
        "job": options["job"] or secrets.token_hex(8),
        "run": options.get("run") or secrets.token_hex(4),
        "broker": options["broker"] or free_address(LOOPBACK),
        "run_dir": (options["run_dir"] or _new_run_dir()).absolute(),
    }
    return Plan(
        settings=job_settings({**options, **found}),
        node=options["node_rank"],
        host=options["host"],
        insecure=options["insecure"],
        report=options["report"],
        script=options["script"],
        arguments=options["arguments"],
    )


def _new_run_dir() -> Path:
    """
    A directory that no other run has, named so that a listing is in the order of the runs.
    """
    return Path("tft-runs", f"{datetime.now().astimezone():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}")


def check_settings(settings: JobSettings) -> None:
    """
    Raises `UsageError` for a setting out of its bounds.
    """
    for option, value, least in (
        ("--nnodes", settings.nnodes, 1),
        ("--nproc-per-node", settings.nproc_per_node, 1),
        ("--max-incidents", settings.max_incidents, 0),
        ("--max-rank-faults", settings.max_rank_faults, 0),
        ("--checkpoint-every", settings.checkpoint_every, 0),
    ):
        if value < least:
            raise UsageError(f"{option} is at least {least}, not {value}")
    unknown = [name for name in settings.enable if name not in STRATEGIES]
    if unknown:
        raise UsageError(f"--enable knows {', '.join(STRATEGIES)}, and not {', '.join(unknown)}")


def check_plan(plan: Plan) -> None:
    """
    Raises `UsageError` or `CheckpointCorrupt` where the job cannot be run as asked.
    """
    settings = plan.settings
    check_settings(settings)
    if not 0 <= plan.node < settings.nnodes:
        raise UsageError(
            f"--node-rank is 0 to {settings.nnodes - 1} in a job of --nnodes {settings.nnodes}, "
            f"not {plan.node}"
        )
    if not Path(plan.script).is_file():
        raise UsageError(f"there is no script at {plan.script}")
    find_adaptor(settings.adaptor)
    check_open(plan.host, "--host", insecure=plan.insecure)
    broker, port = host_and_port(settings.broker)
    check_open(broker, "--broker", insecure=plan.insecure)
    if plan.report is not None and not plan.report.absolute().parent.is_dir():
        raise UsageError(f"--report {plan.report}: there is no directory {plan.report.parent}")
    check_run_dir(settings, plan.node)
    if plan.leads:
        check_free(broker, port)


def check_open(host: str, option: str, *, insecure: bool) -> None:
    """
    Raises `UsageError` where others could reach this job's ports and nobody allowed it.
    """
    if not insecure and not is_loopback(host):
        raise UsageError(
            f"{option} {host} can be reached from other machines, and the bus is not encrypted: "
            "whoever reaches it can run the job's processes. Add --insecure if the network is "
            "trusted"
        )
