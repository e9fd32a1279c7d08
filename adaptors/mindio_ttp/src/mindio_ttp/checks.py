"""
Arguments that cannot be: refused with a sentence, before anything is changed.
"""

import ipaddress
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mindio_ttp.words import (
    HIGHEST_PORT,
    LARGEST_STEP,
    LARGEST_WORLD,
    LONGEST_ERROR_CODE,
    LOWEST_PORT,
    MOST_GROUPS,
    ReportState,
)


class Refused(Exception):
    """
    A call that cannot be followed. Programs for MindIO expect an `Exception`, of no kind of its own.
    """


def number(function: str, name: str, value: Any, least: int, most: int) -> int:  # Any: as given
    """
    A whole number between two bounds.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise Refused(
            f"{function}: {name} is to be a number from {least} to {most}, and is {value!r}"
        )
    return value


def flag(function: str, name: str, value: Any) -> bool:  # Any: as given
    """
    True or False.
    """
    if not isinstance(value, bool):
        raise Refused(f"{function}: {name} is to be True or False, and is {value!r}")
    return value


def text(function: str, name: str, value: Any) -> str:  # Any: as given
    """
    A text that is not empty.
    """
    if not isinstance(value, str) or not value:
        raise Refused(f"{function}: {name} is to be a text, and is {value!r}")
    return value


def function(caller: str, value: Any) -> Callable[..., Any]:  # Any: as given, and of any kind
    """
    Something that can be called; a `TypeError` for what cannot, as MindIO raises it.
    """
    if not callable(value):
        raise TypeError(f"{caller} takes a function, and got {value!r}")
    return value  # type: ignore[no-any-return] # of any kind


def rank_and_world(function: str, rank: Any, world: Any, *, least: int = 0) -> None:
    """
    A rank of a world of at most 100,000.
    """
    number(function, "world_size", world, 1, LARGEST_WORLD)
    number(function, "rank", rank, least, world - 1)


def port(function: str, value: Any) -> int:
    """
    A port that needs no privileges, and has one after it.
    """
    return number(function, "port", value, LOWEST_PORT, HIGHEST_PORT - 1)


def address(function: str, name: str, value: Any) -> str:
    """
    An address, of a host that is known by name, too.
    """
    if not isinstance(value, str) or not value:
        raise Refused(f"{function}: {name} is to be an address or a host's name, and is {value!r}")
    try:
        found = socket.gethostbyname(value) if ":" not in value else value
        if ipaddress.ip_address(found).is_unspecified:
            raise Refused(
                f"{function}: {name} is {value}, which is no address others reach: give that of one "
                "network interface"
            )
    except OSError as error:
        raise Refused(f"{function}: the host {value} is not known here ({error})") from None
    except ValueError:
        raise Refused(f"{function}: {name} {value!r} is no address") from None
    return found


def step(function: str, value: Any, *, least: int) -> int:
    """
    A step of training.
    """
    return number(function, "step", value, least, LARGEST_STEP)


def error(value: Any, code: Any) -> ReportState:
    """
    How a rank has left its loop, and the code of a device.
    """
    states = [state.value for state in ReportState]
    if isinstance(value, ReportState):
        value = value.value
    if isinstance(value, bool) or value not in states:
        raise Refused(
            f"tft_report_error: error_type is the value of a ReportState, 0 to {max(states)}, and is "
            f"{value!r}"
        )
    if not isinstance(code, str) or len(code) > LONGEST_ERROR_CODE:
        raise Refused(
            f"tft_report_error: error_code is a text of at most {LONGEST_ERROR_CODE} characters, and is "
            f"{code!r}"
        )
    return ReportState(value)


def ranks(function: str, name: str, value: Any, world: int) -> tuple[int, ...]:
    """
    Ranks of the world, each once.
    """
    if not isinstance(value, list | tuple) or not value:
        raise Refused(f"{function}: {name} is to be a list of ranks, and is {value!r}")
    for each in value:
        number(function, f"a rank of {name}", each, 0, world - 1)
    if len(set(value)) < len(value):
        raise Refused(f"{function}: {name} has a rank more than once: {list(value)}")
    return tuple(sorted(value))


def groups(value: Any) -> Sequence[Mapping[str, Any]]:
    """
    The outer form of what describes the copies of an optimizer's state.
    """
    call = "tft_set_optimizer_replica"
    if not isinstance(value, list) or not 1 <= len(value) <= MOST_GROUPS:
        raise Refused(
            f"{call}: replica_info is to be a list of 1 to {MOST_GROUPS} groups, and is {value!r:.80}"
        )
    for place, group in enumerate(value):
        if not isinstance(group, dict):
            raise Refused(f"{call}: group {place} is to be a dict, and is {group!r:.80}")
        missing = {"rank_list", "replica_cnt", "replica_shift"} - group.keys()
        if missing:
            raise Refused(f"{call}: group {place} has no {', '.join(sorted(missing))}")
    return value
