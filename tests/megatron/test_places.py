"""Find and replace references to process groups wherever Megatron and its users keep them."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tft_megatron.group_references import find_places
from torch import nn

from tft.errors import UsageError


class Group(dist.ProcessGroup):
    """
    A process group of one rank, used only as a reference to find and replace.
    """

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # the constructor for subclasses


class Slotted:
    """
    An object that keeps a group in a slot and has no `__dict__`.
    """

    __slots__ = ("group",)

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group


def test_group_references_in_objects_of_all_kinds_are_replaced() -> None:
    """When modules, parameters, dicts, lists, partials, closures, bound methods and slots keep
    groups, then each reference is found once, and is set to the new group of its role."""
    first, second = Group(), Group()
    module: Any = nn.Linear(2, 2)
    module.group = first
    module.weight.summed_over = second
    module.collection = {"tp": first, "nested": [second, None]}
    module.slotted = Slotted(second)

    def closed() -> dist.ProcessGroup:
        return first

    reduced = partial(print, group=second)
    roots = {"model": module, "closed": closed, "partial": reduced, "bound": module.forward}
    places = find_places(roots, {"first": first, "second": second})
    assert sorted(place.path for place in places) == [
        "closed(…)",
        "model._parameters['weight'].summed_over",
        "model.collection['nested'][0]",
        "model.collection['tp']",
        "model.group",
        "model.slotted.group",
        "partial['group']",
    ]
    others = {"first": Group(), "second": Group()}
    for place in places:
        place.put(others[str(place.role)])
    assert closed() is others["first"]
    assert module.group is module.collection["tp"] is others["first"]
    assert reduced.keywords["group"] is module.slotted.group is others["second"]
    assert module.weight.summed_over is module.collection["nested"][0] is others["second"]
    assert module(torch.zeros(1, 2)).shape == (1, 2)


def test_a_group_that_cannot_be_rebuilt_is_refused_with_its_place() -> None:
    """When a group is none of Megatron's, or is in a tuple, then the error names the place of the
    reference."""
    known, foreign = Group(), Group()
    with pytest.raises(UsageError, match=r"model\['mine'\] is a process group that Megatron"):
        find_places({"model": {"mine": foreign}}, {"known": known})
    with pytest.raises(UsageError, match=r"model\['pair'\]\[…\] is a process group in a tuple"):
        find_places({"model": {"pair": (known, 1)}}, {"known": known})


class Named(Group):
    """
    A group with a method written in Python.
    """

    def told(self) -> None:
        """
        Do nothing.
        """


def test_a_group_that_cannot_be_replaced_is_refused_with_its_place() -> None:
    """When a group is a default value, an argument of a partial, or the object of a bound method, then
    the error says so, and names the reference."""
    known = Named()

    def reduce(rows: object, group: dist.ProcessGroup = known) -> None:
        del rows, group

    reduce_here = partial(print, 1, known)
    for holder, words in (
        (reduce, r"\['f'\]\(group=…\) is a process group among the default values of a function"),
        (reduce_here, r"\['f'\]\(1\) is a process group among the arguments of a functools"),
        (known.told, r"\['f'\] is a process group to which a method is bound, where tft cannot"),
    ):
        with pytest.raises(UsageError, match=words):
            find_places({"model": {"f": holder}}, {"known": known})
