"""
What people write into the environment of a MindSpore job, and what is made of it.
"""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tft_mindspore import environment
from tft_mindspore.environment import Environment, read, settle

from tft.core.job.policy import STRATEGIES
from tft.errors import UsageError


def enabled(text: str) -> Environment:
    """
    What is asked for by `MS_ENABLE_TFT` alone.
    """
    return read({"MS_ENABLE_TFT": text})


@pytest.mark.parametrize(
    ("text", "normal", "strategies"),
    [
        ("{TTP:1,UCE:1,ARF:1}", "{TTP:1,UCE:1,ARF:1}", ("retry", "recover", "dump")),
        ("{TTP:1}", "{TTP:1}", ("dump",)),
        ("{UCE:1}", "{TTP:1,UCE:1}", ("retry", "dump")),
        ("{ARF:1}", "{TTP:1,ARF:1}", ("recover", "dump")),
        ("{TTP:0,UCE:1,ARF:0}", "{TTP:1,UCE:1}", ("retry", "dump")),
        ("{TTP:1,UCE:1,HCCE:1,ARF:1,TRE:1,TSP:1}", None, ("retry", "recover", "dump")),
        ("{HCCE:1}", "{HCCE:1}", ("retry",)),
        ("TRE:1", "{TRE:1}", ("retry",)),
        ("{TRE:2,TRE_SNAPSHOT_STEPS:5}", "{TRE:2,TRE_SNAPSHOT_STEPS:5}", ("retry",)),
        ("{TSP:1}", "{TSP:1}", ()),
        ("{RSC:1}", "{RSC:1}", ()),
        ("{ATO:1,ATO_THRESHOLD:10,ATO_PATH:a/b.json}", None, ()),
        ("{TTP:0}", "", ()),
        ("", "", ()),
        ("{}", "", ()),
        (" { } ", "", ()),
    ],
)
def test_what_is_documented_is_understood(
    text: str, normal: str | None, strategies: tuple[str, ...]
) -> None:
    """
    When a form of the documentation is given, then what is on is known, and a last checkpoint is on by
    itself where a retry or a recovery is.
    """
    asked = enabled(text)
    expected = text if normal is None else normal
    assert asked.normal == expected
    assert asked.strategies == strategies
    assert asked.last_checkpoints == ("dump" in strategies)


@pytest.mark.parametrize(
    "text",
    [
        "TTP:1,UCE:1",
        "{ TTP : 1 , UCE : 1 }",
        "{ttp:1,Uce:1}",
        "{TTP:1 UCE:1}",
        "{TTP:1,\tUCE: 1,}",
        "{TTP:1,,UCE:1",
        "TTP:1,UCE:1}",
        "{UCE:1,TTP:1,UCE:1}",
    ],
)
def test_what_mindspore_would_misunderstand_has_a_normal_form(text: str) -> None:
    """
    When there are spaces, small letters or fewer braces, then what was meant is switched on.
    """
    assert enabled(text).normal == "{TTP:1,UCE:1}"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{TTP}", "'TTP' has no value: expected is TTP:1, or TTP:0"),
        ("{TTP:1,UCE}", "'UCE' has no value: expected is UCE:1, or UCE:0"),
        ("{TTP=1}", "'TTP=1' has no value: expected is TTP=1:1, or TTP=1:0"),
        ("{TTP:}", "'TTP:' has another value than 0 or 1"),
        ("{TTP:10}", "'TTP:10' has another value than 0 or 1"),
        ("{TTP:true}", "'TTP:true' has another value than 0 or 1"),
        ("{TTP:1:0}", "'TTP:1:0' has another value than 0 or 1"),
        ("{TTP:1}{UCE:1}", "'TTP:1}{UCE:1' has another value than 0 or 1"),
        ("{TTP:1;UCE:1}", "'TTP:1;UCE:1' has another value than 0 or 1"),
        ("{TRE:3}", "'TRE:3' has another value than 0, 1 or 2"),
        ("{TTP:1,TTP:0}", "TTP is both 1 and 0: expected is one of the two"),
        ("{ATO:1,TTP:1}", "ATO cannot be on beside TTP: switch one of them off"),
        ("{ATO:1,ATO_THRESHOLD:9}", "'ATO_THRESHOLD:9' has another value than a whole number"),
        ("{ATO:1,ATO_PATH:/a:1/x.json}", "'ATO_PATH:/a:1/x.json' has another value than the path"),
        ("{ATO:1,ATO_PATH:x.txt}", "'ATO_PATH:x.txt' has another value than the path of a .json"),
        ("{TTP:1,FOO}", "'FOO' has no value: expected is FOO:1, or FOO:0"),
        ("{XTTP:1}", "'XTTP:1' is not known, and MindSpore finds TTP:1 in it: write TTP:1"),
        ('"{TTP:1}"', "'\"{TTP:1}\"' is not known, and MindSpore finds TTP:1 in it: write TTP:1"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, why: str) -> None:
    """
    When MindSpore would abort, or would switch on another thing than is written, then a sentence comes
    before it.
    """
    with pytest.raises(UsageError) as refused:
        enabled(text)
    assert str(refused.value).startswith(f"MS_ENABLE_TFT is {text!r}, in which {why}")


@pytest.mark.parametrize(
    ("text", "unknown", "normal"),
    [
        ("{TPT:1}", ("TPT:1",), "{TPT:1}"),
        ("{ foo : a:b , UCE:1, ttp:1, foo:0}", ("foo:a:b", "foo:0"), "{TTP:1,UCE:1,foo:a:b,foo:0}"),
        ("{TTP:1,NEW:,NEW:}", ("NEW:",), "{TTP:1,NEW:}"),
    ],
)
def test_items_that_are_not_known_are_left_to_mindspore(
    text: str, unknown: tuple[str, ...], normal: str
) -> None:
    """
    When an item is not known, which a later MindSpore may have, then it is not refused, enables nothing, and
    stands in the normal form as it was written.
    """
    asked = enabled(text)
    assert (asked.unknown, asked.normal) == (unknown, normal)
    assert enabled(normal).normal == normal
    assert asked.features.keys() <= {"TTP", "UCE"}


def test_items_that_are_not_known_are_logged_once() -> None:
    """
    When the environment of a process is settled twice, then there is one line for each item that is not known.
    """
    done = subprocess.run(
        [sys.executable, "-c", "from tft_mindspore.environment import settle; settle(); settle()"],
        env={**os.environ, "MS_ENABLE_TFT": "{TTP:1,NEW:1,OLD:2}"},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if "item_not_known" in line]
    assert [item in line for line, item in zip(lines, ("NEW:1", "OLD:2"), strict=True)] == [
        True
    ] * 2


@given(
    st.dictionaries(
        st.sampled_from(["TTP", "UCE", "ARF", "HCCE", "TSP", "TRE"]), st.sampled_from("01")
    )
)
def test_both_readers_of_mindspore_see_the_same_in_the_normal_form(values: dict[str, str]) -> None:
    """
    When a normal form is read as MindSpore reads it, by items and by search, then both find what is
    on, and nothing else; and it is its own normal form.
    """
    normal = enabled("{" + ",".join(f"{key}:{value}" for key, value in values.items()) + "}").normal
    bare = normal.replace("{", "").replace("}", "")
    by_items = dict(item.split(":") for item in bare.split(",") if item)
    by_search = {key for key in ("TTP", "UCE", "ARF", "HCCE", "TSP", "TRE") if f"{key}:1" in normal}

    on = {key for key, value in values.items() if value == "1"}
    on |= {"TTP"} if on & {"UCE", "ARF"} else set()
    assert set(by_items) == by_search == on
    assert enabled(normal).normal == normal


@pytest.mark.parametrize(
    ("names", "strategies"),
    [
        ("dump", ("dump",)),
        ("retry,recover,dump", ("retry", "recover", "dump")),
        (" Recover-in-place , exit ", ("recover",)),
        ("elastic-training", ("scale_out", "scale_in")),
        ("", ()),
    ],
)
def test_the_names_of_mindcluster_are_known(names: str, strategies: tuple[str, ...]) -> None:
    """
    When MindCluster names what it has enabled, then these are the strategies of tft that do it.
    """
    assert read({"HIGH_AVAILABILITY": names}).strategies == strategies
    assert set(strategies) <= set(STRATEGIES)


def test_both_are_enabled_where_both_are_given() -> None:
    """
    When MindSpore's variable and MindCluster's are there, then what either names is enabled, in the
    order in which tft tries it.
    """
    asked = read({"HIGH_AVAILABILITY": "retry", "MS_ENABLE_TFT": "{TTP:1}"})
    assert asked.strategies == ("retry", "dump")
    assert STRATEGIES == environment._STRATEGIES


def test_where_the_controller_listens_is_read() -> None:
    """
    When address and port are given, then that is where; MindIO may be told whose framework it has.
    """
    asked = read(
        {
            "MS_ENABLE_TFT": "{TTP:1}",
            "MS_TFT_IP": "127.0.0.1",
            "MS_TFT_PORT": " 30051 ",
            "MINDIO_FOR_MINDSPORE": "1",
        }
    )
    assert asked.needs_mindio
    assert asked.controller() == ("127.0.0.1", 30051)
    assert asked.for_mindspore
    assert read({"MINDIO_FOR_MINDSPORE": "TRUE"}).for_mindspore
    assert not read({"MINDIO_FOR_MINDSPORE": "false"}).for_mindspore
    assert not enabled("{TRE:1}").needs_mindio


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"MS_TFT_IP": "node0"}, "MS_TFT_IP is 'node0'; expected is an IP address"),
        ({"MS_TFT_PORT": "80"}, "MS_TFT_PORT is '80'; expected is a port from 1024 to 65535"),
        ({"MS_TFT_PORT": "65536"}, "MS_TFT_PORT is '65536'; expected is a port from 1024 to 65535"),
        ({"MS_TFT_PORT": "3e4"}, "MS_TFT_PORT is '3e4'; expected is a port from 1024 to 65535"),
        ({"MINDIO_FOR_MINDSPORE": "yes"}, "MINDIO_FOR_MINDSPORE is 'yes'; expected is 1 or true"),
        (
            {"HIGH_AVAILABILITY": "dump,persist"},
            "HIGH_AVAILABILITY is 'dump,persist', in which 'persist' is not known: expected are dump, "
            "retry, recover, recover-in-place, elastic-training, exit, with commas between",
        ),
    ],
)
def test_other_variables_are_refused_with_what_is_expected(
    variables: dict[str, str], sentence: str
) -> None:
    """
    When another variable has something else in it, then it is said what is expected there.
    """
    with pytest.raises(UsageError) as refused:
        read(variables)
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        ({"MS_TFT_PORT": "30051"}, "MS_TFT_IP is not set"),
        ({"MS_TFT_IP": "127.0.0.1"}, "MS_TFT_PORT is not set"),
    ],
)
def test_a_controller_that_is_nowhere_is_refused(variables: dict[str, str], missing: str) -> None:
    """
    When it is asked where the controller listens, and that is not said, then it is said what to set.
    """
    with pytest.raises(UsageError, match=missing):
        read(variables).controller()


def test_the_process_has_the_normal_form_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    When the environment is settled, then MindSpore finds the normal form there; where nothing was
    set, nothing is.
    """
    monkeypatch.setenv("MS_ENABLE_TFT", "{ uce : 1 }")
    assert settle().strategies == ("retry", "dump")
    assert os.environ["MS_ENABLE_TFT"] == "{TTP:1,UCE:1}"
    monkeypatch.delenv("MS_ENABLE_TFT")
    settle()
    assert "MS_ENABLE_TFT" not in os.environ
