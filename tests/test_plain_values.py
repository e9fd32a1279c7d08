"""
Values of the user's objects, as adaptors keep them, without a framework.

`tests/adaptors/test_plain_values.py` and `tests/mindspore/test_kept_attributes.py` have the tests with
tensors.
"""

from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from tft.errors import UsageError
from tft.spi import pack, unpack
from tft.spi.plain_values import (
    Filled,
    Large,
    NotPlain,
    PlainValues,
    mark_of_array,
    of_kind,
    size_of,
    unkept_sentence,
)


class Weight:
    """
    A tensor of a framework.
    """

    def __init__(self, value: float, device: str) -> None:
        self.value = value
        self.device = device


class Parameter(Weight):
    """
    A tensor that a model refers to.
    """


@dataclass
class Meter:
    """
    A dataclass of the user.
    """

    total: Weight
    last: list[int]


def filled(old: Weight, value: Weight) -> Weight:
    """
    Put a tensor back into the one that is there.
    """
    old.value = value.value
    return old


values = PlainValues(
    forms={Weight: lambda value, depth: of_kind("weight", value.value)},
    makers={"weight": Weight},
    fillers=((Weight, filled),),
    frameworks=(),
    large=800,
    many=100,
)


def test_tensors_of_a_framework_are_kept_in_containers() -> None:
    """When values have tensors as parts, then they are made again, for the place that is named, and
    are put back into the tensors that are there. Subclasses of tensors are not plain."""
    meter = Meter(Weight(1.5, "here"), [1])
    found = values.placed(unpack(pack(values.plain({"all": [meter]}))), "there")["all"][0]
    assert (found.total.value, found.total.device, found.last) == (1.5, "there", [1])

    owner = Meter(Weight(0.0, "here"), [])
    total, last = owner.total, owner.last
    values.put_back(owner, {"total": Weight(2.5, "there"), "last": [3]})
    assert (owner.total, owner.last) == (total, [3])
    assert owner.last is last
    assert (total.value, total.device) == (2.5, "here")
    with pytest.raises(NotPlain):
        values.plain([Parameter(1.0, "here")])


def test_data_behind_a_view_stays_as_it_is() -> None:
    """When an attribute is a row of an array by the time it is put back, then it becomes an array of its
    own: the row of that time belongs elsewhere. An array with its own data keeps its identity."""
    data = numpy.arange(6.0).reshape(3, 2).copy()
    owner = SimpleNamespace(row=data[1], held={"row": data[1]}, own=numpy.zeros(2))
    noted, own = values.plain(vars(owner)), owner.own
    owner.row = owner.held["row"] = data[2]
    own[:] = 7
    values.put_back(owner, values.placed(noted))
    assert data.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert owner.row.tolist() == owner.held["row"].tolist() == [2, 3]
    assert owner.own is own
    assert own.tolist() == [0, 0]


def test_two_names_of_one_object_get_what_each_had() -> None:
    """When two attributes, or parts of a dict, had objects of their own and refer to one object by the
    time they are put back, then each has its own content again."""
    owner = SimpleNamespace(last=[1], now=[1, 2], held={"b": [1], "c": [1, 2]})
    noted, before = values.plain(vars(owner)), owner.last
    owner.now = owner.last
    owner.held["c"] = owner.held["b"]
    values.put_back(owner, values.placed(noted))
    assert owner.last is before
    assert vars(owner) == {"last": [1], "now": [1, 2], "held": {"b": [1], "c": [1, 2]}}


def test_two_owners_of_one_object_get_what_each_had() -> None:
    """When two owners that are put back together refer to one object, then each gets its own content."""
    shared = Meter(Weight(0.0, "here"), [0])
    owners = [SimpleNamespace(meter=shared) for _ in range(2)]
    filled: Filled = {}
    for last, owner in enumerate(owners):
        values.put_back(owner, {"meter": Meter(Weight(1.0, "here"), [last])}, filled)
    assert owners[0].meter is shared
    assert [each.meter.last for each in owners] == [[0], [1]]


def test_names_that_always_were_of_one_object_still_are() -> None:
    """When two names refer to one object all the time, then they still do after it is put back."""
    losses = [float("nan"), 2.0]
    owner = SimpleNamespace(losses=losses, means={"loss": losses})
    noted = values.plain(vars(owner))
    losses.append(3.0)
    values.put_back(owner, values.placed(noted))
    assert owner.losses is owner.means["loss"] is losses
    assert repr(losses) == "[nan, 2.0]"


def test_value_that_has_itself_as_a_part_is_put_back() -> None:
    """When a dict has become a part of itself, then it has its content again, with a dict as part."""
    owner = SimpleNamespace(tree={"left": {"at": 1}})
    noted, tree = values.plain(vars(owner)), owner.tree
    tree["left"] = tree
    values.put_back(owner, values.placed(noted))
    assert owner.tree is tree
    assert tree == {"left": {"at": 1}}


@pytest.mark.parametrize("value", [numpy.zeros(101), list(range(101)), [set(range(101))]])
def test_large_values_are_not_copied(value: Any) -> None:
    """When an array has more bytes, or a container more parts, than an adaptor keeps, then its size
    is known without a copy of it."""
    noted = values.plain(value)
    assert Large(808) in (noted, *(noted if isinstance(noted, list) else ()))
    assert size_of(noted) == 808
    assert size_of(values.plain(numpy.zeros(100))) > 800


def test_dataclass_of_a_framework_is_not_plain() -> None:
    """When a dataclass is of a package that is a framework for the adaptor, then it is not plain, as
    it may be the bookkeeping of the framework."""
    apart = PlainValues(forms={}, makers={}, frameworks=(__name__.partition(".")[0],), large=800)
    assert values.may_be_plain(Meter(Weight(1.0, "here"), []))
    assert not apart.may_be_plain(Meter(Weight(1.0, "here"), []))


def test_own_class_of_dicts_within_another_value_may_be_refused() -> None:
    """When a dict of a class of the user is a part of a value, then an adaptor may refuse it, since a
    replacement process may have a dict there. An attribute itself is put back into the one there."""

    class Table(dict[str, int]):
        """
        A dict of the user.
        """

    strict = PlainValues(forms={}, makers={}, frameworks=(), large=800, own_dicts=False)
    owner = SimpleNamespace(table=Table(a=1))
    with pytest.raises(NotPlain):
        strict.plain({"table": owner.table})
    noted, table = strict.plain(owner.table), owner.table
    table["a"] = 2
    strict.put_back(owner, {"table": strict.placed(noted)})
    assert owner.table is table
    assert table == {"a": 1}
    assert strict.plain([{}, Counter("a"), OrderedDict(), defaultdict(int)])
    assert values.plain([table]) == [{"a": 1}]


def counting() -> dict[str, Any]:
    """
    Return counters that are made by functions without names.
    """
    return {
        "all": {"train": defaultdict(lambda: 5)},
        "by": defaultdict(lambda: defaultdict(lambda: 5)),
        "many": ([defaultdict(lambda: 5)], [{"train": defaultdict(lambda: 5)}]),
    }


@pytest.mark.parametrize("fresh", [False, True])
def test_nameless_function_of_a_part_is_that_of_the_part_that_is_there(fresh: bool) -> None:
    """When a defaultdict within another value has a function without a name, then its content is put
    back, and the function is that of the defaultdict that is there, or that the one around it makes."""

    def parts(counts: Any) -> list[Any]:
        many = counts["many"]
        return [counts["all"]["train"], counts["by"]["train"], many[0][0], many[1][0]["train"]]

    owner = SimpleNamespace(counts=counting())
    for each in parts(owner.counts):
        each["seen"] += 1
    noted = unpack(pack(values.plain(vars(owner))))
    for each in parts(owner.counts):
        each["seen"] += 1
    if fresh:
        owner.counts = counting()
    values.put_back(owner, values.placed(noted))
    for each in parts(owner.counts):
        assert dict(each) == {"seen": 6}
        assert each["new"] == 5


def test_names_that_share_a_nameless_function_by_now_both_have_it() -> None:
    """When two attributes have become one defaultdict whose function has no name, then each has its own
    content again, and both have the function."""
    owner = SimpleNamespace(last=defaultdict(lambda: 5, a=1), now=defaultdict(lambda: 5, a=2))
    noted = values.plain(vars(owner))
    owner.last = owner.now
    values.put_back(owner, values.placed(noted))
    assert (owner.last, owner.now) == ({"a": 1}, {"a": 2})
    assert owner.last["new"] == owner.now["new"] == 5


def test_nameless_function_that_is_not_there_is_named_where_it_is_needed() -> None:
    """When a replacement process has no defaultdict at the place of one whose function has no name, then
    it has its content, and an exception at the first missing key says what to do."""
    noted = unpack(pack(values.plain({"counts": defaultdict(lambda: 5, seen=6)})))
    found = values.into({}, values.placed(noted))["counts"]
    assert found == {"seen": 6}
    assert values.plain(found) == noted["counts"]
    with pytest.raises(UsageError, match="Create the defaultdict when its object is created"):
        found["new"]


@pytest.mark.parametrize("dtype", [float, object, [("a", object), ("b", int)]], ids=str)
def test_change_within_an_array_changes_its_mark(dtype: Any) -> None:
    """When an element of a small array changes, then its mark does, also if the elements are objects."""
    array = numpy.zeros((4, 4), dtype)
    before = mark_of_array(array)
    assert mark_of_array(array) == before
    array[2, 3] = 1.5
    assert mark_of_array(array) != before


def test_sentence_about_an_attribute_says_what_to_use() -> None:
    """When an attribute is not kept, then the sentence names it, the reason, and what is kept."""
    said = unkept_sentence("Mean", "rows", "is no plain value", ", and 64 KiB in all")
    assert said.startswith("the attribute rows of Mean changes while training")
    assert "because it is no plain value: an incident does not put it back" in said
    assert said.endswith("each up to 32 KiB, and 64 KiB in all")
