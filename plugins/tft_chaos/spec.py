"""
Parses and checks the argument of `--chaos`, `ACTION:TARGET[,key=value...]`:

    kill:rank=2,step=30,phase=update
    kill:ranks=0+2,step=12
    raise:rank=1,step=12,kind=memory
    kill:broker,step=20
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn, TypeVar, assert_never, get_args

from tft.errors import UsageError
from tft.spi import OrderName

Phase = Literal[
    "forward", "backward", "collective", "update", "between", "tail", "evaluation", "repair"
]
FaultName = Literal["memory", "network", "numeric", "bug"]
Part = Literal["param", "exp_avg", "exp_avg_sq", "master", "gradient", "buffer"]


@dataclass(frozen=True, slots=True)
class Kill:
    """
    The action `kill`: send SIGKILL."""


@dataclass(frozen=True, slots=True)
class Stop:
    """
    The action `stop`: send SIGSTOP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """
    The action `hang`: block the training thread for ever."""

    gil: bool
    """True if the blocked thread keeps the GIL, so that no other thread of the process can run
    Python code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raise:
    """
    The action `raise`: raise an exception in the training loop."""

    kind: FaultName
    """The kind of fault that the exception stands for, or `bug` for a bug in the user's code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bitflip:
    """
    The action `bitflip`: flip bits of one tensor of the rank, and raise no error.
    """

    part: Part
    """Says which tensor of a parameter is changed: the parameter itself, its gradient, its master
    weight, or a part of its optimizer state. The value `buffer` means a buffer of the model
    instead."""
    tensor: int | str | None = None
    """The number or the name of the parameter or buffer. None means the first one that the rank
    has."""
    element: int | None = None
    """The index of the element to change, in row-major order. None means the element with the
    largest absolute value."""
    bit: int | None = None
    """The number of the highest bit that flips, where bit 0 is the least significant bit. None
    means the highest bit of the mantissa."""
    bits: int = 1
    """The number of bits of the element that flip: the bit with the number `bit` and the bits
    directly below that bit."""
    period: int | None = None
    """The distance between two successive elements whose bits flip. The same bits flip in each of
    these elements. None means that only the bits of one element flip."""
    period_in_bytes: bool = False
    """True if `period` is in bytes, not in elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """
    The action `slow`: make every forward pass slower, from the step of the spec on."""

    factor: float
    """The factor by which a forward pass takes longer."""


Action = Kill | Stop | Hang | Raise | Bitflip | Slow


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """
    The target of a spec: the processes of these ranks. All of them get the fault at the same time.
    """

    ranks: tuple[int, ...]
    """One rank or several different ranks, in the order of the spec."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """
    The target of a spec: a process of tft that has no rank, such as the broker.
    """

    name: str
    """The name of the process in `pids/NAME.pid`, such as `broker`, `controller`, `agent-1` or
    `store-0`."""
    node: int
    """The node whose agent sends the signal (SIGKILL or SIGSTOP) to the process."""


Target = Ranks | Process


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """
    One parsed `--chaos` argument: which fault to make, where and when.
    """

    text: str
    action: Action
    target: Target
    step: int
    """The first step at which the spec makes a fault."""
    phase: Phase
    """The part of the step in which the fault is made. It has no meaning if the target is a
    `Process`."""
    count: int
    """The number of faults that the spec makes in all: one in each step from `step` on. In phase
    `repair`, it is instead one fault each time that the rank gets an order of the kind `order`."""
    order: OrderName
    """For a fault of phase `repair`: the kind of order from the controller, such as `rebuild`. The
    fault happens just before the rank carries out an order of this kind. In other phases the field
    has no meaning."""


_BITS = 64
"""The number of bits of an element of the largest type that a tensor can have."""

T = TypeVar("T")

_PHASES: Mapping[str, Phase] = {name: name for name in get_args(Phase)}
_IN_USER_CODE: Mapping[str, Phase] = {
    name: phase for name, phase in _PHASES.items() if phase not in ("between", "tail", "repair")
}
_KINDS: Mapping[str, FaultName] = {name: name for name in get_args(FaultName)}
_PARTS: Mapping[str, Part] = {name: name for name in get_args(Part)}
_ORDERS: Mapping[str, OrderName] = {
    "stop": "stop", "load": "load", "fetch": "fetch", "restore": "restore", "regroup": "regroup",
    "reload": "reload", "rebuild": "rebuild", "rollback": "rollback", "save": "save", "commit": "commit",
}  # fmt: skip
"""The orders before which a fault of phase `repair` can be made. These are the orders that a
training thread carries out, because chaos makes its faults on the training thread."""


def parse(text: str) -> Spec:
    """
    Parse one `--chaos` argument.

    Raises `UsageError` with a message that names the mistake and the allowed values.
    """
    name, _, rest = text.partition(":")
    aim, *pairs = rest.split(",")
    keys = _Keys(text, pairs)
    action = _action(name, keys)
    target = _target(aim, keys)
    if isinstance(target, Process) and not isinstance(action, Kill | Stop):
        keys.refuse(f"'{name}' acts inside a rank; '{aim}' can only be killed or stopped")
    if isinstance(target, Ranks) and len(target.ranks) > 1 and isinstance(action, Slow):
        keys.refuse("'slow' has no moment that several ranks could share: give it once per rank")
    phase = _phase(name, action, keys) if isinstance(target, Ranks) else "forward"
    repair = phase == "repair"
    if repair and isinstance(target, Ranks) and len(target.ranks) > 1:
        keys.refuse("phase 'repair' takes one rank, because not every rank gets every order")
    spec = Spec(
        text=text,
        action=action,
        target=target,
        step=keys.whole("step", default=0 if repair else 1, least=0 if repair else 1),
        phase=phase,
        count=1 if isinstance(action, Slow) else keys.whole("count", default=1, least=1),
        order=keys.choice("order", _ORDERS, default="regroup") if repair else "regroup",
    )
    keys.end()
    return spec


def _action(name: str, keys: "_Keys") -> Action:
    match name:
        case "kill":
            return Kill()
        case "stop":
            return Stop()
        case "hang":
            return Hang(gil=keys.choice("gil", {"held": True}, default=False))
        case "raise":
            return Raise(kind=keys.choice("kind", _KINDS))
        case "bitflip":
            return _bitflip(keys)
        case "slow":
            return Slow(factor=keys.factor("factor"))
        case _:
            keys.refuse(
                f"the action '{name}' is not one of kill, raise, hang, stop, bitflip and slow"
            )


def _bitflip(keys: "_Keys") -> Bitflip:
    part = keys.choice("target", _PARTS)
    name = keys.text("tensor")
    element = keys.optional("element", least=0)
    bit = keys.optional("bit", least=0, most=_BITS - 1)
    bits = keys.optional("bits", least=1, most=_BITS) or 1
    period, in_bytes = keys.period("period")
    if bit is not None and bits > bit + 1:
        keys.refuse(
            f"'bits' is '{bits}', but the bits are counted from 'bit' downwards, and there are "
            f"{bit + 1} from bit {bit} to bit 0"
        )
    if period == 1 and element is not None and not in_bytes:
        keys.refuse("'period=1' flips bits of every element: leave 'element' out")
    return Bitflip(
        part=part,
        tensor=int(name) if name is not None and name.isdecimal() else name,
        element=element,
        bit=bit,
        bits=bits,
        period=period,
        period_in_bytes=in_bytes,
    )


def _target(aim: str, keys: "_Keys") -> Target:
    name, _, number = aim.partition("=")
    if name == "agent" and number.isdecimal():
        return Process(name=f"agent-{int(number)}", node=int(number))
    if name == "rank" and number.isdecimal():
        return Ranks(ranks=(int(number),))
    if name == "ranks" and all(part.isdecimal() for part in number.split("+")):
        ranks = tuple(int(part) for part in number.split("+"))
        if len(set(ranks)) < len(ranks):
            keys.refuse(f"the target '{aim}' names a rank twice")
        return Ranks(ranks=ranks)
    match aim:
        case "broker" | "controller":
            return Process(name=aim, node=0)
        case "store":
            return Process(name="store-0", node=0)
        case _:
            keys.refuse(
                f"the target '{aim}' is not one of rank=R, ranks=R+R, broker, controller, agent=N and "
                "store"
            )


def _phase(name: str, action: Action, keys: "_Keys") -> Phase:
    """
    Return the phase of a spec. Raises `UsageError` if the phase does not suit the action.

    Bits of the state are flipped only between two steps, when the state is complete. Bits of a
    gradient are flipped only in the backward pass, where the gradient exists. Only a forward pass
    can be made slower. A bug in the user's code can only occur while that code runs.
    """
    match action:
        case Bitflip(part="gradient"):
            only: Phase = "backward"
        case Bitflip():
            only = "between"
        case Slow():
            only = "forward"
        case Raise(kind="bug"):
            return keys.choice("phase", _IN_USER_CODE, default="forward")
        case Kill() | Stop() | Hang() | Raise():
            return keys.choice("phase", _PHASES, default="forward")
        case _:
            assert_never(action)
    return keys.choice("phase", {only: only}, default=only)


class _Keys:
    """
    The `key=value` pairs of one spec. Each method that returns the value of a key removes the pair,
    so that the method `end` finds the pairs that no other method has asked for.
    """

    def __init__(self, text: str, pairs: Sequence[str]) -> None:
        self._text = text
        self._values: dict[str, str] = {}
        self._asked: list[str] = []
        for pair in pairs:
            key, equals, value = pair.partition("=")
            if not equals or not value:
                self.refuse(f"'{pair}' should be key=value")
            if key in self._values:
                self.refuse(f"'{key}' is given twice")
            self._values[key] = value

    def choice(self, key: str, allowed: Mapping[str, T], default: T | None = None) -> T:
        """
        Return the object that `allowed` has for the value of `key`. Return `default` if the key is
        not given. Raises `UsageError` if `allowed` does not contain the value, or if the key is not
        given and there is no default.
        """
        value = self._take(key)
        if value is None and default is not None:
            return default
        if value is None or value not in allowed:
            self._refuse_value(key, value, " or ".join(allowed))
        return allowed[value]

    def whole(self, key: str, default: int, least: int) -> int:
        """
        Return the value of `key`, which must be a whole number, `least` or more. Return `default`
        if the key is not given.
        """
        number = self.optional(key, least)
        return default if number is None else number

    def optional(self, key: str, least: int, most: int | None = None) -> int | None:
        """
        Return the value of `key`, which must be a whole number from `least` to `most`. Return None
        if the key is not given. If `most` is None, there is no upper limit.
        """
        value = self._take(key)
        if value is None:
            return None
        if not value.isdecimal() or int(value) < least or (most is not None and int(value) > most):
            until = "on" if most is None else f"to {most}"
            self._refuse_value(key, value, f"a whole number from {least} {until}")
        return int(value)

    def text(self, key: str) -> str | None:
        """
        Return the value of `key`, which may be any text. Return None if the key is not given.
        """
        return self._take(key)

    def period(self, key: str) -> tuple[int | None, bool]:
        """
        Return the value of `key`, which must be a distance, and whether the distance is in bytes.
        `32` is a distance in elements, and `128B` is a distance in bytes. Return None and False if
        the key is not given.
        """
        value = self._take(key)
        if value is None:
            return None, False
        length = value.removesuffix("B")
        if not length.isdecimal() or int(length) < 1:
            self._refuse_value(
                key, value, "a whole number of elements from 1 on, or of bytes with a B: 128B"
            )
        return int(length), value.endswith("B")

    def factor(self, key: str) -> float:
        """
        Return the value of `key`, which must be a number greater than 1. The key must be given.
        """
        value = self._take(key)
        if value is None or not re.fullmatch(r"[0-9]+(\.[0-9]+)?", value) or float(value) <= 1.0:
            self._refuse_value(key, value, "a number greater than 1")
        return float(value)

    def end(self) -> None:
        """
        Raise `UsageError` if the spec has a key that no method has asked for.
        """
        for key in self._values:
            self.refuse(
                f"'{key}' cannot be used in this spec; possible keys are "
                f"{', '.join(sorted(self._asked))}"
            )

    def refuse(self, why: str) -> NoReturn:
        """
        Raise `UsageError` with the reason `why`, because the spec cannot be carried out.
        """
        raise UsageError(f"--chaos {self._text}: {why}")

    def _take(self, key: str) -> str | None:
        self._asked.append(key)
        return self._values.pop(key, None)

    def _refuse_value(self, key: str, value: str | None, allowed: str) -> NoReturn:
        said = f"is '{value}', but" if value is not None else "is missing: it"
        self.refuse(f"'{key}' {said} should be {allowed}")
