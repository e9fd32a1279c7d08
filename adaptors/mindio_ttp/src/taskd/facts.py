"""
Reads the settings of msrun from its command line and environment, and converts them for tft.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from tft.errors import UsageError
from tft.spi.launcher import BrokerAddress, Node

_OF_MINDIO = ("TTP:1", "UCE:1", "HCCE:1", "ARF:1", "TSP:1")
"""The features of `MS_ENABLE_TFT` for which MindSpore uses `mindio_ttp`. MindSpore searches the
value of the variable for the same texts."""

_REPLACES = "ARF:1"
"""The feature of `MS_ENABLE_TFT` for the replacement of processes. If there is no MindCluster,
MindSpore then calls `tft_register_mindx_callback` itself, to take part in recoveries."""


class MsrunArguments(Protocol):
    """
    The parsed command line of msrun, with the options that tft reads.
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
    The settings of the msrun on one node of a job.
    """

    nnodes: int
    number: int
    """The number of this node."""
    ranks: int
    """The number of ranks on this node."""
    address: str
    """The address of node 0."""
    port: int
    """The port of the broker if the job has several nodes. The broker also uses the next port."""
    named: str
    """The name of the option or variable from which the address was read, for messages."""
    adaptor: str
    orchestrated: bool
    """True if MindSpore itself takes part in the decisions of the controller, as an orchestrator.
    It connects to the controller from the process of rank 0."""
    command: tuple[str, ...]
    """The training script and its arguments."""

    def node(self) -> Node:
        """
        Return the settings in the form in which tft runs a node. Raises `UsageError` if they are
        not valid together.
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
    Return the settings of this msrun. Return None for a dry run, which starts no job.

    `told` is the command line of msrun. Raises `UsageError` for settings that msrun allows and tft
    does not.
    """
    if told.sim_level != -1 or environ.get("MS_SIMULATION_LEVEL"):
        return None
    nnodes, rest = divmod(told.worker_num, max(1, told.local_worker_num))
    if rest or nnodes < 1 or told.local_worker_num < 1:
        raise UsageError(
            f"--local_worker_num is {told.local_worker_num} of --worker_num {told.worker_num}: "
            "each machine must have the same number of ranks, at least one"
        )
    # msrun ignores --node_rank on a single machine
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
        # MindSpore decides by the same condition whether rank 0 registers its functions with the
        # controller, so tft must expect them in exactly this case
        orchestrated=number == 0 and _REPLACES in asked and "MINDX_TASK_ID" not in environ,
        command=(told.task_script, *told.task_script_args),
    )


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 65_535:
        raise UsageError(
            "MS_TFT_PORT must be a port from 1 to 65534 (tft also uses the next port), but is "
            f"{text!r}"
        )
    return int(text)
