"""
Reads and restores the random generators of this process: those of torch, Python and numpy, that of
the device, and those that the objects of a data loader have.
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
    Return the states of the global generators of torch, Python and numpy, and of the generators in
    `owned`. If `device` is not the CPU, also return the state of its generator.
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
    Return `state` as bytes. `state` is a result of `generators` without `device`, because the
    generator of a device cannot be packed.
    """
    return pack({**state, "torch": state["torch"].numpy().tobytes()})


def unpacked(content: bytes) -> _State:
    """
    Return the `state` from which `packed` has made `content`.
    """
    told: Any = unpack(content)  # Any: what `packed` has packed
    return {**told, "torch": byte_tensor(told["torch"])}
