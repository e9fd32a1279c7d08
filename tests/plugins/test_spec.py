"""
The argument of `--chaos`: accepted values, and the messages for others.
"""

import json

import click
import pytest
from click.testing import CliRunner
from tft_chaos import tft_environment, tft_options
from tft_chaos.spec import (
    Bitflip,
    Hang,
    Kill,
    Process,
    Raise,
    Ranks,
    Slow,
    Spec,
    Stop,
    parse,
)

from tft.errors import UsageError


def test_spec_with_all_keys_sets_all_fields() -> None:
    """When a spec has every key, then every field has the given value."""
    assert parse("kill:rank=2,step=30,phase=update,count=3") == Spec(
        text="kill:rank=2,step=30,phase=update,count=3",
        action=Kill(),
        target=Ranks(ranks=(2,)),
        step=30,
        phase="update",
        count=3,
        order="regroup",
    )


def test_spec_can_be_aimed_at_several_ranks() -> None:
    """When a spec names ranks with plus signs, then its target has all of them, in their order."""
    assert parse("kill:ranks=2+0,step=12").target == Ranks(ranks=(2, 0))


def test_spec_without_keys_fires_once_in_the_first_forward() -> None:
    """When a spec has only an action and a target, then it fires once, in the forward pass of step
    1."""
    spec = parse("kill:rank=0")

    assert (spec.step, spec.phase, spec.count) == (1, "forward", 1)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("kill:rank=1", Kill()),
        ("stop:rank=1", Stop()),
        ("hang:rank=1", Hang(gil=False)),
        ("hang:rank=1,gil=held", Hang(gil=True)),
        ("raise:rank=1,kind=memory", Raise(kind="memory")),
        ("raise:rank=1,kind=network", Raise(kind="network")),
        ("raise:rank=1,kind=numeric", Raise(kind="numeric")),
        ("raise:rank=1,kind=bug", Raise(kind="bug")),
        ("bitflip:rank=1,target=param", Bitflip(part="param")),
        ("bitflip:rank=1,target=exp_avg", Bitflip(part="exp_avg")),
        ("bitflip:rank=1,target=exp_avg_sq", Bitflip(part="exp_avg_sq")),
        ("bitflip:rank=1,target=master,tensor=3", Bitflip(part="master", tensor=3)),
        ("bitflip:rank=1,target=buffer,tensor=bn.mean", Bitflip(part="buffer", tensor="bn.mean")),
        ("bitflip:rank=1,target=gradient,bits=3", Bitflip(part="gradient", bits=3)),
        (
            "bitflip:rank=1,target=param,element=7,bit=2,bits=3,period=32",
            Bitflip(part="param", element=7, bit=2, bits=3, period=32),
        ),
        (
            "bitflip:rank=1,target=param,period=128B",
            Bitflip(part="param", period=128, period_in_bytes=True),
        ),
        ("slow:rank=1,factor=2.5", Slow(factor=2.5)),
    ],
)
def test_each_action_has_its_own_key(text: str, action: object) -> None:
    """When an action is given with its own key, then the parsed action has the value of that key."""
    assert parse(text).action == action


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("kill:broker,step=20", Process(name="broker", node=0)),
        ("stop:controller", Process(name="controller", node=0)),
        ("kill:store", Process(name="store-0", node=0)),
        ("kill:agent=1", Process(name="agent-1", node=1)),
    ],
)
def test_target_that_is_a_tft_process_has_a_name_and_a_node(text: str, target: object) -> None:
    """When the target is a broker, controller, store or agent, then the parsed target has the name
    of its pid file and its node."""
    assert parse(text).target == target


def test_bitflip_has_phase_between_by_default() -> None:
    """When a `bitflip` spec has no phase, then its phase is `between`, the only phase in which the
    state is complete. A gradient exists in `backward` only."""
    assert parse("bitflip:rank=1,target=param").phase == "between"
    assert parse("bitflip:rank=1,target=gradient").phase == "backward"


def test_repair_spec_without_a_step_fires_in_the_first_incident() -> None:
    """When a spec has `phase=repair` and no step, then it fires in the first incident. The key
    `order` names the order at which it fires."""
    assert parse("kill:rank=1,phase=repair").step == 0
    assert parse("kill:rank=1,phase=repair,order=fetch").order == "fetch"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "the action '' is not one of kill, raise, hang, stop, bitflip and slow"),
        ("slay:rank=1", "the action 'slay' is not one of kill, raise, hang"),
        ("kill", "the target '' is not one of rank=R, ranks=R+R, broker, controller"),
        ("kill:rank", "the target 'rank' is not one of"),
        ("kill:rank=", "the target 'rank=' is not one of"),
        ("kill:rank=-1", "the target 'rank=-1' is not one of"),
        ("kill:rank=two", "the target 'rank=two' is not one of"),
        ("kill:ranks=", "the target 'ranks=' is not one of"),
        ("kill:ranks=1+", "the target 'ranks=1+' is not one of"),
        ("kill:ranks=1+2+1", "the target 'ranks=1+2+1' names a rank twice"),
        ("kill:ranks=1+2,phase=repair", "phase 'repair' takes one rank, because not every rank"),
        ("slow:ranks=1+2,factor=2", "'slow' has no moment that several ranks could share"),
        ("kill:broker=1", "the target 'broker=1' is not one of"),
        ("kill:rank=1,now", "'now' should be key=value"),
        ("kill:rank=1,step=", "'step=' should be key=value"),
        ("kill:rank=1,", "'' should be key=value"),
        ("kill:rank=1,step=0", "'step' is '0', but should be a whole number from 1 on"),
        ("kill:rank=1,step=x", "'step' is 'x', but should be a whole number from 1 on"),
        ("kill:rank=1,step=1.5", "'step' is '1.5', but should be a whole number"),
        ("kill:rank=1,count=0", "'count' is '0', but should be a whole number from 1 on"),
        ("kill:rank=1,step=3,step=4", "'step' is given twice"),
        ("kill:rank=1,phase=later", "'phase' is 'later', but should be forward or backward or "),
        (
            "kill:rank=1,kind=memory",
            "'kind' cannot be used in this spec; possible keys are count, phase, step",
        ),
        ("kill:rank=1,order=fetch", "'order' cannot be used in this spec"),
        ("kill:rank=1,phase=repair,order=resume", "'order' is 'resume', but should be stop or"),
        ("raise:rank=1", "'kind' is missing: it should be memory or network or numeric or bug"),
        ("raise:rank=1,kind=odd", "'kind' is 'odd', but should be memory or network or numeric"),
        ("raise:rank=1,kind=bug,phase=repair", "'phase' is 'repair', but should be forward or"),
        ("hang:rank=1,gil=free", "'gil' is 'free', but should be held"),
        (
            "bitflip:rank=1",
            "'target' is missing: it should be param or exp_avg or exp_avg_sq or master",
        ),
        ("bitflip:rank=1,target=loss", "'target' is 'loss', but should be param or exp_avg"),
        ("bitflip:rank=1,target=param,phase=update", "'phase' is 'update', but should be between"),
        (
            "bitflip:rank=1,target=gradient,phase=between",
            "'phase' is 'between', but should be backward",
        ),
        (
            "bitflip:rank=1,target=param,bits=0",
            "'bits' is '0', but should be a whole number from 1 to 64",
        ),
        (
            "bitflip:rank=1,target=param,bit=64",
            "'bit' is '64', but should be a whole number from 0 to 63",
        ),
        (
            "bitflip:rank=1,target=param,bit=2,bits=4",
            "'bits' is '4', but the bits are counted from 'bit' downwards, and there are 3 from bit",
        ),
        (
            "bitflip:rank=1,target=param,element=-1",
            "'element' is '-1', but should be a whole number from 0 on",
        ),
        (
            "bitflip:rank=1,target=param,period=0",
            "'period' is '0', but should be a whole number of elements from 1 on, or of bytes",
        ),
        ("bitflip:rank=1,target=param,period=4KB", "'period' is '4KB', but should be a whole"),
        (
            "bitflip:rank=1,target=param,element=5,period=1",
            "'period=1' flips bits of every element: leave 'element' out",
        ),
        (
            "kill:rank=1,bits=2",
            "'bits' cannot be used in this spec; possible keys are count, phase, step",
        ),
        ("slow:rank=1", "'factor' is missing: it should be a number greater than 1"),
        ("slow:rank=1,factor=0.5", "'factor' is '0.5', but should be a number greater than 1"),
        ("slow:rank=1,factor=nan", "'factor' is 'nan', but should be a number greater than 1"),
        (
            "slow:rank=1,factor=2,count=2",
            "'count' cannot be used in this spec; possible keys are factor, phase, step",
        ),
        (
            "kill:broker,phase=update",
            "'phase' cannot be used in this spec; possible keys are count, step",
        ),
        ("hang:broker", "'hang' acts inside a rank; 'broker' can only be killed or stopped"),
        ("raise:store,kind=bug", "'raise' acts inside a rank; 'store' can only be killed or"),
    ],
)
def test_invalid_spec_is_refused_with_the_wrong_part(text: str, sentence: str) -> None:
    """When a part of a spec is wrong, then the spec is refused. The sentence quotes the wrong part
    and names the allowed values."""
    with pytest.raises(UsageError) as refused:
        parse(text)

    assert str(refused.value).startswith(f"--chaos {text}: {sentence}")


def test_chaos_option_can_be_given_several_times() -> None:
    """When `--chaos` is given several times, then all specs arrive in their order."""
    seen: list[tuple[str, ...]] = []
    command = click.Command(
        "run", params=list(tft_options()), callback=lambda chaos: seen.append(chaos)
    )

    result = CliRunner().invoke(command, ["--chaos", "kill:rank=1", "--chaos", "kill:broker"])

    assert (result.exit_code, seen) == (0, [("kill:rank=1", "kill:broker")])


def test_specs_are_passed_in_one_environment_variable() -> None:
    """When a run has specs, then one environment variable has all of them. When a run has no spec,
    no variable is added."""
    specs = ("kill:rank=3,step=30", "kill:agent=1")
    options = {"chaos": specs, "nnodes": 2, "nproc_per_node": 2}

    assert tft_environment(options) == {"TFT_CHAOS": json.dumps(specs)}
    assert tft_environment(options | {"chaos": ()}) == {}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("kill:rank=4", "--chaos kill:rank=4: there is no rank 4; the job has ranks 0 to 3"),
        (
            "kill:ranks=1+5",
            r"--chaos kill:ranks=1\+5: there is no rank 5; the job has ranks 0 to 3",
        ),
        ("kill:agent=2", "--chaos kill:agent=2: there is no agent 2; the job has agents 0 to 1"),
    ],
)
def test_target_outside_the_job_is_refused(text: str, sentence: str) -> None:
    """When a spec names a rank or an agent that the job does not have, then the spec is refused."""
    with pytest.raises(UsageError, match=sentence):
        tft_environment({"chaos": (text,), "nnodes": 2, "nproc_per_node": 2})
