"""
What torch's flight recorder says about collectives of NCCL.
"""

from typing import Any

import pytest
from tft_pytorch import device, group_standings
from tft_pytorch.device import Devices
from tft_pytorch.flight_recorder import OpenCollective, first_open, open_collectives

ENTRY: dict[str, Any] = {
    "collective_seq_id": 22, "input_dtypes": ["Float"], "input_sizes": [[5]], "is_p2p": False,
    "op_id": 22, "output_dtypes": ["Float"], "output_sizes": [[5]], "p2p_seq_id": 0, "pg_id": 0,
    "process_group": ["0", "default_pg"], "profiling_name": "nccl:all_reduce", "record_id": 21,
    "retired": False, "state": "scheduled", "timeout_ms": 1800000,
}  # fmt: skip
"""An entry as torch 2.11 has written it for a collective that another rank had not begun."""


def entry(number: int, **changed: Any) -> dict[str, Any]:
    """
    Return an entry of the flight recorder for the collective with this number in its group.
    """
    return {**ENTRY, "collective_seq_id": number, **changed}


def test_first_open_collective_of_each_group_is_found() -> None:
    """When several collectives of several groups are not complete, then the first of each group is
    found. Complete ones and messages between two ranks do not count."""
    coalesced = {"profiling_name": "nccl:reduce_scatter", "input_sizes": [[2, 3], [4]]}
    record = {
        "entries": [
            entry(21, state="completed"), entry(23), entry(22),
            entry(20, is_p2p=True), entry(7, process_group=["1", "x"], pg_id=1, **coalesced),
        ]
    }  # fmt: skip
    assert first_open(record) == {
        "0": OpenCollective(22, "all_reduce of 5 elements"),
        "1": OpenCollective(7, "reduce_scatter of 10 elements"),
    }


@pytest.mark.parametrize("order", [1, -1])
def test_groups_of_before_an_incident_do_not_count(order: int) -> None:
    """When a group was formed again under the same name, then open collectives of the group of
    before are left out, wherever they stand in the record."""
    entries = [entry(40, pg_id=0), entry(3, pg_id=2), entry(41, pg_id=0)][::order]
    assert first_open({"entries": entries})["0"].number == 3


def test_nothing_is_open_without_a_record() -> None:
    """When torch records nothing, or has no NCCL, then no collective is known to be open."""
    assert first_open({}) == {}
    assert open_collectives() == {}


def test_a_device_that_does_not_answer_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the device does not answer, then the flight recorder is not read, because it asks the
    device while no other thread can run."""
    devices = Devices("cuda")
    asked: list[int] = []

    def read() -> dict[str, OpenCollective]:
        asked.append(1)
        return {}

    monkeypatch.setattr(Devices, "answer", lambda self: None)
    monkeypatch.setattr(device, "sequence", lambda devices: {"group": 1})
    monkeypatch.setattr(group_standings, "open_collectives", read)
    assert group_standings.standings(devices) == []
    monkeypatch.setattr(Devices, "answer", lambda self: False)
    group_standings.standings(devices)
    assert asked == [1]
