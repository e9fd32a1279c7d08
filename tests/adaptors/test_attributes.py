"""
The plain attributes of callbacks and modules are noted and put back.
"""

from collections import defaultdict
from typing import Any

import numpy
import pytest
import torch
from tft_pytorch.attributes import Attributes, Changes
from tft_pytorch.plain_values import on_device, placed, plain

from tft.errors import UsageError
from tft.spi import pack, unpack
from tft.spi.plain_values import Filled, without_marks

CPU = torch.device("cpu")


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
    noted = {"kept": [on_device(torch.zeros(2)), torch.ones(2)], "pair": (1, "a")}
    found = placed(noted, torch.device("meta"))
    assert [each.device.type for each in found["kept"]] == ["meta", "cpu"]
    assert found["pair"] == (1, "a")
    assert placed(plain({"host": torch.ones(2)}), torch.device("meta"))["host"].tolist() == [1, 1]


class Private:
    """
    An object whose attributes with an underscore are watched.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._mean = torch.zeros(2)
        self._count = 0
        self._large = [0] * 10_000
        self.public = 0
        self._other: object = object()
        self._things: list[object] = [object()]


def test_only_what_differs_from_the_start_is_noted() -> None:
    """When nothing has changed, then nothing is noted. When attributes change, appear and go, then
    another process makes the same of its own start."""
    one, other = Private(), Private()
    watched, elsewhere = (Changes(each, underscored=True) for each in (one, other))
    assert watched.noted() == {}
    one._seen.add(3)
    one._mean += 1
    one._new = "new"  # type: ignore[attr-defined]
    del one._count
    one.public = 5
    noted = watched.noted()
    assert {*noted["set"]} == {"_seen", "_mean", "_new"}
    kept, mean = other._seen, noted["set"].pop("_mean").clone()
    packed = unpack(pack(noted))
    packed["set"]["_mean"] = mean
    elsewhere.put_back(placed(packed, CPU), CPU)
    assert (other._seen, other._mean.tolist(), other._new) == ({3}, [1, 1], "new")  # type: ignore[attr-defined]
    assert other._seen is kept
    assert not hasattr(other, "_count")
    assert other.public == 0


def test_what_has_changed_since_goes_back_to_the_start() -> None:
    """When attributes have changed since nothing was noted, then they are as at the start, also those
    that were changed in place, deleted, or set for the first time."""
    one = Private()
    watched, other = Changes(one, underscored=True), one._other
    for _ in range(2):
        one._seen.add(3)
        one._mean += 1
        one._new = 1  # type: ignore[attr-defined]
        del one._count
        watched.put_back({}, CPU)
        assert (one._seen, one._mean.tolist(), one._count) == (set(), [0, 0], 0)
        assert not hasattr(one, "_new")
        assert one._other is other


def test_what_becomes_plain_is_kept_and_what_becomes_no_longer_plain_is_left() -> None:
    """When an attribute gets a plain value, then it is noted. When it loses it, then it is left as it
    is."""
    one = Private()
    watched = Changes(one, underscored=True)
    one._other = 5
    one._things[:] = [1]
    one._count = object()  # type: ignore[assignment]
    noted = watched.noted()
    assert noted == {"set": {"_other": 5, "_things": [1]}, "gone": [], "left": ["_count"]}
    other = one._count
    watched.put_back({}, CPU)
    assert one._count is other


def test_what_grows_too_large_stays_as_it_is() -> None:
    """When an attribute grows beyond the limit, or there is no room for it, then it is left as it is,
    and the others are put back. One that was large before is not looked at."""
    one = Private()
    watched = Changes(one, underscored=True)
    assert not watched.keeps("_large")
    early = watched.noted()
    one._large.append(1)
    one._seen.update(range(10_000))
    one._count = 1
    noted = watched.noted()
    assert noted == {"set": {"_count": 1}, "gone": [], "left": ["_seen"]}
    assert not watched.keeps("_seen")
    watched.put_back(early, CPU)
    assert (one._count, len(one._seen), len(one._large)) == (0, 10_000, 10_001)
    other = Private()
    small = Changes(other, underscored=True)
    other._mean += 1
    assert small.noted(room=4)["left"] == ["_mean"]


class Reader:
    """
    An object whose attributes refer to items of its list.
    """

    def __init__(self) -> None:
        self.items = [{"at": [0]}, {"at": [1]}, {"at": [2]}]
        self.row, self.inner = self.items[0], {"at": self.items[0]["at"], "own": [7]}
        self.array = numpy.zeros(1)

    def turn(self, to: int) -> None:
        """
        Let the attributes refer to another item, and change what the reader has of its own.
        """
        self.row, self.inner["at"] = self.items[to], self.items[to]["at"]
        self.inner["own"].append(to)
        self.array = numpy.full(1, to)


@pytest.mark.parametrize("fresh", [False, True], ids=["the same process", "another process"])
@pytest.mark.parametrize("changes", [False, True], ids=["attributes", "changes"])
def test_items_of_a_list_are_not_filled_with_others(changes: bool, fresh: bool) -> None:
    """When attributes refer to other items of a list now than when they were noted, then they get
    objects of their own with the content of then. No item changes. What an attribute has had from
    the start is filled."""
    reader = Reader()
    watched: Any = Changes(reader, ("items",)) if changes else Attributes(reader, ("items",))
    watched.noted()
    reader.turn(1)
    noted = unpack(pack(watched.noted()))
    reader.turn(2)
    if fresh:
        reader = Reader()
        watched = Changes(reader, ("items",)) if changes else Attributes(reader, ("items",))
    inner, own, items = reader.inner, reader.inner["own"], reader.items
    watched.put_back(placed(noted, CPU), *([CPU] if changes else []))
    assert items == [{"at": [0]}, {"at": [1]}, {"at": [2]}]
    assert reader.row == {"at": [1]}
    assert without_marks(watched.noted()) == without_marks(noted)
    assert reader.inner == {"at": [1], "own": [7, 1]}
    assert reader.inner is inner
    assert reader.inner["own"] is own
    assert reader.array.tolist() == [1]


class Settings(dict[str, Any]):
    """
    A dict whose items are attributes, too.
    """

    def __getattr__(self, name: str) -> Any:
        return self[name]


def test_new_objects_are_shared_as_the_old_ones_were() -> None:
    """When two objects share a list that was made after the start, then they share the new one that
    they get. A random generator stays the same object."""
    one, other = Counter(), Counter()
    changes, attributes = Changes(one), Attributes(other)
    changes.noted()
    attributes.noted()
    one.best = other.best = {"rows": [1]}
    one.other = rng = numpy.random.default_rng(1)
    noted = changes.noted(), attributes.noted()
    drawn = rng.random()
    one.best["rows"].append(2)
    filled: Filled = {}
    changes.put_back(placed(noted[0], CPU), CPU, filled)
    attributes.put_back(placed(noted[1], CPU), filled)
    assert one.best is other.best
    assert one.best == {"rows": [1]}
    assert one.other is rng
    assert rng.random() == drawn


def test_many_new_parts_of_a_dict_take_one_mark() -> None:
    """When a dict from the start has got many new lists, then its plain form is hardly longer than
    without marks, and all lists are new when it is put back."""
    counter = Counter()
    watched = Attributes(counter)
    watched.noted()
    best, lists = counter.best, {f"{n}": [n] for n in range(1000)}
    best.clear()
    best.update(lists)
    noted = watched.noted()
    assert len(pack(noted["best"])) < len(pack(without_marks(noted["best"]))) + 100
    best["0"].append(1)
    watched.put_back(placed(noted, CPU))
    assert counter.best is best
    assert best["0"] == [0]
    assert lists["0"] == [0, 1]


def test_marks_are_those_of_the_undisturbed_process_after_it_was_put_back() -> None:
    """When an array that is a view is put back as a new object, then the later notes of the process
    are those without the incident."""
    counter = Counter()
    counter.best = {"view": numpy.zeros(4).reshape(2, 2)}
    watched = Attributes(counter)
    noted = pack(watched.noted())
    watched.put_back(placed(unpack(noted), CPU))
    assert pack(watched.noted()) == noted


def test_new_dicts_have_the_class_of_the_present_one() -> None:
    """When an attribute refers to another dict of the user's class now, then the new one that it
    gets has this class, also within another dict."""
    counter = Counter()
    watched = Attributes(counter)
    watched.noted()
    counter.best = Settings(rate=0.1, inner=Settings(size=1))
    noted = watched.noted()
    present = counter.best = Settings(rate=0.2, inner=Settings(size=2))
    watched.put_back(placed(noted, CPU))
    assert (counter.best.rate, counter.best.inner.size) == (0.1, 1)
    assert (present.rate, present.inner.size) == (0.2, 2)


def test_functions_of_defaultdicts_are_lent_to_new_objects() -> None:
    """When an attribute refers to another defaultdict with a function without a name now, then the
    new one that it gets has the function of that one."""
    counter = Counter()
    watched = Attributes(counter)
    watched.noted()
    counter.best = {"sums": defaultdict(lambda: 5.0)}
    counter.best["sums"]["a"] += 1
    noted = watched.noted()
    counter.best["sums"]["a"] += 1
    watched.put_back(placed(noted, CPU))
    assert counter.best["sums"] == {"a": 6.0}
    assert counter.best["sums"]["b"] == 5.0


def test_what_has_very_many_parts_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """When an object has a container of very many parts, or a large tensor within one, then it counts
    as constant without a copy of it."""
    counter: Any = Counter()
    counter.rows = [[number] for number in range(40_000)]
    counter.items = {"all": torch.zeros(40_000)}
    asked: list[object] = []

    def asking(value: Any) -> Any:
        asked.append(value)
        return plain(value)

    monkeypatch.setattr("tft_pytorch.attributes.plain", asking)
    changes = Changes(counter)
    assert not any(each is counter.rows or each is counter.items for each in asked)
    assert not changes.keeps("rows")
    counter.count = 1
    assert changes.noted()["set"] == {"count": 1}
