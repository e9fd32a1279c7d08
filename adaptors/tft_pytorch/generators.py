"""
Reads and restores the random generators of this process: torch, Python, numpy, the device, and those
of a loader.
"""

from collections.abc import Mapping
from typing import Any

import torch

from tft.spi import pack, unpack
from tft.spi.generators import global_states, restore_global
from tft_pytorch.owned_generators import Owned
from tft_pytorch.tensor_metadata import byte_tensor

_State = Mapping[str, Any]


def generators(device: torch.device | None = None, owned: Owned | None = None) -> _State:
    """
    Return the state of all generators. The generator of `device` is among them if it is not a CPU,
    and so are those in `owned`.
    """
    state: dict[str, Any] = {"torch": torch.get_rng_state(), **global_states()}
    if device is not None and device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    if owned is not None:
        state["owned"] = owned.states()
    return state


def restore(state: _State, device: torch.device | None = None, owned: Owned | None = None) -> None:
    """
    Restore the generators to `state`, a result of `generators` with the same arguments.
    """
    torch.set_rng_state(state["torch"])
    restore_global(state)
    if "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)
    if owned is not None:
        owned.restore(state["owned"])


def packed(state: _State) -> bytes:
    """
    Return the state of the generators on the CPU and of those in `owned` as bytes.
    """
    return pack({**state, "torch": state["torch"].numpy().tobytes()})


def unpacked(content: bytes) -> _State:
    """
    Return the state of the generators that `packed` has turned into bytes.
    """
    told: Any = unpack(content)  # Any: what `packed` has packed
    return {**told, "torch": byte_tensor(told["torch"])}
