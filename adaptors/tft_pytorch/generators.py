"""
Reads and restores the random generators of this process: torch, Python, numpy, the device, and those
of a loader.
"""

import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from tft.spi import pack, unpack
from tft_pytorch.owned_generators import Owned

_State = Mapping[str, Any]


def generators(device: torch.device | None = None, owned: Owned | None = None) -> _State:
    """
    Return the state of all generators. The generator of `device` is among them if it is not a CPU,
    and so are those in `owned`.
    """
    name, words, *rest = numpy.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, numpy.asarray(words).copy(), *rest),
    }
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
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    if "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)
    if owned is not None:
        owned.restore(state["owned"])


def packed(state: _State) -> bytes:
    """
    Return the state of the generators on the CPU and of those in `owned` as bytes.
    """
    version, words, gauss = state["python"]
    name, numbers, *rest = state["numpy"]
    return pack(
        {
            "torch": state["torch"].numpy().tobytes(),
            "python": [version, list(words), gauss],
            "numpy": [name, numbers.tobytes(), *rest],
            "owned": state["owned"],
        }
    )


def unpacked(content: bytes) -> _State:
    """
    Return the state of the generators that `packed` has turned into bytes.
    """
    told: Any = unpack(content)  # Any: what `packed` has packed
    version, words, gauss = told["python"]
    name, numbers, *rest = told["numpy"]
    return {
        "torch": torch.frombuffer(bytearray(told["torch"]), dtype=torch.uint8),
        "python": (version, tuple(words), gauss),
        "numpy": (name, numpy.frombuffer(numbers, numpy.uint32), *rest),
        "owned": told["owned"],
    }
