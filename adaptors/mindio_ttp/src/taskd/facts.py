"""
Reads the settings of msrun, the launcher of MindSpore, from its command line and its environment
variables. Converts these settings to the settings of tft.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from tft.errors import UsageError
from tft.spi.launcher import BrokerAddress, Node

_OF_MINDIO = ("TTP:1", "UCE:1", "HCCE:1", "ARF:1", "TSP:1")
"""The features in the environment variable `MS_ENABLE_TFT` for which MindSpore uses the package
`mindio_ttp`. MindSpore searches the value of the variable for the same texts."""

_REPLACES = "ARF:1"
"""The feature in the environment variable `MS_ENABLE_TFT` that lets lost processes be replaced.
With this feature and without MindCluster, MindSpore itself calls `tft_register_mindx_callback`, to
take part in the decisions about recoveries."""


class MsrunArguments(Protocol):
    """
    The parsed command line of msrun, the launcher of MindSpore, with the options that tft reads.
    """

    worker_num: int
    local_worker_num: int
    node_rank: int
    master_addr: str
    master_port: int
    sim_level: int
    task_script: str
    task_script_args: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """
    The settings of msrun, the launcher of MindSpore, on one node of a job.
    """

    nnodes: int
    number: int
    """The number of this node in the job, counted from 0."""
    ranks: int
    """The number of ranks on this node."""
    address: str
    """The network address of node 0."""
    port: int
    """The port of the broker if the job has several nodes. The broker also uses the port after this
    one."""
    named: str
    """The name of the option or environment variable from which `address` was read. Messages use
    this name."""
    adaptor: str
    orchestrated: bool
    """True if MindSpore acts as an orchestrator, which takes part in the decisions of the
    controller. MindSpore then connects to the controller from the process of rank 0."""
    command: tuple[str, ...]
    """The training script and its arguments."""

    def node(self) -> Node:
        """
        Return the `Node` object that runs this node with these settings. Raises `UsageError` if the
        settings are not valid together.
        """
        return Node(
            nnodes=self.nnodes,
            node=self.number,
            ranks=self.ranks,
            broker=BrokerAddress(host=self.address, port=self.port, named=self.named),
            command=self.command,
            defaults=[
                "--adaptor",
                self.adaptor,
                *(["--orchestrated"] if self.orchestrated else []),
            ],
        )


def facts_of(told: MsrunArguments, environ: Mapping[str, str]) -> Facts | None:
    """
    Return the settings of this process of msrun, the launcher of MindSpore. Return None for a dry
    run, which starts no job.

    `told` is the command line of msrun, and `environ` are its environment variables. Raises
    `UsageError` for settings that msrun allows, but tft does not allow.
    """
    if told.sim_level != -1 or environ.get("MS_SIMULATION_LEVEL"):
        return None
    nnodes, rest = divmod(told.worker_num, max(1, told.local_worker_num))
    if rest or nnodes < 1 or told.local_worker_num < 1:
        raise UsageError(
            f"--local_worker_num is {told.local_worker_num} of --worker_num {told.worker_num}: "
            "each machine must have the same number of ranks, at least one"
        )
    # msrun ignores the option --node_rank if the job has a single machine
    number = told.node_rank if nnodes > 1 else 0
    if not 0 <= number < nnodes:
        raise UsageError(
            f"--node_rank must be 0 to {nnodes - 1} on the {nnodes} machines of this job, but is "
            f"{number}: otherwise MindSpore numbers the ranks after they have begun"
        )
    address, port, named = told.master_addr, told.master_port + 1, "--master_addr"
    if environ.get("MS_TFT_IP") and environ.get("MS_TFT_PORT"):
        address, port, named = environ["MS_TFT_IP"], _port(environ["MS_TFT_PORT"]), "MS_TFT_IP"
    asked = environ.get("MS_ENABLE_TFT", "")
    return Facts(
        nnodes=nnodes,
        number=number,
        ranks=told.local_worker_num,
        address=address,
        port=port,
        named=named,
        adaptor="mindio" if any(item in asked for item in _OF_MINDIO) else "mindspore",
        # On the same condition, MindSpore registers functions with the controller from the process
        # of rank 0. So tft must expect an orchestrator (the cluster's software that decides on
        # faults) in exactly this case.
        orchestrated=number == 0 and _REPLACES in asked and "MINDX_TASK_ID" not in environ,
        command=(told.task_script, *told.task_script_args),
    )


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1024 <= int(text) < 65_535:
        raise UsageError(
            "MS_TFT_PORT must be a port from 1024 to 65534 (tft also uses the next port), but is "
            f"{text!r}"
        )
    return int(text)
