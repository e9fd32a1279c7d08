"""
Functions that describe the reports that the controller has received, and its commands, in plain
sentences. An operator reads these sentences in the timeline of a run (`tft replay`).

A message of an unknown kind is shown by its name and its fields, so a new kind of message needs no
change in this file.
"""

import signal
from collections.abc import Collection, Sequence
from dataclasses import fields
from typing import assert_never

from tft.core.job.commands import Command, Consult, JobOver, Tell
from tft.core.job.incident import Fault
from tft.protocol.messages import (
    ORDER_NAMES,
    Advised,
    Answered,
    Checkpointed,
    CheckpointFailed,
    Commit,
    End,
    EndNode,
    Exited,
    Faulted,
    Fetch,
    Finished,
    Freeze,
    Joined,
    Kill,
    NodeJoined,
    NodeLost,
    Noticed,
    PauseRequested,
    Position,
    RankOrder,
    Ready,
    Recall,
    Recalled,
    Refused,
    Regroup,
    Report,
    ResumeRequested,
    Save,
    Spawn,
    Spawned,
    Stop,
    StopRequested,
    StoreOpened,
    SwitchRequested,
    Trained,
)
from tft.sentences import ranks_of

Alike = (
    Answered | Joined | Ready | Spawned | Trained | Finished | Checkpointed | CheckpointFailed
    | Exited | Faulted
)  # fmt: skip
"""The kinds of reports that many ranks send at about the same time. The timeline shows reports of
the same kind in one line."""

DONE: dict[str, str] = {
    "freeze": "froze", "stop": "left the loop", "compare": "reported its digests", "load": "loaded the checkpoint",
    "fetch": "copied and verified", "restore": "restored a copy", "regroup": "formed the groups",
    "reload": "loaded a checkpoint of its own", "rebuild": "rebuilt the wrapper", "rollback": "rolled back", "resume": "entered the loop",
    "hold": "stopped at the boundary", "check": "passed the check", "release": "went on", "save": "saved",
    "commit": "committed the checkpoint", "complete": "completed", "end": "left the job",
}  # fmt: skip
"""Maps the name of each order to the words with which the timeline says that a rank has carried out
the order."""
SAID_OTHERWISE = frozenset(
    {
        "fault", "rank_gone", "rank_faulted", "stopped", "strategy_chosen", "stalled", "order_failed",
        "incident_closed", "job_ends", "claim_refused",
    }
)  # fmt: skip
"""Names of events that the job machine writes to the log (command `Tell`). The timeline leaves
these events out, because other lines of the timeline show the same facts."""
BESIDE_THE_POINT = frozenset(
    {"epoch", "incident", "round", "to", "incarnations", "rank", "incarnation", "at"}
)
"""The names of the fields of messages that the timeline leaves out, because its lines show these
fields in other ways, or because operators do not need them."""
LONG = 100
"""The maximum number of characters that the timeline shows of one long text, such as the value of a
field of a message."""


# ---------------------------------------------------------------- equal reports of many ranks


def alike(messages: Sequence[Alike]) -> str:
    """
    Return the predicate of a sentence about one or more ranks, such as `trained step 5`. The ranks
    have sent reports of the same kind (`messages`). The caller puts the numbers of the ranks in
    front of the predicate.
    """
    message = messages[0]
    match message:
        case Answered(order=order):
            return DONE.get(order, f"answered {order}")
        case Spawned(pid=pid):
            return f"started as process {pid}" if len(messages) == 1 else "started"
        case Joined():
            return "called tft.init"
        case Ready():
            return "became ready"
        case Trained(step=step):
            return f"trained step {step}"
        case Finished(step=step):
            return f"finished with step {step}"
        case Checkpointed(step=step, directory=directory):
            return f"completed the checkpoint of step {step} in {directory}"
        case CheckpointFailed(step=step, why=why):
            return f"could not write the checkpoint of step {step}: {why}"
        case Exited(code=code):
            return f"left with code {code}"
        case Faulted(kind=kind, step=step):
            return f"saw a {kind} fault in step {step}"
        case _:
            assert_never(message)


def particulars(messages: Sequence[Alike]) -> str:
    """
    Return a text with the details in which the reports of several ranks may differ, such as the
    step whose state each rank holds. The text is empty for kinds of reports whose details the
    timeline does not show.
    """
    answers = [message for message in messages if isinstance(message, Answered)]
    match messages[0]:
        case Answered(order="freeze" | "hold"):
            return _each("standing at", [(a.rank, _where(a.position)) for a in answers])
        case Answered(order="stop" | "compare" | "fetch" | "restore" | "load" | "reload"):
            return _each("holding", [(a.rank, _held(a)) for a in answers])
        case Answered(order="save"):
            return f"{sum(len(answer.files) for answer in answers)} files"
        case Faulted():
            faulted = [message for message in messages if isinstance(message, Faulted)]
            return _each("", [(each.rank, each.summary) for each in faulted])
        case _:
            return ""


def _each(verb: str, values: Sequence[tuple[int, str]]) -> str:
    different = dict.fromkeys(value for _, value in values)
    if len(different) == 1:
        return f"{verb} {values[0][1]}".strip()
    told = [f"{value} ({ranks_of([r for r, v in values if v == value])})" for value in different]
    return f"{verb} {', '.join(told)}".strip()


def _held(answer: Answered) -> str:
    held = "no complete state" if answer.held is None else f"step {answer.held}"
    copies = ", ".join(str(step) for step in answer.backups)
    return f"{held} and copies of {copies}" if copies else held


def _where(position: Position) -> str:
    updating = f", in the update of step {position.step + 1}" if position.window else ""
    return f"step {position.step}{updating}"


# ---------------------------------------------------------------- single reports


def sentence(message: Report) -> str:
    """
    Return a sentence for a report that the timeline shows in a line of its own, and not together
    with reports of other ranks.
    """
    match message:
        case NodeJoined(node=node, host=host, ranks=ranks):
            return f"node {node} ({host}) is there for {ranks_of(ranks)}"
        case StoreOpened(host=host, port=port):
            return f"the rendezvous store is open at {host}:{port}"
        case Exited(rank=rank, code=code, position=position):
            how = _signal(-code) if code < 0 else f"exit code {code}"
            stopped = ", while it was stopped" if message.stopped else ""
            stacks = "; it wrote its stacks" if message.stack else ""
            return f"rank {rank} died ({how}{stopped}), standing at {_where(position)}{stacks}"
        case Recalled(node=node, lost=lost, rank=rank, local_state=kept):
            what = f"steps {', '.join(map(str, sorted(kept)))}" if kept else "no step"
            return f"node {node} has kept the rank-local state of rank {rank} on lost node {lost}: {what}"
        case NodeLost(node=node, why=why):
            return f"node {node} is lost: {why}"
        case Faulted(rank=rank, kind=kind, step=step, summary=summary):
            return f"rank {rank} has a {kind} fault in step {step}{_spread(message)}: {summary}"
        case Answered(rank=rank, order=order, failure=str(why)):
            return f"rank {rank} could not {order}: {why}"
        case Answered(rank=rank, verdict=verdict, finding=finding):
            return f"rank {rank} does not pass the check ({verdict}): {finding}"
        case StopRequested(why=why):
            return f"the end of the job is requested: {why}"
        case PauseRequested(why=why, check=check):
            return f"a pause is requested{check and f', with the check {check}'}: {why}"
        case ResumeRequested(why=why):
            return f"a paused job is to go on: {why}"
        case SwitchRequested(ranks=ranks, why=why) if ranks:
            return f"{ranks_of(ranks)} are to be taken over by other processes: {why}"
        case SwitchRequested(why=why):
            return f"no rank is to be taken over any more: {why}"
        case Noticed(rank=rank, kind=kind, evidence=evidence):
            return (
                f"rank {rank} is seen to have a {kind} fault{_spread(message)}: {_short(evidence)}"
            )
        case Advised():
            return _advice(message)
        case _:
            return plainly(message)


def _advice(message: Advised) -> str:
    veto = f", and never {' or '.join(message.veto)}" if message.veto else ""
    if message.wait:
        return f"the recovery plugins ask for {message.wait:.1f} s{veto}: {message.why}"
    return f"the recovery plugins advise {message.strategy or 'nothing else'}{veto}: {message.why}"


def _spread(message: Faulted | Noticed) -> str:
    """
    Return a text that says how far the damage of a fault may reach beyond the present state of the
    faulty rank. The damage may have spread to other ranks, and to copies of steps after
    `not_after`. The text is empty if the report says neither.
    """
    spread = ", which may have spread" if message.polluted else ""
    older = f", after step {message.not_after}" if message.not_after is not None else ""
    return f"{spread}{older}"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # Python has no name for a real-time signal
        return f"signal {number}"


def plainly(message: object) -> str:
    """
    Return a message as text: the rank, the name of the message's class, and the fields that have a
    value (except those in `BESIDE_THE_POINT`).
    """
    rank = getattr(message, "rank", None)
    who = "" if rank is None else f"rank {rank}: "
    return f"{who}{type(message).__name__}{_facts(message)}"


def _facts(message: object) -> str:
    told = [
        f"{field.name} {_short(value)}"
        for field in fields(message)  # type: ignore[arg-type] # every message is a dataclass
        if field.name not in BESIDE_THE_POINT
        and (value := getattr(message, field.name)) not in ("", (), {}, None, False)
    ]
    return f" ({', '.join(told)})" if told else ""


def _short(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= LONG else f"{text[:LONG]}…"


# ---------------------------------------------------------------- commands


def commanded(commands: Sequence[Command]) -> list[str]:
    """
    Return a sentence for each command of the job machine. Commands that differ only in their ranks
    share one sentence.
    """
    merged: dict[str, list[int]] = {}
    for command in commands:
        text, ranks = _command(command)
        if text:
            merged.setdefault(text, []).extend(ranks)
    return [text.replace("{who}", ranks_of(ranks)) for text, ranks in merged.items()]


def _command(command: Command) -> tuple[str, Collection[int]]:
    """
    Return a sentence for a command, and the ranks that the command is about. The sentence contains
    `{who}` where the caller must insert the ranks. The sentence is empty if another line of the
    timeline already shows the command.
    """
    match command:
        case Tell(event=event, facts=facts):
            told = ", ".join(f"{name} {_short(value)}" for name, value in facts.items())
            return ("" if event in SAID_OTHERWISE else f"told: {event} ({told})"), ()
        case JobOver(result=result, code=code, why=why):
            return f"the job is over: {result}, exit code {code}: {why}", ()
        case Consult(offers=offers):
            possible = [offer.strategy for offer in offers if offer.why_not is None]
            return f"ask the recovery plugins: {' or '.join(possible)}?", ()
        case Spawn(node=node, cause=cause):
            again = f" as incarnation {command.incarnation}" if command.incarnation else ""
            return f"start {{who}} on node {node}{again}: {cause}", (command.rank,)
        case Kill(node=node, cause=cause):
            return f"end {{who}} on node {node}: {cause}", (command.rank,)
        case Recall(node=node, lost=lost, ranks=ranks):
            return f"node {node}: report the rank-local state of {{who}} on lost node {lost}", ranks
        case EndNode(why=why):
            return f"all agents: leave: {why}", ()
        case Refused(rank=rank, pid=pid, why=why):
            return f"refuse process {pid} as rank {rank}: {why}", ()
        case Fetch(step=step, transfers=transfers):
            parts = [f"{t.shard} from {ranks_of([s.rank for s in t.sources])}" for t in transfers]
            return f"{{who}}: copy {', '.join(parts)} as of step {step}", command.to
        case Freeze(cause=cause):
            return f"freeze {{who}}{cause and ': '}{cause}", command.to
        case Stop(finish=finish):
            return f"stop {{who}} at the end of step {finish}", command.to
        case Regroup(step=step, without=without):
            left_out = f", without {ranks_of(without)}" if without else ""
            heading = f"for step {step}" if step else "for a step that the ranks find themselves"
            return f"form groups of {{who}} {heading}{left_out}", command.to
        case Save(shards=shards, local_state=local_state, directory=directory):
            parts = [
                *shards,
                *([f"the rank-local state of {ranks_of(local_state)}"] if local_state else []),
            ]
            what = "".join(f"{part}, " for part in parts)
            return f"{{who}}: save {what}your own rank-local state under {directory}", command.to
        case Commit(files=files, directory=directory):
            return f"{{who}}: commit {len(files)} files as {directory}", command.to
        case End(code=code, why=why):
            return f"{{who}}: leave with code {code}: {why}", command.to
        case _:
            return _other(command)


def _other(command: object) -> tuple[str, Collection[int]]:
    if isinstance(command, RankOrder):
        return f"{ORDER_NAMES[type(command)]} {{who}}{_facts(command)}", command.to
    return plainly(command), ()


# ---------------------------------------------------------------- words in sentences


def fault_in_words(fault: Fault) -> str:
    """
    Return a text with the kind, rank and step of a fault, without the evidence for the fault.
    """
    where = "no one rank" if fault.rank is None else f"rank {fault.rank}"
    return f"{fault.kind} at {where} in step {fault.step}"


def span(seconds: float) -> str:
    """
    Return a duration of `seconds` seconds as text, such as `1.50 s` or `120 ms`.
    """
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.001 else "less than 1 ms"
