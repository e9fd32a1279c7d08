"""
What the environment of a MindSpore job asks for: MindSpore's own variables and those of MindIO and
MindCluster. Read before MindSpore is imported, which aborts the interpreter over some of what people
write there and silently switches nothing on over the rest.

MindSpore reads `MS_ENABLE_TFT` in two ways: it splits it into items, and everywhere else it looks for
`TTP:1` and the like as they stand, spaces and case included. The normal form means the same to both.
"""

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
_PORTS = range(1024, 65536)
"""What MindIO takes."""
_FOR_MINDSPORE = "MINDIO_FOR_MINDSPORE"
_AVAILABILITY = "HIGH_AVAILABILITY"

_IMPLIES_TTP = ("UCE", "ARF")
"""Whoever asks for these gets a last checkpoint where they fail, without asking for it."""
_SWITCHES = ("TTP", "UCE", "HCCE", "ARF", "TRE", "TSP", "RSC", "ATO")
_NEED_MINDIO = frozenset({"TTP", "UCE", "HCCE", "ARF", "TSP"})
_BESIDE_ATO = frozenset({"TTP", "UCE", "ARF", "TRE", "TSP"})
"""What MindSpore refuses beside ATO."""
_VALUES = {
    **dict.fromkeys(_SWITCHES, (r"[01]", "0 or 1")),
    "TRE": (r"[012]", "0, 1 or 2"),
    "TRE_SNAPSHOT_STEPS": (r"[1-9][0-9]*", "a whole number of 1 or more"),
    "ATO_THRESHOLD": (r"[1-9][0-9]+", "a whole number of 10 or more"),
    "ATO_PATH": (r".+\.json", "the path of a .json file"),
}
"""By key: what may stand behind it, and that in words."""
_SEARCHED = re.compile(rf"({'|'.join(_SWITCHES)}):[12]")
"""What MindSpore searches the whole text for."""

_STRATEGIES = ("migrate", "scale_out", "retry", "recover", "scale_in", "dump")
"""In the order in which tft tries them."""
_OF_FEATURES = {"TTP": "dump", "UCE": "retry", "HCCE": "retry", "TRE": "retry", "ARF": "recover"}
_OF_NAMES = {
    "dump": ("dump",),
    "retry": ("retry",),
    "recover": ("recover",),
    "recover-in-place": ("recover",),
    "elastic-training": ("scale_in", "scale_out"),
    "exit": (),
}
"""What MindCluster's names mean. `exit` is what is left when nothing is enabled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """
    What is asked for.
    """

    features: Mapping[str, str] = field(default_factory=dict)
    """Of `MS_ENABLE_TFT`: what is switched on, and what belongs to it, each with its value."""
    unknown: tuple[str, ...] = ()
    """Of `MS_ENABLE_TFT`: items that are not known here. MindSpore may know them: they stay as they are."""
    for_mindspore: bool = False
    """MindIO is told that its framework is MindSpore."""
    address: str | None = None
    port: int | None = None
    named: tuple[str, ...] = ()
    """Of `HIGH_AVAILABILITY`."""

    @property
    def normal(self) -> str:
        """
        `MS_ENABLE_TFT` as both of MindSpore's readers understand it; empty where nothing is on.
        """
        items = [f"{key}:{value}" for key, value in self.features.items()]
        items.extend(self.unknown)
        return f"{{{','.join(items)}}}" if items else ""

    @property
    def strategies(self) -> tuple[str, ...]:
        """
        The strategies of tft that this enables, as `--enable` takes them.
        """
        enabled = {_OF_FEATURES[key] for key in self.features if key in _OF_FEATURES}
        enabled.update(strategy for name in self.named for strategy in _OF_NAMES[name])
        return tuple(strategy for strategy in _STRATEGIES if strategy in enabled)

    @property
    def last_checkpoints(self) -> bool:
        """
        Whether high availability is on: last checkpoints are written, and can be gone on from.
        """
        return "dump" in self.strategies

    @property
    def needs_mindio(self) -> bool:
        """
        Whether MindSpore wants a controller of MindIO's for what is on.
        """
        return not _NEED_MINDIO.isdisjoint(self.features)

    def controller(self) -> tuple[str, int]:
        """
        Where the controller of MindIO's is to listen. Raises `UsageError` where that is not said.
        """
        for name, value in ((_ADDRESS, self.address), (_PORT, self.port)):
            if value is None:
                raise UsageError(
                    f"{name} is not set; {ENABLE} switches on what needs a controller, and expected "
                    f"is where it listens: {_ADDRESS}, an address of the node of rank 0, and {_PORT}"
                )
        assert self.address is not None  # both were looked at above
        assert self.port is not None
        return self.address, self.port


def read(variables: Mapping[str, str]) -> Environment:
    """
    What these variables ask for. Raises `UsageError`, with the variable, what it is and what is
    expected of it.
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
"""Items that this process has logged."""


def settle() -> Environment:
    """
    Read the environment of this process, and put the normal form in the place of what MindSpore would
    misunderstand. To be called before MindSpore is imported. Items that are not known here are logged, once
    in a process. Raises `UsageError`.
    """
    asked = read(os.environ)
    for item in asked.unknown:
        if item not in _logged:
            _logged.add(item)
            log.warning(
                "item_not_known", variable=ENABLE, item=item, known=", ".join(_VALUES),
                why="it is left to MindSpore as it is, and asks for nothing of tft",
            )  # fmt: skip
    if ENABLE in os.environ:
        os.environ[ENABLE] = asked.normal
    return asked


def place() -> tuple[int, int]:
    """
    The rank of this process and the number of ranks, as msrun or a tft agent has told them. What MindSpore
    asks for them where its own collectives are not begun is set to the same. Raises `UsageError`.
    """
    for rank, world in (("MS_NODE_ID", "MS_WORKER_NUM"), ("RANK", "WORLD_SIZE")):
        told = os.environ.get(rank, ""), os.environ.get(world, "")
        if all(text.isdecimal() for text in told):
            os.environ["RANK_ID"], os.environ["RANK_SIZE"] = told
            return int(told[0]), int(told[1])
    raise UsageError(
        "this process has not been told which rank it is: start it with msrun or tft run, which set "
        "MS_NODE_ID and MS_WORKER_NUM, or RANK and WORLD_SIZE"
    )


def _features(text: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """
    What is switched on, and the items that are not known.
    """
    given: dict[str, str] = {}
    unknown: list[str] = []
    for item in _items(text):
        key, value = _item(text, item)
        if key not in _VALUES:
            unknown.append(item)
            continue
        if given.setdefault(key, value) != value:
            raise _wrong(
                text, f"{key} is both {given[key]} and {value}: expected is one of the two"
            )
    if any(given.get(key) == "1" for key in _IMPLIES_TTP):
        given["TTP"] = "1"
    found = {key: given[key] for key in _VALUES if given.get(key, "0") != "0"}
    beside = sorted(_BESIDE_ATO & set(found))
    if "ATO" in found and beside:
        raise _wrong(text, f"ATO cannot be on beside {', '.join(beside)}: switch one of them off")
    return found, tuple(dict.fromkeys(unknown))


def _items(text: str) -> list[str]:
    """
    The items between the braces, which may be missing. Spaces part items as commas do: MindSpore's
    search finds both.
    """
    bare = text.strip().removeprefix("{").removesuffix("}")
    return [item for item in re.split(r"[,\s]+", re.sub(r"\s*:\s*", ":", bare)) if item]


def _item(text: str, item: str) -> tuple[str, str]:
    key, colon, value = item.partition(":")
    key = key.upper()
    if not colon:
        raise _wrong(text, f"{item!r} has no value: expected is {key}:1, or {key}:0")
    if key not in _VALUES:
        if found := _SEARCHED.search(item):
            raise _wrong(
                text,
                f"{item!r} is not known, and MindSpore finds {found[0]} in it: write {found[0]}",
            )
        return key, value
    pattern, expected = _VALUES[key]
    if ":" in value or not re.fullmatch(pattern, value):
        raise _wrong(text, f"{item!r} has another value than {expected}")
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
                f"{_AVAILABILITY} is {text!r}, in which {name!r} is not known: expected are {known}, "
                "with commas between"
            )
    return tuple(dict.fromkeys(names))
