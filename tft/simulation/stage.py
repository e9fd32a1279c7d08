"""
Protocols for the parts of a simulated cluster, and the stage that holds all parts.

Each part gets the stage and finds the other parts through the stage. The protocols keep the modules
apart: a part imports the protocols here, and not the modules of parts that depend on it. The class
of a part explains its attributes and methods in full.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from tft.core.job.commands import Command, Consult, JobOver
from tft.core.job.events import Event
from tft.core.job.incident import Incident
from tft.core.job.machine import Machine
from tft.core.job.transitions import State
from tft.core.rank.machine import RankMachine
from tft.core.rank.protocol import Execute, Located, RankEvent
from tft.protocol.messages import (
    Advised,
    Beat,
    Commit,
    Fetch,
    Lead,
    Load,
    LocalStates,
    LocalStatesKept,
    Order,
    OrderName,
    RankOrder,
    Refused,
    Report,
    Restore,
    Verdict,
)
from tft.simulation.clock import Clock
from tft.simulation.disk import Disk
from tft.simulation.mail import Link, Mail, Network
from tft.simulation.outside import Outside
from tft.simulation.page import Page
from tft.simulation.process_state import Collectives, Life, Memory, Steps, TrainingThread
from tft.simulation.schedule import Mishap, Schedule
from tft.simulation.story import SharedStory
from tft.simulation.truth import Content, Truth, Written
from tft.simulation.work import NOTHING, Work

Seen = Counter[tuple[State, str]]
"""Counts of events by state of the job machine and kind of event."""


class ProcessPart(Protocol):
    """
    The attributes and methods of a rank's process that other parts of the simulation use.
    """

    stage: "Stage"
    node: "NodePart"
    rank: int
    incarnation: int
    pid: int
    page: Page
    rank_machine: RankMachine
    mail: Mail
    life: Life
    steps: Steps
    thread: TrainingThread
    memory: Memory
    collectives: Collectives
    group: "GroupPart | None"

    def held(self) -> int | None:
        """
        Return the step whose whole state is in memory. Return None when an update window is open or
        the state is incomplete.
        """

    def backups(self) -> tuple[int, ...]:
        """
        Return the steps of which the rank keeps a whole copy.
        """

    def standing(self) -> Located:
        """
        Return the position of the training thread, and whether it waits at the step gate (where
        orders hold a rank before an update).
        """

    def handle(self, event: RankEvent) -> None:
        """
        Give an event to the rank machine (the state machine that handles the orders of a rank), and
        carry out the commands that the rank machine returns.
        """

    def look_at_gate(self) -> None:
        """
        Let a training thread that waits at the step gate (where orders hold a rank before an
        update) go on, if its orders allow this. The thread then enters its update window, or leaves
        the loop.
        """

    def done(self, task: Execute | None, failure: str | None, work: Work = NOTHING) -> None:
        """
        Handle the end of an order on the training thread. `failure` is None if the thread has
        carried out the order; `work` is the result.
        """

    def at_work(self, task: Execute) -> bool:
        """
        Return whether a thread of this process still carries out the order `task`.
        """

    def shut_out(self, why: str) -> None:
        """
        Let the current order fail with a `ConnectionError`, because the training thread waits for
        an operation that can no longer complete. `why` is the text of the error.
        """

    def tell_done(self, task: Execute, failure: str | None, work: Work = NOTHING) -> None:
        """
        Tell the rank machine (the state machine that handles the orders of a rank) the result of an
        order.
        """

    def left(self) -> None:
        """
        Record that the training thread has left the loop and waits for orders.
        """

    def join(self) -> None:
        """
        Send the report `Joined`, as a script does when it calls `tft.init`.
        """

    def hear_lead(self, lead: Lead) -> None:
        """
        Handle a `Lead` message of the controller, which acknowledges reports.
        """

    def hear_refusal(self, refused: Refused) -> None:
        """
        Exit with the status `TAKEN` when the controller refuses this process, since another process
        holds its rank.
        """

    def hear(self, order: RankOrder, leader: int) -> None:
        """
        Handle an order for this rank that has arrived.
        """

    def hang(self, *, wholly: bool) -> None:
        """
        Stop the training thread where it is, as a hang does. With `wholly`, stop the control thread
        too.
        """

    def end(self) -> None:
        """
        End the process, whatever it is doing.
        """


class GroupPart(Protocol):
    """
    The attributes and methods of a process group that its members use.
    """

    members: dict[int, ProcessPart]

    def build(self, process: ProcessPart) -> None:
        """
        Let a member of the group begin to build the framework's wrapper of its model.
        """

    def enter(self, processes: list[ProcessPart], step: int) -> None:
        """
        Let members of the group begin to compute a step.
        """

    def close(self, processes: list[ProcessPart], step: int) -> None:
        """
        Finish the update of a step on some members of the group. Then begin the rest of the step
        (its tail), or the next step if there is no tail.
        """

    def leave(self, process: ProcessPart, *, loud: bool) -> None:
        """
        Remove a member that has ended or has closed its connections to the group. With `loud`,
        members that wait for other members may get an exception.
        """


class GroupsPart(Protocol):
    """
    The methods of the rendezvous stores that other parts of the simulation use.
    """

    def join(self, store: tuple[str, int], name: str, process: ProcessPart, members: int) -> None:
        """
        Let a process wait at a rendezvous store until `members` processes have joined under `name`.
        These processes then form a process group.
        """

    def leave(self, process: ProcessPart) -> None:
        """
        Remove a process from the rendezvous store at which it waits for the other members of its
        process group.
        """

    def close(self, store: tuple[str, int]) -> None:
        """
        Fail the current order of all processes that wait at a rendezvous store, because the store
        has closed.
        """


@dataclass(slots=True)
class Connection:
    """
    The connection of a node to the broker.
    """

    since: float
    """The virtual time at which the node was last connected."""
    link: Link = field(default_factory=Link)
    beats: bool = True
    """True when the heartbeats of the node reach the leader."""


@dataclass(slots=True)
class NodeStore:
    """
    The rendezvous store of a node.
    """

    address: tuple[str, int] | None = None
    """The host and the port of the rendezvous store. None while no store is open."""
    opened: float = 0.0
    """The virtual time at which the rendezvous store was opened, by the cluster's clock."""


class NodePart(Protocol):
    """
    The attributes and methods of a node that other parts of the simulation use.
    """

    number: int
    pid: int
    offset: float
    connection: Connection
    store: NodeStore
    alive: bool
    started: bool

    @property
    def now(self) -> float:
        """
        The time by this node's own clock, in seconds.
        """

    def start(self) -> None:
        """
        Start the agent: report the node, begin to send heartbeats, and open the rendezvous store.
        """

    def comes_back(self) -> None:
        """
        Start a new agent on this node, after the earlier agent has ended.
        """

    def say_status(self) -> None:
        """
        Send a heartbeat with the status of all ranks of this node.
        """

    def open_store(self) -> None:
        """
        Open the rendezvous store of this node.
        """

    def hosts(self, rank: int) -> bool:
        """
        Return whether a process of this rank may run on the node.
        """

    def process(self, rank: int) -> ProcessPart | None:
        """
        Return the living process that this node started for a rank. Return None when there is none.
        """

    def pages(self) -> dict[int, Page]:
        """
        Return the page (the shared memory) of each rank on this node.
        """

    def left_behind(self, rank: int) -> int:
        """
        Return the newest step whose data position was on the page (the shared memory) of `rank`
        when this node joined again after it was lost.
        """

    def admit(self, stranger: ProcessPart) -> None:
        """
        Add a process that was started on this node without an order.
        """

    def hear(self, order: Order, leader: int) -> None:
        """
        Handle an order for the agent or for ranks on this node.
        """

    def hear_lead(self, lead: Lead) -> None:
        """
        Handle a `Lead` message, with which the leading controller acknowledges reports, and pass
        the message to the processes.
        """

    def hear_agent(self, message: LocalStates | LocalStatesKept) -> None:
        """
        Handle a message of the agent of another node.
        """

    def kept(self, lost: int, rank: int) -> Mapping[int, str]:
        """
        Return the data positions, by step, that this node keeps for a rank of another node
        (`lost`).
        """

    def ended(self, process: ProcessPart, code: int, stack: str = "") -> None:
        """
        Handle the end of a process, as the kernel reports it.
        """

    def connected(self) -> None:
        """
        Reconnect the node to the broker, and send again all reports that are not acknowledged.
        """

    def beats_again(self) -> None:
        """
        Let the heartbeats of the node reach the controller again.
        """

    def vanish(self) -> None:
        """
        End the agent and every process that it started.
        """


class LeaderPart(Protocol):
    """
    The attributes and methods of a controller that other parts of the simulation use.
    """

    link: Link
    leads: bool
    epoch: int
    muffled: bool
    machine: Machine

    def hear_lead(self, lead: Lead) -> None:
        """
        Handle the message of a controller that leads.
        """

    def hear(self, sender: str, number: int, report: Report) -> None:
        """
        Handle a report of a rank, an agent or the launcher that has arrived.
        """

    def hear_beat(self, beat: Beat) -> None:
        """
        Handle the heartbeat of a node, and report stalls and lost nodes.
        """

    def advise(self, advised: Advised) -> None:
        """
        Handle the advice of a recovery plugin.
        """

    def die(self) -> None:
        """
        End the process of this controller.
        """


class HarmPart(Protocol):
    """
    What other parts of the simulation use of the class `Harm`. It carries out the mishaps (injected
    faults and requests).
    """

    meddled: bool

    def miscopied(self, process: ProcessPart) -> None:
        """
        Apply the silent corruption that waits for the end of a rank's fetch, if the rank has one.
        """

    def advice(self, consult: Consult) -> list[tuple[float, Advised]]:
        """
        Return random advice of the recovery plugins that are asked. Each piece of advice comes with
        its delay in seconds.
        """


class MishapsPart(Protocol):
    """
    What other parts of the simulation use of the class `Mishaps`. It holds the mishaps (injected
    faults and requests) of a run.
    """

    happened: list[Mishap]
    last: float

    @property
    def harm(self) -> HarmPart:
        """
        The object that carries out the mishaps (injected faults and requests).
        """

    @property
    def faults(self) -> list[Mishap]:
        """
        The mishaps that have happened, without requests and without nodes that join.
        """

    def reached(self, process: ProcessPart, step: int, phase: str) -> bool:
        """
        Inject the faults and requests that the schedule has set for this rank, step and phase.
        Return True when the rank can go on with the step.
        """

    def begins(self, process: ProcessPart, order: OrderName) -> bool:
        """
        Inject the faults and requests that the schedule has set for the moment when this rank
        begins this order. Return True when the rank can go on with the order.
        """

    def entered(self, state: State) -> None:
        """
        Inject the faults and requests that the schedule has set for the state which the job machine
        has entered.
        """

    def notices(self, process: ProcessPart, step: int) -> bool:
        """
        Let a rank check the numbers that it has computed. Return True when the numbers are bad and
        the rank leaves its loop with a fault.
        """

    def spread(self, process: ProcessPart) -> None:
        """
        Record that a rank has contributed wrong data to the all-reduces, so that all members of the
        group get wrong results.
        """

    def failure(self, rank: int, order: OrderName) -> str | None:
        """
        Return the text of the failure that the schedule injects into an order on a rank. Return
        None when the order does not fail.
        """

    def slowness(self, rank: int, order: OrderName) -> float:
        """
        Return how many more seconds than usual a rank needs for an order.
        """

    def lateness(self, rank: int) -> float:
        """
        Return how many more seconds than usual the process of a rank needs until it calls
        `tft.init`.
        """

    def held_back(self, rank: int) -> float:
        """
        Return how many more seconds than usual it takes until the process of a rank has ended.
        """

    def verdict(self, rank: int) -> Verdict:
        """
        Return the verdict of a health check on a rank.
        """


class InvariantsPart(Protocol):
    """
    The attributes and methods of the checks of invariants that other parts of the simulation use.
    """

    given_up: set[int]

    def one_leader_obeyed(self, epoch: int, leader: int) -> None:
        """
        Check that ranks obey only one controller in one epoch. `leader` is the number of a
        controller that a rank obeys in `epoch`.
        """

    def obeyed(self, process: ProcessPart, order: RankOrder) -> None:
        """
        Check an order that a rank begins to carry out. All orders of a round must name the same
        step, and each shard must be saved by one rank only.
        """

    def heeded(
        self, process: ProcessPart, order: RankOrder, epoch: int, key: tuple[int, int]
    ) -> None:
        """
        Check that a rank obeys only orders for its own incarnation. The order must not be older
        than the epoch `epoch`, or than the incident and round in `key`.
        """

    def finished(self, process: ProcessPart) -> None:
        """
        Record that a rank has carried out its order.
        """

    def steps_alike(self, members: "dict[int, ProcessPart]") -> None:
        """
        Check that all members of a process group compute the same step.
        """

    def given_right(self, giver: ProcessPart, shard: str, order: Fetch, content: Content) -> None:
        """
        Check that a rank from which a shard is fetched holds the right content of the step.
        """

    def found(self, process: ProcessPart, order: RankOrder, step: int) -> None:
        """
        Record the step of the checkpoint that a rank has searched for and loaded itself (order
        `reload`).
        """

    def lost_told(self, incident: Incident) -> None:
        """
        Check the number of lost steps that an incident reports, if the ranks have searched for a
        checkpoint themselves (order `reload`) and returned to it.
        """

    def repaired_whole(self, process: ProcessPart, order: Fetch | Load | Restore) -> None:
        """
        Check that after a repair every shard of the rank has the content of the agreed step, and is
        neither older nor torn (a mixture of two steps).
        """

    def resumes_right(self, process: ProcessPart, order: RankOrder) -> None:
        """
        Check a rank that is ordered to enter the training loop. It must hold the state at the end
        of the step before, and the data position (the number of batches drawn) of that step.
        """

    def rolled_back(self, process: ProcessPart, step: int) -> None:
        """
        Check that after a rollback a rank has the data position (the number of batches drawn) of
        the agreed step.
        """

    def trained(self, process: ProcessPart, step: int) -> None:
        """
        Check that after every trained step the content of the shards and the data position (the
        number of batches drawn) are those of the undisturbed run.
        """

    def ended_step(self, process: ProcessPart, step: int) -> None:
        """
        Check that the content at the end of a step is that of the undisturbed run.
        """

    def committed_whole(self, order: Commit, parts: dict[str, Written]) -> None:
        """
        Check that a last checkpoint holds every shard and that each part is right. It must also
        hold the rank-local state of every rank for which the state can still be known.
        """

    def ended_for_a_cause(self, over: JobOver, members: frozenset[int]) -> None:
        """
        Check that a job ends only for a cause: a request, a fault or a limit of the policy.
        """

    def short(self, members: frozenset[int] | None = None) -> list[int]:
        """
        Return the ranks that have not trained every step. Look only at the ranks in `members`, or
        at all ranks if it is None.
        """

    def ends(self) -> None:
        """
        Check that every incident ends: the job is over within `BOUND` virtual seconds after the
        last mishap (injected fault or request).
        """

    def nothing_left(self) -> None:
        """
        Check that no process of a rank is left when a job is over.
        """


class AuditorPart(Protocol):
    """
    What other parts of the simulation use of the auditor, which checks the decisions of the leading
    controller.
    """

    def hears(self, machine: Machine, event: Event) -> None:
        """
        Record an event that the job machine (the state machine of the leading controller) is about
        to handle, and the state of the job machine before this event.
        """

    def judges(self, machine: Machine, event: Event, commands: Sequence[Command]) -> None:
        """
        Check the commands and the state of the job machine after an event. Raises `Broken` when an
        invariant does not hold.
        """

    def not_put_back(
        self,
        process: ProcessPart,
        shard: str,
        step: int,
        had: Mapping[str, Content],
        got: Content,
    ) -> None:
        """
        Check a fetched shard of a rank that had already ended `step` with sound content. The rank
        must not receive the content that other ranks had in the tail of that step (between its
        update window and its end).
        """

    def digested(self, process: ProcessPart, step: int) -> None:
        """
        Record the real content of a rank at the end of `step`, when the rank has posted the digests
        of a slice (a part of each of its shards).
        """


@dataclass(slots=True)
class Cluster:
    """
    The nodes, controllers and processes of a simulated cluster.
    """

    nodes: dict[int, NodePart] = field(default_factory=dict)
    leaders: list[LeaderPart] = field(default_factory=list)
    """All living controllers, including the standbys."""
    processes: list[ProcessPart] = field(default_factory=list)
    """All processes of the run, including those that have ended."""
    by_address: dict[str, ProcessPart] = field(default_factory=dict)
    pids: int = 1000
    """The newest process id; simulated processes and store ports get increasing numbers."""
    controllers: int = 0
    """The number of controllers that were started."""


@dataclass(slots=True)
class Pollution:
    """
    The update that has spread wrong content to all ranks, and whether the controller knows of this
    update.
    """

    step: int | None = None
    """The step of the update that has spread wrong content. None when there was no such update."""
    known: bool = False
    """True when the controller knows of the update that has spread wrong content."""
    learnt: tuple[int, int] = (0, 0)
    """The incident and round in which the controller learnt of the update that has spread wrong
    content. It did not know of the update when it sent orders of earlier rounds."""


@dataclass(slots=True)
class Checks:
    """
    The objects that check a simulated run, and the counts of the events that came in it.
    """

    invariants: InvariantsPart
    auditor: AuditorPart
    seen: Seen = field(default_factory=Counter)


@dataclass(slots=True)
class Stage:
    """
    All parts of one simulated cluster. Each part gets this object, to find the other parts.
    """

    schedule: Schedule
    clock: Clock
    rng: Random
    network: Network
    truth: Truth
    disk: Disk
    groups: GroupsPart = field(init=False)
    checks: Checks = field(init=False)
    mishaps: MishapsPart = field(init=False)
    story: SharedStory = field(init=False)
    outside: Outside = field(init=False)
    cluster: Cluster = field(default_factory=Cluster)
    pollution: Pollution = field(default_factory=Pollution)
    begun: bool = False
    """True when a rank has entered the training loop. Before that, all ranks have initial states,
    which are equal."""
    over: JobOver | None = None

    def takes(self, least: float, most: float) -> float:
        """
        Return a random duration between `least` and `most` seconds.
        """
        return least + (most - least) * self.rng.random()

    def serving(self, address: str) -> ProcessPart | None:
        """
        Return the living process that gives out its shards at `address`. Return None when no such
        process exists.
        """
        process = self.cluster.by_address.get(address)
        return process if process is not None and process.life.alive else None

    def pid(self) -> int:
        """
        Return a new process id for a simulated process, which is also used as the number of a port.
        """
        self.cluster.pids += 1
        return self.cluster.pids
