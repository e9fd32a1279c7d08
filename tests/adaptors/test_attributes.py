"""
The plain attributes of callbacks and modules are noted and put back.
"""

from collections import defaultdict
from typing import Any

import pytest
import torch
from tft_pytorch.attributes import Attributes
from tft_pytorch.plain_values import _ON_DEVICE, placed, plain

from tft.errors import UsageError
from tft.spi import pack, unpack


class Counter:
    """
    An object with attributes of several kinds.
    """

    steps = 0

    def __init__(self) -> None:
        self.count = 0
        self.kept: list[torch.Tensor] = []
        self.best: dict[str, Any] = {"a": torch.zeros(2)}
        self.pairs = [(1, 2.0)]
        self.words = ["word"] * 20_000
        self.other = object()


def test_attributes_are_put_back_in_place() -> None:
    """When numbers, lists and dicts of an object change, then they are put back, and lists and dicts
    stay the same objects. Other objects are left alone."""
    counter = Counter()
    watched = Attributes(counter)
    noted = watched.noted()
    kept, best, other = counter.kept, counter.best, counter.other
    counter.count = 3
    counter.kept.append(torch.ones(()))
    counter.best["b"] = torch.ones(1)
    watched.put_back(noted)
    assert (counter.count, counter.kept, list(counter.best)) == (0, [], ["a"])
    assert counter.kept is kept
    assert counter.best is best
    assert counter.other is other


def test_dicts_within_dicts_keep_their_type() -> None:
    """When a dict has further dicts that make missing values, and lists of tuples, then these are the
    same objects, of the same types, after they were put back from packed bytes."""
    counter = Counter()
    inner: defaultdict[str, list[float]] = defaultdict(list, {"loss": [1.0]})
    counter.best["train"] = inner
    watched = Attributes(counter)
    noted = unpack(pack({n: v for n, v in watched.noted().items() if n != "best"}))
    noted["best"] = watched.noted()["best"]
    inner["loss"].append(2.0)
    inner["other"].append(3.0)
    counter.pairs.clear()
    watched.put_back(placed(noted, torch.device("cpu")))
    assert counter.best["train"] is inner
    assert inner == {"loss": [1.0]}
    assert inner["missing"] == []
    assert counter.pairs == [(1, 2.0)]


def test_an_attribute_that_was_not_set_gets_its_default_back() -> None:
    """When the first step sets an attribute that only the class had, then it is not set after it was
    put back."""
    counter = Counter()
    watched = Attributes(counter)
    noted = watched.noted()
    counter.steps += 1
    watched.put_back(noted)
    assert counter.steps == 0
    assert "steps" not in vars(counter)


def test_an_attribute_that_grows_is_refused_by_name() -> None:
    """When a list grows without limit while training, then this is refused with its name. One that
    is large from the start is left out."""
    counter = Counter()
    watched = Attributes(counter)
    assert "words" not in watched.noted()
    counter.kept = [torch.zeros(100)] * 100
    with pytest.raises(UsageError, match="kept of Counter"):
        watched.noted()


def test_tensors_of_a_device_return_to_it() -> None:
    """When tensors in lists and dicts are on a device, then they are kept in host memory, and are put
    on the device of the rank again. Tensors on the CPU stay there."""
    noted = {"kept": [{_ON_DEVICE: torch.zeros(2)}, torch.ones(2)], "pair": (1, "a")}
    found = placed(noted, torch.device("meta"))
    assert [each.device.type for each in found["kept"]] == ["meta", "cpu"]
    assert found["pair"] == (1, "a")
    assert placed(plain({"host": torch.ones(2)}), torch.device("meta"))["host"].tolist() == [1, 1]
