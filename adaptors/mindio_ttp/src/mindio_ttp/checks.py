"""
Checks the arguments of the functions that this package offers in place of the library MindIO.

Each function here checks one kind of argument, and raises an exception if the argument is invalid.
Two arguments are only for the message: `function` or `caller` is the name of the function that the
program has called, and `name` is the name of the checked argument.
"""

import ipaddress
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mindio_ttp.constants import (
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
    Raised when a program calls a function of MindIO, and tft cannot carry out the call.

    `Refused` is a direct subclass of `Exception`, because programs for the library MindIO expect a
    plain `Exception`.
    """


# Any: `value` is not yet checked, and may have any type
def number(function: str, name: str, value: Any, least: int, most: int) -> int:
    """
    Check that `value` is a whole number from `least` to `most`, and return it.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise Refused(
            f"{function}: {name} must be a number from {least} to {most}, but is {value!r}"
        )
    return value


def flag(function: str, name: str, value: Any) -> bool:  # Any: `value` is not yet checked
    """
    Check that `value` is True or False, and return it.
    """
    if not isinstance(value, bool):
        raise Refused(f"{function}: {name} must be True or False, but is {value!r}")
    return value


def text(function: str, name: str, value: Any) -> str:  # Any: `value` is not yet checked
    """
    Check that `value` is a string that is not empty, and return it.
    """
    if not isinstance(value, str) or not value:
        raise Refused(f"{function}: {name} must be a string, but is {value!r}")
    return value


def function(caller: str, value: Any) -> Callable[..., Any]:  # Any: `value` is not yet checked
    """
    Check that `value` can be called, and return it. Raises `TypeError`, as the library MindIO does,
    if it cannot be called.
    """
    if not callable(value):
        raise TypeError(f"{caller} takes a function, not {value!r}")
    return value  # type: ignore[no-any-return]  # of any signature


def rank_and_world(function: str, rank: Any, world: Any, *, least: int = 0) -> None:
    """
    Check the size of the world and the rank of this process. `world` must be a number from 1 to
    100,000, and `rank` must be a number from `least` to `world` - 1.
    """
    number(function, "world_size", world, 1, LARGEST_WORLD)
    number(function, "rank", rank, least, world - 1)


def port(function: str, value: Any) -> int:
    """
    Check that `value` is a port number from 1024 to 65534, and return it.

    Ports below 1024 need privileges. Port 65535 is not allowed, because tft also uses the port
    after the given one.
    """
    return number(function, "port", value, LOWEST_PORT, HIGHEST_PORT - 1)


def address(function: str, name: str, value: Any) -> str:
    """
    Check that `value` is an IP address or a host name that can be resolved. Return the IP address.
    """
    if not isinstance(value, str) or not value:
        raise Refused(f"{function}: {name} must be an address or a host name, but is {value!r}")
    try:
        found = socket.gethostbyname(value) if ":" not in value else value
        if ipaddress.ip_address(found).is_unspecified:
            raise Refused(
                f"{function}: {name} is {value}, which other machines cannot reach: give the "
                "address of one network interface"
            )
    except OSError as error:
        raise Refused(
            f"{function}: the host name {value} cannot be resolved on this machine ({error})"
        ) from None
    except ValueError:
        raise Refused(f"{function}: {name} {value!r} is not an address") from None
    return found


def step(function: str, value: Any, *, least: int) -> int:
    """
    Check that `value` is the number of a training step, `least` or more. Return it.
    """
    return number(function, "step", value, least, LARGEST_STEP)


def error(value: Any, code: Any) -> ReportState:
    """
    Check the arguments of `tft_report_error`. Return the `ReportState`, which is the reason why a
    rank has left its training loop.

    `value` must be a `ReportState` or the value of one. `code`, the error code of a device, must be
    a string of at most 15 characters.
    """
    states = [state.value for state in ReportState]
    if isinstance(value, ReportState):
        value = value.value
    if isinstance(value, bool) or value not in states:
        raise Refused(
            f"tft_report_error: error_type must be the value of a ReportState, 0 to {max(states)}, "
            f"but is {value!r}"
        )
    if not isinstance(code, str) or len(code) > LONGEST_ERROR_CODE:
        raise Refused(
            f"tft_report_error: error_code must be a string of at most {LONGEST_ERROR_CODE} "
            f"characters, but is {code!r}"
        )
    return ReportState(value)


def ranks(function: str, name: str, value: Any, world: int) -> tuple[int, ...]:
    """
    Check that `value` is a list of ranks, and return the ranks, sorted. The list must not be empty,
    each rank must be from 0 to `world` - 1, and no rank may occur twice.
    """
    if not isinstance(value, list | tuple) or not value:
        raise Refused(f"{function}: {name} must be a list of ranks, but is {value!r}")
    for each in value:
        number(function, f"a rank of {name}", each, 0, world - 1)
    if len(set(value)) < len(value):
        raise Refused(f"{function}: {name} has a rank more than once: {list(value)}")
    return tuple(sorted(value))


def groups(value: Any) -> Sequence[Mapping[str, Any]]:
    """
    Check the argument `replica_info` of the function `tft_set_optimizer_replica`, and return it.

    `value` must be a list of dicts with the necessary keys. Each dict describes a group of ranks
    that hold copies of optimizer state.
    """
    call = "tft_set_optimizer_replica"
    if not isinstance(value, list) or not 1 <= len(value) <= MOST_GROUPS:
        raise Refused(
            f"{call}: replica_info must be a list of 1 to {MOST_GROUPS} groups, but is "
            f"{value!r:.80}"
        )
    for place, group in enumerate(value):
        if not isinstance(group, dict):
            raise Refused(f"{call}: group {place} must be a dict, but is {group!r:.80}")
        missing = {"rank_list", "replica_cnt", "replica_shift"} - group.keys()
        if missing:
            raise Refused(f"{call}: group {place} has no {', '.join(sorted(missing))}")
    return value
