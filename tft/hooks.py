"""
The hook specifications: what an adaptor answers, and what a plugin may watch or add.

An adaptor knows one framework; a worker loads exactly one, by name, and calls its hooks on the
training thread while that thread is out of the training loop, unless a hook says otherwise. An
exception from an adaptor's hook fails the order it served, and the controller decides what next.

A plugin may implement any of the plugin hooks. They run under a guard: what a plugin raises is
logged, and the job goes on.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, get_args

import click
import pluggy

from tft.errors import UsageError
from tft.protocol.messages import FaultKind, OrderName, OutsideReport, ShardCopies, Verdict

hookspec = pluggy.HookspecMarker("tft")
hookimpl = pluggy.HookimplMarker("tft")


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """
    One named piece of memory of a shard: contiguous bytes, in place where that is possible.
    """

    name: str
    view: memoryview
    """Flat, of format `B`. Writable when it comes from `tft_take`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """
    What a user's factory makes over the groups of now, for `session.adopt(make=...)`; it is
    `session.model` until the groups are lost.
    """

    model: Any  # Any: the framework's own types
    optimizer: Any
    scheduler: Any = None
    others: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else has a state that is to be kept, by name, such as a moving average."""
    more: Any = None
    """What else training needs of these groups, such as the schedule of a pipeline. Nothing of it is
    kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPayload:
    """
    A shard, ready to be moved: `meta` first, then its buffers.
    """

    meta: bytes
    """What the receiver must know before it can take the buffers, and all that is no tensor."""
    buffers: tuple[Buffer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """
    What a check has found on one rank.
    """

    verdict: Verdict
    """`pass`: go on; `isolate`: take this rank's node out of the job; `end`: end the job."""
    finding: str = ""
    """The sentence behind a verdict that is not `pass`, for an operator to act on."""

    def __post_init__(self) -> None:
        if self.verdict not in get_args(Verdict) or not isinstance(self.finding, str):
            raise UsageError(
                f"a check says {self.verdict!r} and {self.finding!r}: its verdict is one of "
                f"{', '.join(get_args(Verdict))}, its finding a text"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFault:
    """
    A line of the table of device faults: what an error says, and what that means.
    """

    words: str
    """A regular expression that is looked for in the message of a `RuntimeError`."""
    kind: FaultKind | None
    """None: it is the user's own bug, or more memory was asked for than there is."""
    context_lost: bool = False
    """The device takes no more work from this process: another one has to take its place."""
    source: str = ""
    """Where it is written that this is so."""

    def __post_init__(self) -> None:
        if self.kind not in (None, *get_args(FaultKind)):
            kinds = ", ".join(get_args(FaultKind))
            raise UsageError(f"a device fault is of kind {self.kind!r}, which is none of: {kinds}")
        try:
            re.compile(self.words)
        except re.error as error:
            raise UsageError(
                f"the words of a device fault, {self.words!r}, are no regular expression: {error}"
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """
    What an exception stands for, where the kind of fault does not say all.
    """

    kind: FaultKind
    polluted: bool = False
    """The last update may have spread what is wrong: no copy of that step is sound, on any rank."""
    not_after: int | None = None
    """It is known to be older: no copy of a later step than this is sound."""
    context_lost: bool = False
    """The device takes no more work from this process: another one has to take its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultView:
    """
    One fault of an incident.
    """

    kind: FaultKind
    rank: int | None
    """None where no rank could be singled out."""
    step: int
    """The step that was being computed."""
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferView:
    """
    A strategy, with the reasons for and against it.
    """

    strategy: str
    why: str
    """What it would do."""
    why_not: str | None
    """The sentence that rules it out; None: it can be followed."""
    step: int | None
    """The step whose end everyone would be brought to; None where it is that of a checkpoint which the
    ranks find themselves."""
    leaving: tuple[int, ...]
    """For `scale_in`: the ranks that would leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentView:
    """
    An incident, when everyone stands still and a strategy is to be chosen.
    """

    number: int
    round: int
    faults: tuple[FaultView, ...]
    offers: tuple[OfferView, ...]
    """In the order in which they would be tried."""
    until: float
    """When the choice is made without advice (CLOCK_MONOTONIC of the controller)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """
    What a recovery plugin says to an incident. All of it may be left out.
    """

    strategy: str = ""
    """The strategy to follow: an offered one, or a name of the plugin's own for `base`."""
    base: str = ""
    """For a name of its own: the offered strategy it is a variant of."""
    not_after: int | None = None
    """For a name of its own: go back to this step or an earlier one."""
    skip: int = 0
    """For a name of its own: how many batches to leave out after going back."""
    replace: tuple[int, ...] = ()
    """For a name of its own: ranks whose processes are replaced although they live."""
    veto: tuple[str, ...] = ()
    """Strategies not to be followed in this incident."""
    wait: float = 0.0
    """Seconds after which to ask again, before anything is chosen."""
    why: str = ""
    """The sentence for the operator."""


class SessionView(Protocol):
    """
    What a plugin sees of a worker's session.
    """

    @property
    def rank(self) -> int:
        """Global rank."""

    @property
    def incarnation(self) -> int:
        """How many processes held this rank before."""

    @property
    def world(self) -> int:
        """World size."""

    @property
    def step(self) -> int:
        """The step being computed, 1-based."""

    @property
    def evaluating(self) -> bool:
        """A function that is called after a step runs; `step` is that of the next."""

    @property
    def run_dir(self) -> Path:
        """Where this run keeps its records."""


class LauncherStore(Protocol):
    """
    The store that a framework's own launcher serves for the processes it starts.
    """

    def keep(self, key: str, words: str) -> str:
        """What is there under `key`: `words`, unless somebody was earlier."""

    def put(self, key: str, words: str) -> None:
        """Have `words` under `key`, whatever was there."""

    def take(self, key: str) -> str:
        """Wait for what is put there, and take it away."""


class AdaptorSpecs:
    """
    What an adaptor answers. All are needed, except those that say what their absence means.
    """

    # ------------------------------------------------------------ the process

    @hookspec(firstresult=True)
    def tft_strategies(self) -> Sequence[str]:
        """
        The strategies this adaptor can take part in, of `retry`, `recover`, `scale_in`,
        `scale_out`, `migrate`, `dump`. Asked again when this rank is ready, and before groups are formed
        without ranks that have left.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_preload(self) -> None:
        """
        Import what the framework imports late, before the user's script starts.

        A replacement is started while the others wait: what is imported here is not imported
        after it has joined.
        """

    @hookspec(firstresult=True)
    def tft_store(self, host: str, port: int, opened: Callable[[int], None]) -> None:
        """
        Serve the rendezvous store at `host`, in a process of its own, until it is ended.

        Call `opened(port)` once connections are accepted; `port` 0 asks for a free one.
        """

    # ------------------------------------------------------------ under another launcher

    @hookspec(firstresult=True)
    def tft_begun(self) -> str | None:
        """
        What the framework has begun in this process that ties it to others, in words: a process
        group. The process is about to become a `tft run`, and would leave them waiting. Not needed:
        without it nothing is thought to have begun.
        """

    @hookspec(firstresult=True)
    def tft_launcher_store(self, host: str, port: int) -> LauncherStore:
        """
        The store that the framework's own launcher serves there. Raise a `UsageError` if it does not
        answer. Not needed: only of the adaptor whose framework has such a launcher.
        """
        raise NotImplementedError

    # ------------------------------------------------------------ the state

    @hookspec(firstresult=True)
    def tft_adopt(
        self,
        parts: Mapping[str, Any],  # Any: the framework's own objects
        wrap: Callable[[], Any] | None,
    ) -> None:
        """
        Take charge of the user's objects. `parts` has `model`, `optimizer`, and may have
        `scheduler` and `data`; `wrap` builds the wrapper (DDP) round the model.

        Refuse what cannot be handled with a `UsageError`, before anything is changed.
        """

    @hookspec(firstresult=True)
    def tft_shards(self, rank: int, world: int) -> Sequence[ShardCopies]:
        """
        The shards this rank holds, and for each all the ranks that hold a copy of it.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_column(self, rank: int, world: int) -> Sequence[int]:
        """
        The ranks that can only leave and come back together with this one, it among them, where the job
        goes on with fewer ranks. Not needed: without it each rank goes alone.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_capture(self, closing: bool) -> bytes:
        """
        The private state of this rank: RNG and data position. Called at the edges of every
        update window: a few microseconds, no device synchronisation. `closing`: the window closes, and
        with it the step.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_watch(self, contributing: Callable[[], None]) -> None:
        """
        Call `contributing()` on the training thread in every step, when this rank has drawn its
        batch and its random numbers and before it contributes to the last all-reduce of the step.

        From then on the others can finish the step without this rank; should it die, its
        replacement goes on with the private state of this moment. Called once, before `tft_adopt`.
        """

    @hookspec(firstresult=True)
    def tft_rollback(self, private: bytes) -> None:
        """
        Put back what `tft_capture` returned, here or in the process that held this rank before,
        and drop the gradients.
        """

    @hookspec(firstresult=True)
    def tft_skip(self, batches: int) -> None:
        """
        Draw so many batches and drop them, after a rollback. Not needed: without it no batch can
        be left out.
        """

    @hookspec(firstresult=True)
    def tft_derive(self, step: int) -> bytes:
        """
        Make the private state of this rank at the end of `step` anew, as `tft_capture` would
        return it: what was captured went with a node, or the rank comes back after the others
        went on without it. What cannot be known (the RNG) is made as at a fresh start. Not
        needed: without it such a rank cannot go on, and nothing is pretended.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_pre_update_barrier(self) -> None:
        """
        The all-reduces of the step are complete on this rank, and its window is about to open (every step, where
        no rank holds everything): return when all ranks have come so far. Raises where that cannot be
        known any more. Not needed where it is so anyway: without it a rank may complete a step that
        others, which hold something else, cannot complete.
        """

    @hookspec(firstresult=True)
    def tft_updated(self) -> None:
        """
        The update window has closed on this rank (every step): give the others what it alone has
        computed of the step. May wait for them; what fails here is a fault in the next step. Not
        needed: without it every rank computes the whole step.
        """

    @hookspec(firstresult=True)
    def tft_end_step(self, tail: bool) -> bytes | None:
        """
        The step has ended, with all that the loop does behind the update window (every step): note what a script may set
        anew at the head of its next iteration, such as the learning rate or the modes of modules. When the loop is
        left later on, `tft_clear` puts that back, so that all ranks hold the same. Return the private state anew where
        what belongs to the end of the step has changed since `tft_capture(closing=True)`, with RNG and data
        position as they were then; else None. `tail`: the loop has said so; else the window has just closed, and what
        the loop does behind it is still to come. Not needed: without it nothing of that is put back.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_set_aside(self) -> Callable[[], None]:
        """
        A function of the user's that is no part of training is about to be called: return what puts the generators and
        the modes of modules back to what they are now. Not needed: without it what such a function draws
        is drawn.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_backup(self, step: int) -> None:
        """
        `step` is complete (every step): keep a copy of the whole state, and give up the oldest.
        Not needed: without it no copy is kept, and the next two hooks are not called.
        """

    @hookspec(firstresult=True)
    def tft_backups(self) -> Sequence[int]:
        """
        The steps of whose end a whole copy is kept. Called on any thread.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_restore(self, step: int) -> None:
        """
        Take back the copy of the end of `step`; the copy is kept.
        """

    @hookspec(firstresult=True)
    def tft_give(self, shard: str, step: int) -> ShardPayload:
        """
        The buffers of a shard as it was at the end of `step`: the present state's, or those of one
        of `tft_backups`. Read while the training thread is out of the loop. Called on a transfer
        thread.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_take(self, shard: str, meta: bytes) -> Sequence[Buffer]:
        """
        Make room for a shard whose `meta` is this; the writable buffers in the giver's order.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_taken(self, shard: str, meta: bytes) -> bool | None:
        """
        Put the shard to use: all buffers have come and their digests hold. True: the shard comes in
        `tft_rebuild`, which all ranks call at once; until that has returned this rank's state counts as torn.
        """

    @hookspec(firstresult=True)
    def tft_compare(self, shard: str) -> Mapping[str, str]:
        """
        Digests of the shard as this rank holds it, by part; they have to be equal on all ranks that hold it. That of a
        part that is this rank's own, such as a buffer that the forward pass changes, is empty; then that part is not
        compared on any rank. `tft.state_hooks.part_digests` makes them of what `tft_give` gives, and without
        this hook it does. Training thread, out of the loop; in the loop too, at the edges of a step, while the
        loop is audited. There a change from the end of a step to the next update window is no finding in parts
        called `description`, `settings`, `scheduler`, `modes` and `learning_rate`.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_generators(self) -> Mapping[str, str]:
        """
        A digest of each random generator in the private state, by its name. In the training thread, in the loop, at
        both ends of a tail that is audited. Not needed: without it nobody notices a tail that draws.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_watch_collectives(
        self,
        entered: Callable[[], None] | None,
        failed: Callable[[BaseException], None] | None,
    ) -> None:
        """
        From now on call `entered()` before this process enters a collective, and `failed(error)` when one raises;
        None: no more. Training thread; `entered` is given in audited tails only, `failed` for the life of the process,
        and it must cost nothing where nothing fails. Not needed: without it what tails do after a collective is
        not seen, nor who swallows its fault.
        """

    @hookspec(firstresult=True)
    def tft_digests(self) -> Mapping[str, str]:
        """
        Digests (XXH3-128, hexadecimal) of `parameters`, `optimizer`, `scheduler`, `rng`, `data`.
        """
        raise NotImplementedError

    # ------------------------------------------------------------ groups and wrappers

    @hookspec(firstresult=True)
    def tft_quiesce(self) -> None:
        """
        Bring the training thread out of any collective and out of the forming of a group: it
        is to raise there. Called on the control thread; must not block. May be called when
        nothing hangs, and more than once.
        """

    @hookspec(firstresult=True)
    def tft_waiting(self, frame: FrameType) -> bool:
        """
        Whether the training thread, whose innermost Python frame is `frame`, may be waiting for
        other ranks. Called on the control thread.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_clear(self) -> None:
        """
        Drop the wrappers and really free the process groups. No traceback holds them any more.
        """

    @hookspec(firstresult=True)
    def tft_regroup(self, name: str, host: str, port: int, rank: int, world: int) -> None:
        """
        Form the process groups under a name that no earlier group had. All members call it at
        once; `rank` is the place of this one among them, `world` their number. Ends early, with an
        exception, when `tft_quiesce` is called.
        """

    @hookspec(firstresult=True)
    def tft_rebuild(self) -> Any:  # Any: the user's own wrapper
        """
        Build the wrapper anew and return it: what the training loop calls. The state of all ranks
        is equal by now, and nothing here may change it. What decides the order of gradient reduction must be
        what it was before the groups were lost.
        """

    # ------------------------------------------------------------ checkpoints

    @hookspec(firstresult=True)
    def tft_save(
        self, directory: Path, shard: str, step: int, shards: Sequence[str], attempt: int
    ) -> Sequence[str]:
        """
        Write one copy of a shard as it is at the end of `step` under `directory`, synced; the names of
        the files written, relative to it. `shards` are all that this rank is to write with it. A
        later `attempt` is made with others when somebody was lost while the checkpoint was written.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_stage(self, shard: str, step: int) -> Callable[[Path], Sequence[str]]:
        """
        Copy a shard as it is at the end of `step`, on the training thread, quickly. What is returned
        writes the copy as `tft_save` would, once, on another thread, while training goes on. Needed
        for periodic checkpoints.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_join(self, directory: Path, files: Sequence[str], step: int) -> Sequence[str]:
        """
        Every shard has been written under `directory` as it was at the end of `step`, by whoever: write what makes them one
        checkpoint, synced; the names of the files written, relative to it. `files` are those that
        belong to it, relative too: there may be others, of an attempt that was killed. May be asked
        for again, of another rank too. Not needed: without it the shards stand beside each other.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_newest(self, directory: Path, newest: Path | None, step: int) -> None:
        """
        `newest`, of the end of `step`, is from now on the newest checkpoint under `directory`; None: there
        is none any more, all have been given up. Say so where the framework looks for that, whole or not
        at all: several ranks may be told, and one more than once. Training thread, or that which writes
        checkpoints. Not needed: without it tft alone knows.
        """

    @hookspec(firstresult=True)
    def tft_load(self, directory: Path, shard: str) -> None:
        """
        Read a shard that `tft_save` wrote, maybe in another process.
        """

    @hookspec(firstresult=True)
    def tft_reload(self) -> Callable[[int | None], int] | None:
        """
        How this rank loads the newest checkpoint that its program keeps itself, and tft does not know
        of: the function is told after which step everything may be wrong (None: nothing is), finds and
        loads it, the whole state with RNG and data position, and returns the step whose end it is of. It
        is called on all ranks at once, when the groups are formed; all have to find the same, and nothing
        of a step that was given up by going back further. Asked for when the rank is ready, and again
        each time. None: there are no such checkpoints. Not needed: without it there are none either.
        """

    @hookspec(firstresult=True)
    def tft_beside(self, shard: str) -> bytes:
        """
        A function of the user's own is about to write a shard in the place of `tft_save` (training
        thread): what has to be kept beside that is no part of what the user handed over, such as the
        order of gradient reduction. Raise `OrderRefused` where that has not all of the shard now. Not needed: without
        it, and without the next one, there is no such thing.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_replaced(self, shard: str, beside: bytes) -> None:
        """
        A function of the user's own has put another content into what the user handed over of a
        shard; `beside` is what `tft_beside` returned when it was written.
        """

    # ------------------------------------------------------------ faults

    @hookspec(firstresult=True)
    def tft_classify(self, error: BaseException) -> FaultKind | Diagnosis | None:
        """
        The kind of fault an exception of the framework stands for, or a `Diagnosis` that says more; None: it
        is none that the adaptor knows. The errors of devices, and what says itself what it is, have been looked at; what it was
        raised from is asked about by itself.
        """


class PluginSpecs:
    """
    What a plugin may watch or add. None of it is needed; None means nothing to say.
    """

    # ------------------------------------------------------------ the command line

    @hookspec
    def tft_options(self) -> Sequence[click.Option]:
        """
        Options to add to `tft run`. Called once, when the command line is built.
        """
        raise NotImplementedError

    @hookspec
    def tft_environment(self, options: Mapping[str, Any]) -> Mapping[str, str]:
        """
        Variables to add to the environment of every process of the job. `options` are those of
        `tft run` by parameter name. Raise a `UsageError` to refuse the run: nothing has started.
        """
        raise NotImplementedError

    # ------------------------------------------------------------ in a worker

    @hookspec
    def tft_opened(self, session: SessionView) -> object | None:
        """
        `tft.init` has succeeded, on the training thread. Returns an object with any of the
        `tft_on_…` hooks of this section to be called from now on; None costs nothing later.
        """

    @hookspec
    def tft_on_adopted(self, parts: Mapping[str, Any]) -> None:
        """
        The user has handed over these objects (training thread). They are the user's own: to be
        watched, by a tool for tests also disturbed.
        """

    @hookspec
    def tft_on_window_closed(self, step: int) -> None:
        """
        The update window of `step` has closed (training thread, every step).
        """

    @hookspec
    def tft_on_tail_ending(self, step: int) -> None:
        """
        The loop has done what it does behind the update window of `step`, and is about to ask for the next step
        (training thread, every step).
        """

    @hookspec
    def tft_on_order(self, order: OrderName, incident: int, step: int) -> None:
        """
        An order of an incident is about to be carried out (training thread). `step` is the one
        this rank is at; for `regroup` the one that everyone is heading for.
        """

    @hookspec
    def tft_device_faults(self) -> Sequence[DeviceFault]:
        """
        Lines for the table of device faults; they are looked at before its own. Called once, in
        `tft.init`.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_check(self, session: SessionView, name: str) -> CheckResult | None:
        """
        Run the check called `name` while the job is paused (training thread; all ranks at once).
        None: this plugin has no check of that name.
        """

    # ------------------------------------------------------------ in an agent

    @hookspec
    def tft_progressed(self, run_dir: Path, node: int, step: int) -> None:
        """
        A rank of this node is the first to have completed `step` (the agent's loop; must not
        block).
        """

    # ------------------------------------------------------------ in the controller

    @hookspec
    def tft_on_leader(self, report: Callable[[OutsideReport], None]) -> None:
        """
        This controller leads from now on (the controller's loop; must not block). `report` may be
        called from any thread, at any time: with a `Noticed` for a fault that was seen from
        outside, a `PauseRequested`, a `StopRequested`. This is how a scheduler has its say
        without being asked.
        """

    @hookspec
    def tft_on_event(self, event: str, facts: Mapping[str, object]) -> None:
        """
        Something an operator wants to know has happened (the controller's loop; must not block):
        `fault`, `stopped`, `strategy_chosen`, `incident_closed`, `job_ends` and what
        else stands in the controller's log, with its facts.
        """

    @hookspec
    def tft_advise(self, incident: IncidentView) -> Advice | None:
        """
        Everyone stands still: which strategy shall be followed? On a thread of its own; what is
        not said within 30 s is not waited for, unless the plugin asks for time. None: no advice.
        """

    # ------------------------------------------------------------ in the report

    @hookspec(firstresult=True)
    def tft_fault_moment(
        self, run_dir: Path, kind: str, rank: int | None, seen: float
    ) -> float | None:
        """
        When a fault really happened (CLOCK_MONOTONIC), if this plugin knows; `seen` is when its
        first evidence was.
        """
