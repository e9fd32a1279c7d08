"""
Reads the environment variables by which a MindSpore job requests features of fault tolerance. They
are variables of MindSpore, MindIO and MindCluster.

This module checks the variables before MindSpore is imported. For some common mistakes in their
values, MindSpore aborts the interpreter. For other mistakes it silently enables no feature.

MindSpore reads `MS_ENABLE_TFT` in two ways. In one place it splits the value into items. Everywhere
else it searches the value for texts such as `TTP:1`, and then spaces and upper or lower case
matter. This module replaces the value by a normal form, which MindSpore understands in the same way
in all places.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address

import structlog

from tft.errors import UsageError

log = structlog.get_logger()

ENABLE = "MS_ENABLE_TFT"
_ADDRESS = "MS_TFT_IP"
_PORT = "MS_TFT_PORT"
_PORTS = range(1024, 65535)
"""The port numbers that can be given. MindIO accepts port 65535 too, but tft also uses the next
port."""
_FOR_MINDSPORE = "MINDIO_FOR_MINDSPORE"
_AVAILABILITY = "HIGH_AVAILABILITY"

_NUMERICS = "TFT_NUMERICS"
"""The variable with the settings of the plugin `tft_numerics`, which judges the loss and the norm
of the gradients of each step. `tft run --numerics` sets it."""
CHECKS, THRESHOLD = "check_for_global_norm", "global_norm_spike_threshold"
"""The keys of `monitor_config` in a YAML file of MindSpore Transformers: the first switches the
check of the norm of the gradients on, and the second is the largest allowed norm."""

_IMPLIES_TTP = ("UCE", "ARF")
"""The features that also switch on TTP: if such a feature cannot repair a fault, the job saves a
last checkpoint."""
_SWITCHES = ("TTP", "UCE", "HCCE", "ARF", "TRE", "TSP", "RSC", "ATO")
_NEED_MINDIO = frozenset({"TTP", "UCE", "HCCE", "ARF", "TSP"})
_BESIDE_ATO = frozenset({"TTP", "UCE", "ARF", "TRE", "TSP"})
"""The features that MindSpore does not accept together with the feature ATO."""
_VALUES = {
    **dict.fromkeys(_SWITCHES, (r"[01]", "0 or 1")),
    "TRE": (r"[012]", "0, 1 or 2"),
    "TRE_SNAPSHOT_STEPS": (r"[1-9][0-9]*", "a whole number of 1 or more"),
    "ATO_THRESHOLD": (r"[1-9][0-9]+", "a whole number of 10 or more"),
    "ATO_PATH": (r".+\.json", "the path of a .json file"),
}
"""Maps each key of `MS_ENABLE_TFT` to a regular expression for the allowed values, and a
description of these values for messages."""
_SEARCHED = re.compile(rf"({'|'.join(_SWITCHES)}):[12]")
"""The texts that MindSpore searches for in the whole value of `MS_ENABLE_TFT`."""

_STRATEGIES = ("migrate", "scale_out", "retry", "recover", "scale_in", "dump")
"""The strategies of tft, in the order in which tft tries them."""
_OF_FEATURES = {"TTP": "dump", "UCE": "retry", "HCCE": "retry", "TRE": "retry", "ARF": "recover"}
_OF_NAMES = {
    "dump": ("dump",),
    "retry": ("retry",),
    "recover": ("recover",),
    "recover-in-place": ("recover",),
    "elastic-training": ("scale_in", "scale_out"),
    "exit": (),
}
"""The strategies of tft for each name that MindCluster uses in `HIGH_AVAILABILITY`. The name `exit`
stands for no strategy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """
    The features and settings that the environment requests.
    """

    features: Mapping[str, str] = field(default_factory=dict)
    """The features that `MS_ENABLE_TFT` switches on, and their parameters. Maps the name of a
    feature or parameter to its value."""
    unknown: tuple[str, ...] = ()
    """The items of `MS_ENABLE_TFT` that tft does not know. MindSpore may know them, so they stay
    unchanged."""
    for_mindspore: bool = False
    """True if `MINDIO_FOR_MINDSPORE` declares MindSpore as the framework of MindIO."""
    address: str | None = None
    port: int | None = None
    named: tuple[str, ...] = ()
    """The names that `HIGH_AVAILABILITY` contains."""

    @property
    def normal(self) -> str:
        """
        The value of `MS_ENABLE_TFT` in a normal form, which MindSpore cannot misread. The value is
        empty if the variable contains no feature that is on, and no unknown item.
        """
        items = [f"{key}:{value}" for key, value in self.features.items()]
        items.extend(self.unknown)
        return f"{{{','.join(items)}}}" if items else ""

    @property
    def strategies(self) -> tuple[str, ...]:
        """
        The strategies of tft that the environment enables, by the names that `tft run --enable`
        takes.
        """
        enabled = {_OF_FEATURES[key] for key in self.features if key in _OF_FEATURES}
        enabled.update(strategy for name in self.named for strategy in _OF_NAMES[name])
        return tuple(strategy for strategy in _STRATEGIES if strategy in enabled)

    @property
    def last_checkpoints(self) -> bool:
        """
        True if high availability is on: then last checkpoints are written, and training can
        continue from them.
        """
        return "dump" in self.strategies

    @property
    def needs_mindio(self) -> bool:
        """
        True if MindSpore needs a MindIO controller for the features that are on.
        """
        return not _NEED_MINDIO.isdisjoint(self.features)

    def controller(self) -> tuple[str, int]:
        """
        Return the address and port at which the MindIO controller is to listen. Raises `UsageError`
        if one of them is not set.
        """
        for name, value in ((_ADDRESS, self.address), (_PORT, self.port)):
            if value is None:
                raise UsageError(
                    f"{name} is not set, but {ENABLE} enables features that need a controller: set "
                    f"{_ADDRESS} to an address of the node of rank 0, and {_PORT} to the port of "
                    "the controller"
                )
        # the loop above has checked that the address and the port are given
        assert self.address is not None
        assert self.port is not None
        return self.address, self.port


def read(variables: Mapping[str, str]) -> Environment:
    """
    Return the features and settings that the environment `variables` requests.

    Raises `UsageError` for an invalid value. The message has the name of the variable, its value
    and the expected value.
    """
    features, unknown = _features(variables.get(ENABLE, ""))
    return Environment(
        features=features,
        unknown=unknown,
        for_mindspore=_flag(variables, _FOR_MINDSPORE),
        address=_address(variables.get(_ADDRESS, "").strip()),
        port=_port(variables.get(_PORT, "").strip()),
        named=_named(variables.get(_AVAILABILITY, "")),
    )


_logged: set[str] = set()
"""The unknown items of `MS_ENABLE_TFT` that this process has logged already."""


def settle() -> Environment:
    """
    Read the environment of this process, and replace the value of `MS_ENABLE_TFT` by its normal
    form, which MindSpore cannot misunderstand. Return the requested features and settings.

    Call this function before MindSpore is imported. Each unknown item of `MS_ENABLE_TFT` is logged
    once in a process. Raises `UsageError` for an invalid value.
    """
    asked = read(os.environ)
    for item in asked.unknown:
        if item not in _logged:
            _logged.add(item)
            log.warning(
                "item_not_known", variable=ENABLE, item=item, known=", ".join(_VALUES),
                why="tft does not know the item; MindSpore handles the item itself",
            )  # fmt: skip
    if ENABLE in os.environ:
        os.environ[ENABLE] = asked.normal
    return asked


def norm_limit(monitor: Mapping[str, object], where: str) -> float | None:
    """
    Return the largest norm of the gradients that a `monitor_config` of MindSpore Transformers
    allows. Return None if the check of the norm is off. `monitor` is the content of
    `monitor_config`, and `where` is its place in the file, for messages.

    Raises `UsageError` for a value that cannot be used.
    """
    checks = monitor.get(CHECKS, False)
    if not isinstance(checks, bool):
        raise UsageError(f"{where}.{CHECKS} is {checks!r}; expected is True or False")
    if not checks:
        return None
    limit = monitor.get(THRESHOLD)
    number = isinstance(limit, int | float) and not isinstance(limit, bool)
    if not number or not 0 < float(str(limit)) < float("inf"):
        raise UsageError(
            f"{where}.{THRESHOLD} is {limit!r}; expected with {CHECKS} is a number larger than 0: "
            "train for some time first, and take a value above the norms of ordinary steps"
        )
    return float(str(limit))


def refuse_norms(limit: float) -> None:
    """
    Tell the plugin `tft_numerics` of this process to refuse updates whose gradients have a norm
    larger than `limit`. Other settings of the plugin are kept. If `tft run --numerics` has already
    set a limit, that limit is kept and `limit` is ignored.

    Call this function before the process joins the job.
    """
    asked = json.loads(os.environ.get(_NUMERICS) or '{"mode": "refuse", "spike": 0.0}')
    if asked.get("limit") is None:
        os.environ[_NUMERICS] = json.dumps({**asked, "limit": limit})


def place() -> tuple[int, int]:
    """
    Return the rank of this process and the number of ranks. Read them from the environment
    variables that a tft agent or msrun, MindSpore's launcher, has set.

    Also set `RANK_ID` and `RANK_SIZE` to these values, because MindSpore reads these variables if
    its own collectives are not initialised. Raises `UsageError` if the environment names no rank.
    """
    for rank, world in (("MS_NODE_ID", "MS_WORKER_NUM"), ("RANK", "WORLD_SIZE")):
        told = os.environ.get(rank, ""), os.environ.get(world, "")
        if all(text.isdecimal() for text in told):
            os.environ["RANK_ID"], os.environ["RANK_SIZE"] = told
            return int(told[0]), int(told[1])
    raise UsageError(
        "this process does not know its rank: start it with msrun or tft run, which set MS_NODE_ID "
        "and MS_WORKER_NUM, or RANK and WORLD_SIZE"
    )


def _features(text: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """
    Return the features that the value `text` of `MS_ENABLE_TFT` switches on, and the unknown items
    in it.
    """
    given: dict[str, str] = {}
    unknown: list[str] = []
    for item in _items(text):
        key, value = _item(text, item)
        if key not in _VALUES:
            unknown.append(item)
            continue
        if given.setdefault(key, value) != value:
            raise _wrong(text, f"{key} is given as {given[key]} and as {value}: give it once")
    if any(given.get(key) == "1" for key in _IMPLIES_TTP):
        given["TTP"] = "1"
    found = {key: given[key] for key in _VALUES if given.get(key, "0") != "0"}
    beside = sorted(_BESIDE_ATO & set(found))
    if "ATO" in found and beside:
        raise _wrong(
            text, f"ATO cannot be on together with {', '.join(beside)}: switch one of them off"
        )
    return found, tuple(dict.fromkeys(unknown))


def _items(text: str) -> list[str]:
    """
    Return the items between the braces of a value of `MS_ENABLE_TFT`. The braces may be missing.

    Items may be separated by commas or spaces, because MindSpore finds items in both cases when it
    searches the value.
    """
    bare = text.strip().removeprefix("{").removesuffix("}")
    return [item for item in re.split(r"[,\s]+", re.sub(r"\s*:\s*", ":", bare)) if item]


def _item(text: str, item: str) -> tuple[str, str]:
    key, colon, value = item.partition(":")
    key = key.upper()
    if not colon:
        raise _wrong(text, f"{item!r} has no value: write {key}:1 or {key}:0")
    if key not in _VALUES:
        if found := _SEARCHED.search(item):
            raise _wrong(
                text,
                f"{item!r} is unknown, although MindSpore finds {found[0]} in it: write {found[0]}",
            )
        return key, value
    pattern, expected = _VALUES[key]
    if ":" in value or not re.fullmatch(pattern, value):
        raise _wrong(text, f"{item!r} has an unknown value: expected is {expected}")
    return key, value


def _wrong(text: str, why: str) -> UsageError:
    return UsageError(f"{ENABLE} is {text!r}, in which {why}")


def _flag(variables: Mapping[str, str], name: str) -> bool:
    text = variables.get(name, "").strip()
    if text.lower() in ("1", "true"):
        return True
    if text.lower() in ("", "0", "false"):
        return False
    raise UsageError(f"{name} is {text!r}; expected is 1 or true, 0 or false")


def _address(text: str) -> str | None:
    if not text:
        return None
    try:
        return str(ip_address(text))
    except ValueError:
        raise UsageError(f"{_ADDRESS} is {text!r}; expected is an IP address") from None


def _port(text: str) -> int | None:
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) not in _PORTS:
        first, last = _PORTS[0], _PORTS[-1]
        raise UsageError(f"{_PORT} is {text!r}; expected is a port from {first} to {last}")
    return int(text)


def _named(text: str) -> tuple[str, ...]:
    names = tuple(name.strip().lower() for name in text.split(",") if name.strip())
    for name in names:
        if name not in _OF_NAMES:
            known = ", ".join(_OF_NAMES)
            raise UsageError(
                f"{_AVAILABILITY} is {text!r}, which contains the unknown word {name!r}: expected "
                f"are {known}, with commas between"
            )
    return tuple(dict.fromkeys(names))
