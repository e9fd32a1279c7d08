"""
What msrun was told, as tft needs to know it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from tft.errors import UsageError
from tft.starter import Node

_OF_MINDIO = ("TTP:1", "UCE:1", "HCCE:1", "ARF:1", "TSP:1")
"""What MindSpore has `mindio_ttp` do; it looks for them like this."""

_REPLACES = "ARF:1"
"""Switches on that MindSpore's handler calls `tft_register_mindx_callback` where no MindCluster does."""


class Told(Protocol):
    """
    msrun's command line, as msrun reads it.
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
    One msrun among those of its job.
    """

    nnodes: int
    number: int
    """Of this node."""
    ranks: int
    """Of this node."""
    address: str
    """Of node 0."""
    port: int
    """Where the broker of several nodes is; it takes the next one, too."""
    named: str
    """Where the address was read."""
    adaptor: str
    orchestrated: bool
    """MindSpore's handler has its say in recoveries: it registers with the controller, in rank 0."""
    command: tuple[str, ...]

    def node(self) -> Node:
        """
        The node. Raises `UsageError` where it cannot be one.
        """
        return Node(
            nnodes=self.nnodes,
            node=self.number,
            ranks=self.ranks,
            address=self.address,
            port=self.port,
            named=self.named,
            command=self.command,
            defaults=[
                "--adaptor",
                self.adaptor,
                *(["--orchestrated"] if self.orchestrated else []),
            ],
        )


def facts_of(told: Told, environ: Mapping[str, str]) -> Facts | None:
    """
    None for a dry run, which is no job. Raises `UsageError` for what msrun may do and tft does not.
    """
    if told.sim_level != -1 or environ.get("MS_SIMULATION_LEVEL"):
        return None
    nnodes, rest = divmod(told.worker_num, max(1, told.local_worker_num))
    if rest or nnodes < 1 or told.local_worker_num < 1:
        raise UsageError(
            f"--local_worker_num is {told.local_worker_num} of --worker_num {told.worker_num}: each "
            "machine has as many, at least one"
        )
    # as msrun has it, which does not look at --node_rank where there is one machine
    number = told.node_rank if nnodes > 1 else 0
    if not 0 <= number < nnodes:
        raise UsageError(
            f"--node_rank is to be 0 to {nnodes - 1} on the {nnodes} machines of this job, and is "
            f"{number}: else MindSpore numbers the ranks when they have begun"
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
        # MindSpore's handler decides by the same, in rank 0, which is on the node of the controller
        orchestrated=number == 0 and _REPLACES in asked and "MINDX_TASK_ID" not in environ,
        command=(told.task_script, *told.task_script_args),
    )


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 65_535:
        raise UsageError(f"MS_TFT_PORT is to be a port with another one above it, and is {text!r}")
    return int(text)
