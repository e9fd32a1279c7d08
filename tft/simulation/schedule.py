"""
Schedules: everything on which one simulated run depends. A schedule is drawn from a seed or written
by hand.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from tft.core.job.policy import STRATEGIES, Policy
from tft.protocol.messages import OrderName

Topology = Literal["replicated", "strided", "two kinds", "unsharded"]

When = Literal["time", "phase", "order", "state"]
"""The moment at which a mishap happens: a time, a rank that reaches a phase of a step, a rank
that begins to carry out an order, or the job machine that enters a state."""

What = Literal[
    "kill", "node", "memory", "corruption", "numeric", "network", "software", "hang", "stop",
    "fail", "slow", "impostor", "partition", "broker", "controller", "deposed", "store", "pollute",
    "bad batch", "notice", "late", "agent", "beats", "unkillable", "unreadable", "request", "pause",
    "resume", "switch", "advise", "come", "context", "flip",
]  # fmt: skip

ASKED = ("request", "pause", "resume", "switch", "advise", "come")
"""The kinds of mishaps that are not faults: requests, and nodes that join the job."""

FAULTS: tuple[tuple[What, float], ...] = (
    ("kill", 6), ("node", 1), ("memory", 2), ("numeric", 1), ("network", 2),
    ("software", 0.6), ("hang", 1.5), ("stop", 1), ("fail", 2), ("slow", 1), ("impostor", 1),
    ("partition", 0.7), ("broker", 0.7), ("controller", 1.2), ("deposed", 0.7), ("store", 0.7),
    ("corruption", 1), ("pollute", 1), ("bad batch", 0.6), ("notice", 2), ("late", 0.7),
    ("agent", 0.7), ("beats", 0.5), ("unkillable", 0.7), ("unreadable", 0.5), ("context", 1),
)  # fmt: skip
"""The kinds of faults, each with its relative frequency."""

ANY = -1
"""The target of a mishap that happens to the first rank that carries out a certain order."""
EXCEPTIONS = ("memory", "corruption", "numeric", "network", "software", "pollute", "bad batch")
"""Faults that happen only in the training loop of a rank and end with an exception there."""
NODES = ("node", "partition", "agent", "beats")
"""The kinds of mishaps (injected faults) that happen to a node."""
GLOBAL = (
    *NODES, "broker", "controller", "deposed", "store", "impostor", "late", "unkillable", "unreadable",
)  # fmt: skip
"""The kinds of mishaps (injected faults) that do not depend on the phase of the step in which a
rank is."""
PHASES = ("forward", "all-reduce", "window", "between")
"""The phases of a step at which a mishap may happen, except those of its tail (see `TAIL`)."""
TAIL = ("tail", "tail", "average", "averaged", "averaged", "end")
"""The phases of the tail (the part of a step after its update window): its beginning, the
collective in it, the part after the collective, and the end of the step. A phase that is listed
twice is drawn twice as often."""
FLIPPED = ("repairing", "clearing", "choosing", "awaiting", "rebuilding", "freezing")
"""The states of the job machine in which a silent corruption may happen. In these states the copies
of the ranks have been compared or are about to be compared."""
ORDERS: tuple[OrderName, ...] = (
    "freeze", "stop", "stop", "load", "fetch", "fetch", "restore", "regroup", "regroup", "rebuild",
    "rollback", "resume", "resume", "hold", "check", "release", "save", "save", "commit", "commit",
    "complete", "end",
)  # fmt: skip
"""The orders at which a mishap may happen. An order that is listed twice is drawn twice as often,
because more can go wrong in it."""
RARE = ("load", "fetch", "restore", "save", "commit")
"""Orders that only a few ranks get, or that are rarely sent. A mishap at such an order happens to
the first rank that gets it."""
AT_ONCE = ("freeze", "hold", "release")
"""The orders at which no rank can fail or be slow, because the control thread carries them out."""
OPENING = ("awaiting", "repairing", "rebuilding", "rolling back", "resuming", "healthy")
"""The states that a job passes through at its start. A fault that is drawn for one of these states
mostly waits until the job enters the state a second time, in an incident."""
STATES = (
    *OPENING, "freezing", "clearing", "choosing", "dumping", "exiting", "pausing", "paused", "ended",
)  # fmt: skip
NOTICED = (
    "straggler", "straggler", "straggler", "straggler", "memory", "corruption", "network", "node",
    "hang", "process", "numeric", "software",
)  # fmt: skip
"""The kinds of faults that an observer outside the rank can report. The most frequent one is a
straggler, a slow rank."""
CHECKS = ("", "", "pass", "isolate", "end")
"""The kinds of pauses. The kind is the verdict that the health check of the pause returns for one
rank. A pause with an empty kind has no check and lasts until a request ends it."""


QUICK = Policy(
    flap_window=60.0,
    advice=1.0,
    patience=3.0,
    freeze=1.5,
    grace=0.5,
    kill=3.0,
    stop=3.0,
    repair=6.0,
    regroup=4.0,
    rebuild=4.0,
    gather=30.0,
    join=8.0,
    hold=6.0,
    tail=6.0,
    pause=4.0,
    check=4.0,
    save=6.0,
    leave=1.5,
    wind_up=6.0,
    first_step=8.0,
    stall_floor=2.5,
    stall_factor=8.0,
    warming=2.0,
    node_silence=4.0,
)
"""The limits of a job in which a step takes a fraction of a second, in seconds. `gather` is 3600
seconds by default; here it is 30 seconds, which is longer than any node takes to join, but well
below the time in which the job must be over after the last mishap (`invariants.BOUND`). The job
waits for `gather` seconds for a node that was lost before the node had reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """
    How the network disturbs messages: delay, loss, doubling and reordering.
    """

    delay: float = 0.005
    """The longest delay of a message in seconds. `loss`, `double` and `reorder` are the
    probabilities that a message is lost, arrives twice, or overtakes others."""
    loss: float = 0.0
    double: float = 0.0
    reorder: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mishap:
    """
    One fault or one request in a run. A mishap happens at most once.
    """

    what: What
    target: int = 0
    """The rank, or `ANY` for the first rank that carries out the order. For the kinds in
    `NODES`, for `come` and for `store`, the node. For `request`, the signal."""
    when: When = "time"
    name: str = ""
    """The name of the phase, the order or the state. For `fail` and `slow`, the name of the
    order."""
    number: int = 0
    """For a phase, the step in which the mishap happens. For an order or a state, how often the
    order or the state must have occurred before. For `switch`, a number above 0 also withdraws the
    request after `lasting` seconds."""
    delay: float = 0.0
    """The time in seconds from the order or the state to the mishap. If `when` is `time`, the time
    in seconds from the start of the run."""
    by: float = 0.0
    """Seconds after the start of the run at which the mishap happens even if its moment has not
    come. If `by` is 0, the mishap waits for its moment without a limit."""
    lasting: float = 1.0
    """Seconds until the target comes back, for `node`, `partition`, `beats` and `broker`. Other
    kinds scale their effect with this number (see `Harm` and `Mishaps`)."""
    until: str = ""
    """The state of the job machine at which the effect of the mishap ends, if the machine enters
    this state before `lasting` seconds are over."""
    loud: bool = True
    """For `node`: True if the launcher reports the loss of the node at once, False if the
    controller has to notice the loss by itself."""
    kind: str = ""
    """For `flip`, the part that is corrupted: `model` or `settings`. For `notice`, the kind of the
    fault that is noticed. For `pollute`, the kind of the fault that an observer notices; with an
    empty text, a rank notices the wrong numbers. For `pause`, the verdict of the health check. For
    `switch`, a text that is not empty requests that the next rank moves too. For `advise`, the
    strategy. For `partition`, `deaf` or `mute`: messages are lost in one direction only. For
    `deposed`, `deaf`: the controller receives no messages either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """
    Everything on which one run of a simulated cluster depends.
    """

    seed: int
    """The seed of the random generator, which decides all that the schedule leaves open, such as
    the duration of each action."""
    world: int
    nodes: int = 1
    topology: Topology = "replicated"
    copies: int = 2
    """For shards that are not on all ranks: the number of ranks that hold each of these shards."""
    steps: int = 10
    policy: Policy = QUICK
    strategies: tuple[str, ...] = STRATEGIES
    derives: bool = True
    """True if the adaptor can make the rank-local state of a rank from the number of a step.
    `strategies` are the strategies that the adaptor supports."""
    spares: tuple[int, ...] = ()
    """For each spare node, which starts without ranks: the number of ranks for which the node has
    room."""
    room: int = 0
    """The number of further ranks for which each node that is not a spare has room."""
    checkpoints: int = 0
    """The number of steps between two periodic checkpoints. If it is 0, no periodic checkpoints are
    written."""
    own: int = 0
    """The number of steps between two checkpoints that the script writes without tft and can load
    by itself. If it is 0, the script writes no such checkpoints."""
    tail: float = 0.0
    """The longest duration of a step's tail on a rank, in seconds. The tail is the part of a step
    after the update window. If it is 0, a step ends with its update window."""
    averages: bool = False
    """True if the tail of each step (the part after the update window) contains a collective."""
    broadcasts: bool = False
    """True if the rank with the lowest number does not wait for the other ranks in the collective
    of the tail, like the source of a broadcast. The tail is the part of a step after its update
    window."""
    breaks: bool = True
    """True if a collective raises an exception when a rank of its process group is lost. False if
    the collective then hangs."""
    resume: int = 0
    """The step of the checkpoint from which the job starts. If it is 0, the job starts without a
    checkpoint."""
    backups: int = 0
    """The number of earlier steps of which each rank keeps a copy of its state."""
    slices: int = 0
    """The number of slices into which each shard is cut. In each step the ranks compare digests of
    one slice. If it is 0, no slices are compared."""
    skew: float = 0.0
    """The largest difference between the clock of a node and that of the controller, in seconds."""
    standbys: int = 0
    """The number of standbys: controllers that wait for the leader to fall silent."""
    trouble: Trouble = Trouble()
    mishaps: tuple[Mishap, ...] = ()

    def placement(self) -> dict[int, tuple[int, ...]]:
        """
        Return the ranks of each node, by the number of the node. Spare nodes have no ranks.
        """
        edges = [self.world * node // self.nodes for node in range(self.nodes + 1)]
        places = {n: tuple(range(edges[n], edges[n + 1])) for n in range(self.nodes)}
        return places | {self.nodes + extra: () for extra in range(len(self.spares))}

    def spare(self, node: int) -> int:
        """
        Return the number of further ranks for which a node has room.
        """
        return self.room if node < self.nodes else self.spares[node - self.nodes]

    def column(self, rank: int) -> tuple[int, ...]:
        """
        Return the model replica of a rank: the ranks that together hold one copy of the whole
        state. These ranks leave the job and come back to it together. Return an empty tuple when
        every rank holds everything.
        """
        if self.topology == "replicated":
            return ()
        parts = max(1, self.world // self.copies)
        return tuple(other for other in range(self.world) if other // parts == rank // parts)

    def groups(self) -> Mapping[str, tuple[int, ...]]:
        """
        Return the ranks that hold each shard, by the name of the shard.
        """
        everyone = tuple(range(self.world))
        parts = max(1, self.world // self.copies)
        match self.topology:
            case "replicated":
                return {"dense": everyone}
            case "strided":
                return {"dense": everyone} | _strided("optimizer", everyone, parts)
            case "two kinds":
                half = max(1, parts // 2)
                return _strided("dense", everyone, half) | _strided("expert", everyone, parts)
            case "unsharded":
                return {"small": everyone[:2]} | _strided("optimizer", everyone, parts)

    def shards(self, rank: int) -> tuple[str, ...]:
        """
        Return the names of the shards that a rank holds.
        """
        return tuple(name for name, ranks in self.groups().items() if rank in ranks)


def _strided(name: str, ranks: tuple[int, ...], parts: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.{part}": ranks[part::parts] for part in range(parts)}


# ---------------------------------------------------------------- drawing a schedule


def draw(seed: int) -> Schedule:
    """
    Draw the schedule that belongs to a seed.
    """
    rng = Random(f"schedule {seed}")
    world = _world(rng)
    nodes = min(world, rng.choice((1, 2, 2, 3, 4, 4, 6, 8)))
    steps = rng.randint(4, 12)
    spares = tuple(rng.randint(1, 8) for _ in range(rng.choice((0, 0, 1, 2))))
    count = rng.choices(range(6), (4, 11, 22, 26, 21, 16))[0]
    mishaps = [_mishap(rng, world, nodes, steps, first=not n) for n in range(count)]
    if rng.random() < 0.2:
        mishaps = [*(_during(rng, mishap) for mishap in mishaps), _pause(rng, world)]
        if rng.random() < 0.3:
            mishaps.append(_pause(rng, world))
    for draws, often in ((_request, 0.12), (_request, 0.03), (_resume, 0.05), (_advice, 0.05)):
        if rng.random() < often:
            mishaps.append(draws(rng))
    for extra in range(len(spares)):
        if rng.random() < 0.3:
            mishaps.append(_asked(rng, "come", nodes + extra, "", STATES))
    # draw the switch with a generator of its own, so that all other draws of a seed are the same as
    # before switches were added
    own = Random(f"switch {seed}")
    if own.random() < 0.15:
        mishaps.append(_switch(own, world))
    drawn = Schedule(
        seed=seed,
        world=world,
        nodes=nodes,
        topology=rng.choice(("replicated", "strided", "strided", "two kinds", "unsharded")),
        copies=rng.choice((1, 2, 2, 2, 2, 3, 4)),
        steps=steps,
        policy=_policy(rng),
        strategies=STRATEGIES if rng.random() < 0.85 else ("retry", "recover", "dump"),
        derives=rng.random() < 0.6,
        spares=spares,
        room=rng.choice((0, 0, 0, 2)),
        checkpoints=rng.choice((0, 0, 0, 2, 3)),
        backups=rng.choice((0, 0, 0, 1, 2)),
        breaks=rng.random() < 0.6,
        resume=rng.choice((0, 0, 0, 0, 2)),
        skew=rng.choice((0.0, 0.0, 0.3, 5000.0)),
        standbys=rng.choice((0, 0, 1, 2)),
        trouble=_trouble(rng),
        mishaps=tuple(mishaps),
    )
    drawn = _that_reloads(drawn, Random(f"own {seed}"))
    drawn = _with_tails(drawn, Random(f"tail {seed}"))
    drawn = _with_flips(drawn, Random(f"flip {seed}"))
    return _with_slices(drawn, Random(f"slice {seed}"))


def _with_tails(schedule: Schedule, rng: Random) -> Schedule:
    """
    Give the steps of 40 % of the schedules a tail (a part after the update window), and move about
    60 % of the mishaps at phases into the tail. The generator `rng` is used only here. So the
    schedules without a tail are the same as before tails were added.
    """
    if rng.random() >= 0.4:
        return schedule
    mishaps = [
        replace(mishap, name=rng.choice(TAIL))
        if mishap.when == "phase" and rng.random() < 0.6
        else mishap
        for mishap in schedule.mishaps
    ]
    return replace(
        schedule,
        tail=rng.choice((0.03, 0.1, 0.4)),
        averages=rng.random() < 0.6,
        broadcasts=rng.random() < 0.4,
        mishaps=tuple(mishaps),
    )


def _with_flips(schedule: Schedule, rng: Random) -> Schedule:
    """
    Give 30 % of the schedules one or two silent corruptions, which no exception reports. If a
    schedule has five or more faults, a corruption replaces the last fault. The generator `rng` is
    used only here, so all other draws stay the same.
    """
    if rng.random() >= 0.3:
        return schedule
    return _flipped(schedule, [_flip(rng, schedule) for _ in range(rng.choice((1, 1, 2)))])


def _flipped(schedule: Schedule, flips: Iterable[Mishap]) -> Schedule:
    mishaps = list(schedule.mishaps)
    for flip in flips:
        faults = [mishap for mishap in mishaps if mishap.what not in ASKED]
        if len(faults) > 4:
            mishaps.remove(faults[-1])
        mishaps.insert(0, flip)
    return replace(schedule, mishaps=tuple(mishaps))


def _with_slices(schedule: Schedule, rng: Random) -> Schedule:
    """
    Let the ranks of 15 % of the schedules compare digests of slices (parts of the shards). Most of
    these schedules get one or two silent corruptions in a step of the loop, and more steps in which
    to find them. The generator `rng` is used only here. So all other schedules are the same as
    before slices were added.
    """
    if rng.random() >= 0.15:
        return schedule
    schedule = replace(
        schedule,
        slices=rng.choice((2, 3)),
        steps=rng.choice((schedule.steps, 16, 24)),
        backups=rng.choice((0, 2, 8, 8)),
        policy=replace(schedule.policy, corruption=rng.choice(("majority", "end", "continue"))),
    )
    phases = (*PHASES, *TAIL) if schedule.tail else PHASES
    rank = rng.randrange(schedule.world)
    flips = [
        Mishap(
            what="flip",
            target=rank if rng.random() < 0.5 else rng.randrange(schedule.world),
            when="phase",
            name=rng.choice(phases),
            number=rng.randint(1, schedule.steps),
            lasting=rng.choice((0.5, 1.001, 2.002)) + rng.choice((0, 1, 2)),
            kind=rng.choice(("model", "settings")),
        )
        for _ in range(rng.choice((0, 1, 1, 2)))
    ]
    return _flipped(schedule, flips)


def _flip(rng: Random, schedule: Schedule) -> Mishap:
    kind = rng.choice(("model", "settings"))
    when: When = rng.choice(("phase", "phase", "time", "order", "state"))
    target, lasting = rng.randrange(schedule.world), rng.choice((0.5, 1.001, 2.002))
    flip = Mishap(what="flip", target=target, when=when, lasting=lasting, kind=kind)
    match when:
        case "phase":
            phases = (*PHASES, *TAIL) if schedule.tail else PHASES
            number = rng.randint(1, schedule.steps)
            return replace(flip, name=rng.choice(phases), number=number)
        case "time":
            return replace(flip, delay=0.5 + 0.3 * schedule.steps * rng.random())
        case "order":
            name = rng.choice(("fetch", "fetch", "fetch", "stop", "restore", "regroup", "freeze"))
            target = ANY if name in RARE else target
            return replace(flip, name=name, number=rng.choice((0, 1)), target=target)
        case _:
            number = rng.choice((0, 1))
            return replace(flip, name=rng.choice(FLIPPED), number=number, delay=_shortly(rng))


def _that_reloads(schedule: Schedule, rng: Random) -> Schedule:
    """
    Let the ranks of 20 % of the schedules keep checkpoints on their own, mostly with a single copy
    of each shard. Move half of the mishaps at orders to the order `reload`. The generator `rng` is
    used only here. So all other schedules are the same as before such checkpoints were added.
    """
    if rng.random() >= 0.2:
        return schedule
    few = rng.random() < 0.7
    mishaps = [
        replace(mishap, name="reload", target=ANY, number=0)
        if mishap.when == "order" and rng.random() < 0.5
        else mishap
        for mishap in schedule.mishaps
    ]
    return replace(
        schedule,
        own=rng.choice((1, 2, 2, 3)),
        copies=1 if few else schedule.copies,
        backups=0 if few else schedule.backups,
        checkpoints=0 if few else schedule.checkpoints,
        mishaps=tuple(mishaps),
    )


def _world(rng: Random) -> int:
    kind = rng.random()
    if kind < 0.42:
        return rng.randint(2, 15)
    if kind < 0.71:
        return rng.randint(16, 24)
    return 48 if rng.random() < 0.9 else rng.randint(49, 64)


def _policy(rng: Random) -> Policy:
    enable = list(STRATEGIES)
    if rng.random() < 0.4:
        enable = [strategy for strategy in enable if rng.random() < 0.7]
    return replace(
        QUICK,
        enable=frozenset(enable),
        max_incidents=rng.choice((1, 2, 100, 100, 100, 100, 100)),
        flaps=rng.choice((1, 2, 5, 5, 5)),
        replace="node" if rng.random() < 0.2 else "process",
        spread_savers=rng.random() < 0.3,
        skip_batch=rng.random() < 0.3,
        advised=rng.random() < 0.2,
        respawns=rng.choice((1, 3, 3)),
        attempts=rng.choice((2, 3)),
    )


def _trouble(rng: Random) -> Trouble:
    if rng.random() < 0.5:
        return Trouble(delay=rng.choice((0.002, 0.005, 0.05)))
    return Trouble(
        delay=rng.choice((0.005, 0.02, 0.1)),
        loss=rng.choice((0.0, 0.02, 0.1)),
        double=rng.choice((0.0, 0.05, 0.2)),
        reorder=rng.choice((0.0, 0.05, 0.3)),
    )


def _mishap(rng: Random, world: int, nodes: int, steps: int, *, first: bool) -> Mishap:
    """
    Draw a fault. The `first` fault of a schedule mostly happens while no incident is open. Later
    faults often happen while an incident is handled.
    """
    what: What = rng.choices([w for w, _ in FAULTS], [often for _, often in FAULTS])[0]
    target = rng.randrange(nodes if what in NODES else world)
    lasting, loud = rng.choice((0.5, 1.0, 2.0, 6.0)), rng.random() < 0.7
    when = _when(rng, what, first=first)
    match when:
        case "time":
            name, number, delay = "", 0, 0.3 * steps * rng.random()
        case "phase":
            phases = PHASES[:3] if what in EXCEPTIONS else PHASES
            name, number, delay = rng.choice(phases), rng.randint(1, steps), 0.0
        case "order":
            name, number, delay = rng.choice(ORDERS), rng.choice((0, 1, 1)), _shortly(rng)
            if name in RARE:
                target, number = ANY, rng.choice((0, 0, 1))
            if what in ("fail", "slow"):
                name, delay = "stop" if name in AT_ONCE else name, 0.0
        case "state":
            name, number, delay = rng.choice(STATES), rng.choice((0, 1)), _shortly(rng)
            if name in OPENING and rng.random() < 0.7:
                number = 1
    until = ""
    if what in ("node", "partition") and rng.random() < 0.3:
        until, lasting = rng.choice(STATES), rng.choice((6.0, 12.0))
    return Mishap(
        what=what, target=target, when=when, name=name, number=number, delay=delay,
        by=0.0 if when == "time" else 0.6 + 0.3 * steps * rng.random(), lasting=lasting, until=until,
        loud=loud, kind=_kind(rng, what),
    )  # fmt: skip


def _kind(rng: Random, what: What) -> str:
    match what:
        case "notice":
            return rng.choice(NOTICED)
        case "pollute":
            return rng.choice(("", "", *NOTICED))
        case "partition":
            return rng.choice(("", "deaf", "mute"))
        case "deposed":
            return rng.choice(("", "deaf"))
        case _:
            return ""


def _during(rng: Random, mishap: Mishap) -> Mishap:
    """
    With probability 1/2, move a mishap to one of the states `pausing` and `paused`, since a job is
    seldom paused. Exceptions, failures and delays of orders stay where they are.
    """
    if mishap.what in (*EXCEPTIONS, "fail", "slow") or rng.random() < 0.5:
        return mishap
    return replace(
        mishap, when="state", name=rng.choice(("pausing", "paused")), number=0, delay=_shortly(rng)
    )


def _when(rng: Random, what: What, *, first: bool) -> When:
    if what in ("fail", "slow"):
        return "order"
    if what in EXCEPTIONS:
        return "phase"
    if first and rng.random() < 0.85:
        return "time" if what in GLOBAL else rng.choice(("time", "phase", "phase"))
    if what in GLOBAL:
        return rng.choice(("time", "state", "state"))
    return rng.choices(("time", "phase", "order", "state"), (2, 3, 3, 3))[0]


def _shortly(rng: Random) -> float:
    return rng.choice((0.0, 0.001, 0.05, 0.5)) * rng.random()


def _request(rng: Random) -> Mishap:
    return _asked(rng, "request", rng.choice((0, 2, 15)), "", STATES)


def _pause(rng: Random, world: int) -> Mishap:
    return _asked(rng, "pause", rng.randrange(world), rng.choice(CHECKS), ("healthy", *STATES))


def _resume(rng: Random) -> Mishap:
    return _asked(rng, "resume", 0, "", STATES)


def _switch(rng: Random, world: int) -> Mishap:
    return _asked(
        rng, "switch", rng.randrange(world), rng.choice(("", "two")), ("healthy", *STATES)
    )


def _advice(rng: Random) -> Mishap:
    return _asked(rng, "advise", 0, rng.choice(("", *STRATEGIES)), STATES)


def _asked(rng: Random, what: What, target: int, kind: str, states: Sequence[str]) -> Mishap:
    lasting = rng.choice((0.05, 0.5, 2.0, 10.0))
    if rng.random() < 0.4:
        delay = 1.0 + 3.0 * rng.random()
        return Mishap(what=what, target=target, delay=delay, lasting=lasting, kind=kind)
    return Mishap(
        what=what, target=target, when="state", name=rng.choice(states),
        number=rng.choice((0, 0, 1)), delay=_shortly(rng), lasting=lasting, kind=kind,
    )  # fmt: skip
