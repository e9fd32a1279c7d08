"""
Reads torch's flight recorder: in which collective of NCCL the devices wait for other ranks.

The host only starts a collective of NCCL, so neither the host's stack nor the number of collectives
that the host has begun says how far the devices are. The flight recorder of torch notes each
collective, and knows from the events of the device which collectives are complete. torch records
only if the environment variable `TORCH_FR_BUFFER_SIZE` is above 0
(`TORCH_NCCL_TRACE_BUFFER_SIZE` before torch 2.9).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tft_pytorch import device


@dataclass(frozen=True, slots=True)
class OpenCollective:
    """
    A collective that the devices of this rank have not completed.
    """

    number: int
    """The number of the collective in its group, counted from 1."""
    name: str
    """The operation and the size of its input, such as `all_reduce of 1024 elements`."""


def open_collectives() -> Mapping[str, OpenCollective]:
    """
    Return, by the name of the group, the first collective of each group that the devices have not
    completed. Return an empty mapping if torch does not record.

    The call holds Python's global lock while torch asks the devices. So call this function only if
    the devices answer at present.
    """
    return first_open(device.flight_record())


def first_open(record: Mapping[str, Any]) -> Mapping[str, OpenCollective]:  # Any: JSON
    """
    Return the first collective of each group that is not complete in `record`, by the name of the
    group. Messages between two ranks are left out.

    A group that is formed again has the same name as before. If several groups in `record` have the
    same name, only the newest group counts.
    """
    newest: dict[str, int] = {}
    found: dict[str, OpenCollective] = {}
    for entry in record.get("entries", ()):
        if entry["is_p2p"] or entry["state"] == "completed":
            continue
        name, number = entry["process_group"][0], entry["collective_seq_id"]
        if entry["pg_id"] < newest.get(name, entry["pg_id"]):
            continue
        if entry["pg_id"] > newest.get(name, -1) or number < found[name].number:
            newest[name] = entry["pg_id"]
            found[name] = OpenCollective(number, _named(entry))
    return found


def _named(entry: Mapping[str, Any]) -> str:  # Any: JSON
    elements = sum(math.prod(shape) for shape in entry["input_sizes"])
    operation = entry["profiling_name"].rpartition(":")[2]  # without the name of the backend
    return f"{operation} of {elements} elements"
