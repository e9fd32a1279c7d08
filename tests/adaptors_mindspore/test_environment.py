"""How the adaptor reads the environment variables of a MindSpore job."""

import json
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
    """Return the strategies that `MS_ENABLE_TFT` alone enables."""
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
def test_documented_forms_enable_the_documented_strategies(
    text: str, normal: str | None, strategies: tuple[str, ...]
) -> None:
    """When `MS_ENABLE_TFT` has a documented form, then the named strategies are enabled, and a
    retry or a recovery also enables the last checkpoint."""
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
def test_spaces_lower_case_and_missing_braces_are_normalized(text: str) -> None:
    """When the value has spaces, lower-case letters or missing braces, then the intended strategies
    are enabled."""
    assert enabled(text).normal == "{TTP:1,UCE:1}"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{TTP}", "'TTP' has no value: write TTP:1 or TTP:0"),
        ("{TTP:1,UCE}", "'UCE' has no value: write UCE:1 or UCE:0"),
        ("{TTP=1}", "'TTP=1' has no value: write TTP=1:1 or TTP=1:0"),
        ("{TTP:}", "'TTP:' has an unknown value: expected is 0 or 1"),
        ("{TTP:10}", "'TTP:10' has an unknown value: expected is 0 or 1"),
        ("{TTP:true}", "'TTP:true' has an unknown value: expected is 0 or 1"),
        ("{TTP:1:0}", "'TTP:1:0' has an unknown value: expected is 0 or 1"),
        ("{TTP:1}{UCE:1}", "'TTP:1}{UCE:1' has an unknown value: expected is 0 or 1"),
        ("{TTP:1;UCE:1}", "'TTP:1;UCE:1' has an unknown value: expected is 0 or 1"),
        ("{TRE:3}", "'TRE:3' has an unknown value: expected is 0, 1 or 2"),
        ("{TTP:1,TTP:0}", "TTP is given as 1 and as 0: give it once"),
        ("{ATO:1,TTP:1}", "ATO cannot be on together with TTP: switch one of them off"),
        (
            "{ATO:1,ATO_THRESHOLD:9}",
            "'ATO_THRESHOLD:9' has an unknown value: expected is a whole number",
        ),
        (
            "{ATO:1,ATO_PATH:/a:1/x.json}",
            "'ATO_PATH:/a:1/x.json' has an unknown value: expected is the path",
        ),
        (
            "{ATO:1,ATO_PATH:x.txt}",
            "'ATO_PATH:x.txt' has an unknown value: expected is the path of a .json",
        ),
        ("{TTP:1,FOO}", "'FOO' has no value: write FOO:1 or FOO:0"),
        ("{XTTP:1}", "'XTTP:1' is unknown, although MindSpore finds TTP:1 in it: write TTP:1"),
        (
            '"{TTP:1}"',
            "'\"{TTP:1}\"' is unknown, although MindSpore finds TTP:1 in it: write TTP:1",
        ),
    ],
)
def test_a_value_that_mindspore_would_misread_is_refused(text: str, why: str) -> None:
    """When MindSpore would abort, or would enable another strategy than the value names, then tft
    refuses the value with a message before MindSpore reads it."""
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
def test_unknown_items_are_passed_on_to_mindspore(
    text: str, unknown: tuple[str, ...], normal: str
) -> None:
    """When an item is unknown to tft, as a later MindSpore may have it, then the item is not
    refused, enables no strategy, and keeps its text in the normal form."""
    asked = enabled(text)
    assert (asked.unknown, asked.normal) == (unknown, normal)
    assert enabled(normal).normal == normal
    assert asked.features.keys() <= {"TTP", "UCE"}


def test_unknown_items_are_logged_once() -> None:
    """When a process settles its environment twice, then each unknown item is logged once."""
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
def test_both_parsers_of_mindspore_agree_on_the_normal_form(values: dict[str, str]) -> None:
    """When MindSpore reads a normal form by items and by text search, then both find exactly the
    enabled strategies. The normal form of a normal form is the same text."""
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
def test_names_of_mindcluster_map_to_strategies(names: str, strategies: tuple[str, ...]) -> None:
    """When MindCluster names the features that it has enabled, then tft enables the matching
    strategies."""
    assert read({"HIGH_AVAILABILITY": names}).strategies == strategies
    assert set(strategies) <= set(STRATEGIES)


def test_variables_of_mindspore_and_mindcluster_are_combined() -> None:
    """When the variables of MindSpore and MindCluster are both set, then the strategies of either
    are enabled, in the order in which tft tries them."""
    asked = read({"HIGH_AVAILABILITY": "retry", "MS_ENABLE_TFT": "{TTP:1}"})
    assert asked.strategies == ("retry", "dump")
    assert STRATEGIES == environment._STRATEGIES


def test_the_controllers_address_is_read() -> None:
    """When address and port are set, then tft reads the controller's address from them. MindIO's
    variable for the framework is also accepted."""
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
        ({"MS_TFT_PORT": "80"}, "MS_TFT_PORT is '80'; expected is a port from 1024 to 65534"),
        ({"MS_TFT_PORT": "65535"}, "MS_TFT_PORT is '65535'; expected is a port from 1024 to 65534"),
        ({"MS_TFT_PORT": "3e4"}, "MS_TFT_PORT is '3e4'; expected is a port from 1024 to 65534"),
        ({"MINDIO_FOR_MINDSPORE": "yes"}, "MINDIO_FOR_MINDSPORE is 'yes'; expected is 1 or true"),
        (
            {"HIGH_AVAILABILITY": "dump,persist"},
            "HIGH_AVAILABILITY is 'dump,persist', which contains the unknown word 'persist': "
            "expected are dump, retry, recover, recover-in-place, elastic-training, exit, with "
            "commas between",
        ),
    ],
)
def test_a_wrong_value_of_another_variable_is_refused_with_the_expected_one(
    variables: dict[str, str], sentence: str
) -> None:
    """When another variable has an invalid value, then the message names the expected values."""
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
def test_a_missing_controller_address_is_refused(variables: dict[str, str], missing: str) -> None:
    """When the controller's address is asked for and no variable gives it, then the message names
    the variable to set."""
    with pytest.raises(UsageError, match=missing):
        read(variables).controller()


def test_settling_writes_the_normal_form_into_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When the environment is settled, then it contains the normal form. A variable that was not
    set stays unset."""
    monkeypatch.setenv("MS_ENABLE_TFT", "{ uce : 1 }")
    assert settle().strategies == ("retry", "dump")
    assert os.environ["MS_ENABLE_TFT"] == "{TTP:1,UCE:1}"
    monkeypatch.delenv("MS_ENABLE_TFT")
    settle()
    assert "MS_ENABLE_TFT" not in os.environ


# ---------------------------------------------------------------- the norm of the gradients

CHECKED = {"check_for_global_norm": True}


def test_monitor_config_names_the_largest_norm() -> None:
    """When `monitor_config` checks the norm, then its threshold is the limit; without the check
    there is none, whatever the threshold is."""
    assert environment.norm_limit({**CHECKED, "global_norm_spike_threshold": 3}, "m") == 3.0
    assert environment.norm_limit({"global_norm_spike_threshold": 3.0}, "m") is None
    assert environment.norm_limit({}, "m") is None


@pytest.mark.parametrize("threshold", [None, 0, -1.0, True, "3", float("nan"), float("inf")])
def test_threshold_that_is_no_norm_is_refused(threshold: object) -> None:
    """When the norm is checked against no number larger than 0, then the message names the key."""
    monitor = {**CHECKED, "global_norm_spike_threshold": threshold}
    with pytest.raises(UsageError, match=r"m\.global_norm_spike_threshold is"):
        environment.norm_limit(monitor, "m")
    with pytest.raises(UsageError, match=r"m\.check_for_global_norm is 1"):
        environment.norm_limit({"check_for_global_norm": 1}, "m")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, {"mode": "refuse", "spike": 0.0, "limit": 3.0}),
        ({"mode": "watch", "spike": 9.0, "limit": None}, {"mode": "watch", "spike": 9.0, "limit": 3.0}),
        ({"mode": "refuse", "spike": 9.0, "limit": 2.0}, {"mode": "refuse", "spike": 9.0, "limit": 2.0}),
    ],
)  # fmt: skip
def test_threshold_is_given_to_the_plugin_unless_the_command_line_has_one(
    before: object, after: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When norms are to be refused, then the plugin of this process gets the limit. What `tft run
    --numerics` has set stays as it is."""
    monkeypatch.setenv("TFT_NUMERICS", "" if before is None else json.dumps(before))
    environment.refuse_norms(3.0)
    assert json.loads(os.environ["TFT_NUMERICS"]) == after
