"""
A story and all results of the judgement as one text: events, commands with all their fields, open
orders and deadlines, and the report of each incident.

    {"job": ...}                          the arguments of the machine
    > 0.1 node.0/0 1 NodeJoined {...}     an event: time, sender, number, message
    < Spawn {...}                         a command
    = awaiting 0.0; owed Spawn; ...       the state of the machine after it, if it has changed
    ! {...}                               the report of an incident
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, fields
from typing import Any

import msgspec

from tft.core.job.commands import Command, Tell
from tft.core.job.events import Event, Received
from tft.core.job.incident import Fault
from tft.core.job.incident_report import incident_report
from tft.core.job.machine import Machine
from tft.protocol.codec import from_plain, to_plain
from tft.replay.recording import OWN, Opened

DIGITS = 5
"""Of a second: a moment is told as exactly as that."""
UNSAID: tuple[object, ...] = ("", 0, None, [], {}, False)
"""What goes without saying in a command."""


def judged(opened: Opened, events: Iterable[Event]) -> str:
    """
    Return the transcript of these events. Raises the exceptions of the machine.
    """
    machine = opened.machine()
    first = json.dumps(msgspec.to_builtins(opened, order="deterministic"))
    return "\n".join([first, *_turns(machine, events), *_reports(machine), ""])


def read(text: str) -> tuple[Opened, list[Event]]:
    """
    Return the events of a transcript, without the results.
    """
    first, *rest = text.splitlines()
    opened = msgspec.convert(json.loads(first), Opened)
    return opened, [_event(line) for line in rest if line.startswith(">")]


def exact(event: Event) -> Event:
    """
    Return the event as it is read again, with rounded times.
    """
    return _event(_happened(event))


def _turns(machine: Machine, events: Iterable[Event]) -> Iterator[str]:
    stood = ""
    for event in events:
        commands = machine.handle(event)
        machine.check()
        yield _happened(event)
        yield from (f"< {_said(command)}" for command in commands)
        stands = _stands(machine)
        if stands != stood:
            yield f"= {stands}"
        stood = stands


# ---------------------------------------------------------------- events of a story


def _happened(event: Event) -> str:
    at = round(event.at, DIGITS)
    if isinstance(event, Received):
        kind, plain = to_plain(event.message)
        said = {
            field.name: _rounded(plain[field.name])
            for field in fields(event.message)
            if getattr(event.message, field.name) not in (field.default, _made(field))
        }
        return f"> {at} {event.sender} {event.number} {kind} {json.dumps(said)}"
    body = _rounded(
        {
            field.name: msgspec.to_builtins(getattr(event, field.name))
            for field in fields(event)
            if field.name != "at"
            and getattr(event, field.name) not in (field.default, _made(field))
        }
    )
    return f"> {at} - 0 {type(event).__name__} {json.dumps(body)}"


def _event(line: str) -> Event:
    _, at, sender, number, kind, text = line.split(" ", 5)
    body = json.loads(text)
    if kind in OWN:
        return msgspec.convert({**body, "at": float(at)}, OWN[kind])
    # Any: a transcript has only messages that a controller accepts
    message: Any = from_plain(kind, body)
    return Received(at=float(at), sender=sender, number=int(number), message=message)


# ---------------------------------------------------------------- results of the judgement


def _said(command: Command) -> str:
    if isinstance(command, Tell):
        return f"tell {command.event} {_text(command.facts)}"
    return f"{type(command).__name__} {_text(msgspec.to_builtins(command, str_keys=True))}"


def _stands(machine: Machine) -> str:
    owed = [f"{type(o).__name__} {list(getattr(o, 'to', ()))}" for o in machine.outstanding()]
    parts = {
        "members": sorted(machine.members),
        "nodes": sorted(machine.nodes),
        "refused": sorted(machine.refused),
        "owed": sorted(owed),
        "due": _rounded(machine.next_deadline()),
        "checked": machine.checked,
        "last step": machine.last_step,
    }
    number = f"{machine.incident.number}.{machine.incident.round}"
    return f"{machine.state} {number} {_text(parts)}"


def _reports(machine: Machine) -> Iterator[str]:
    incidents = {each.number: each for each in (*machine.incidents, machine.incident)}
    for incident in incidents.values():
        report = incident_report(incident, _nobody_knows)
        more = {
            "base": incident.decision.base,
            "failed": incident.decision.failed,
            "attempts": incident.decision.attempts,
        }
        yield f"! {_text({**report, **more})}"


def _made(field: "Field[Any]") -> object:  # Any: a field of any type
    """
    Return the default of a field that is created anew for each object.
    """
    return MISSING if field.default_factory is MISSING else field.default_factory()


def _text(facts: dict[str, Any]) -> str:  # Any: JSON
    return json.dumps({k: _rounded(v) for k, v in facts.items() if v not in UNSAID}, default=sorted)


def _rounded(value: Any) -> Any:  # Any: JSON
    match value:
        case float():
            return round(value, DIGITS)
        case dict():
            return {name: _rounded(each) for name, each in value.items()}
        case list() | tuple():
            return [_rounded(each) for each in value]
        case _:
            return value


def _nobody_knows(fault: Fault) -> float | None:
    return None
