"""
The connection of a training process to its job.

A training program for the library MindIO calls the functions of `framework_ttp`. The class
`Processor` translates these calls into calls of a `tft.Session`, which connects this process with
the controller. The training thread makes these calls. While this thread is out of its training
loop, it also runs the functions that the program has registered. The program's stop function may
run on a separate thread, because it interrupts the training thread.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import tft
from mindio_ttp import adaptor, checks, device, environment, logs, replicas, tls, torch_groups
from mindio_ttp.checks import Refused
from mindio_ttp.classification import is_cut_off
from mindio_ttp.constants import LARGEST_STEP, Action, ReportState
from mindio_ttp.exchange import hub_of_all
from mindio_ttp.handlers import Handlers
from mindio_ttp.orchestrator import orchestrator
from mindio_ttp.program import ELASTIC, UNKNOWN, Program
from tft.errors import Interrupted, JobEnded, UsageError
from tft.spi import FaultKind, TrainingFault

log = logs.get_logger()

FORCE_STOP = "FORCE STOP. By mindio-ttp BeginUpdating"
FORCE_STOP_MINDSPORE = "ForceStopError (FORCE STOP). By mindio-ttp BeginUpdating"
"""The text of the error that makes MindSpore's own training loop end. The text is used instead of
`FORCE_STOP` in programs for MindSpore."""
STEP_FINISH = "STEP FINISH"
ARF, HOT_SWITCH = "arf", "hot switch"
"""The reasons why a process replaces another process of its rank, as the function
`tft_get_reboot_type` returns them."""
ARF_FINISH = "ARF FINISH"


class Reported(TrainingFault):
    """
    A fault that a training program reports about itself with the function `tft_report_error`.

    `code` is the error code of the device, and `said` is the text of the program's error. If
    `polluted` is True, all copies of the training state may have wrong values. `not_after` is then
    the last step whose training state is right, or None if that step is not known.
    """

    def __init__(
        self,
        kind: FaultKind,
        code: str,
        said: str,
        *,
        polluted: bool = False,
        not_after: int | None = None,
    ) -> None:
        device = f", device error {code}" if code else ""
        text = f"{kind}{device}{f': {said}' if said else ''}"
        spread = polluted and not_after is None
        super().__init__(text, kind=kind, polluted=spread, not_after=not_after)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorArguments:
    """
    The arguments that the training program has passed to the function `tft_init_processor`.
    """

    rank: int
    world: int
    uce: bool
    """MindIO's flag UCE: True if faults may be repaired without new processes."""
    arf: bool
    """MindIO's flag ARF: True if lost processes may be replaced by new ones."""
    zit: bool
    """MindIO's flag ZIT: True if the job may continue without lost ranks until they have new
    processes."""
    curve: tuple[str, ...]
    """The options of the command `tft run` that encrypt the bus. Empty if the bus is not
    encrypted."""


FAULTS: Mapping[ReportState, tuple[FaultKind, bool]] = {
    ReportState.RS_RETRY: ("numeric", True),
    ReportState.RS_UCE: ("memory", False),
    ReportState.RS_UCE_CORRUPTED: ("memory", True),
    ReportState.RS_HCCL_FAILED: ("network", False),
    ReportState.RS_UNKNOWN: ("software", False),
}
"""Maps a `ReportState` (the reason why a rank has left its training loop) to its kind of fault and
a flag. The flag is True if all copies of the training state may be wrong."""

MISSED: Mapping[str, str] = {
    "stop": "a rank that waits for other ranks cannot be interrupted, so its process is replaced",
    "clean": "the device is not cleaned before groups are formed",
    "repair": "a rank that needs state cannot get it from another rank",
    "save_ckpt": "no last checkpoint can be saved",
}
"""Maps the name of a function to the consequence if the training program does not register that
function. The consequence is logged when training begins."""


class Processor:
    """
    Connects the training program of this process to its job. Each process has exactly one object of
    this class."""

    def __init__(self) -> None:
        self.variables = environment.variables()
        self.handlers = Handlers(
            mindspore=self.variables.mindspore, limit=self.variables.action_limit
        )
        for sentence in self.variables.ignored:
            log.warning("variable_ignored", why=sentence)
        self.dumped = False
        self._told: ProcessorArguments | None = None
        self._session: tft.Session | None = None
        self._program: Program | None = None
        self._begun = self._inside = self._window = self._counted = False
        self._leaving = False
        """True if the program must leave its training loop after the current step."""
        self._initialises = False
        """True if the program has reported RS_INIT_FINISH before training began, and has not called
        `tft_wait_next_action` since. That call returns at once, so that the program can continue
        its own initialisation."""
        self._expects_finish = False
        """True if the program has asked, with `tft_is_reboot_node`, whether this process replaces
        another process. If the answer was yes, the program reports later that it is ready to train,
        and `enter` does not wait for the other ranks before this report."""
        self._said_ready = False
        self._refused: Exception | None = None
        """The exception that says why the update of the present step was refused. None if no update
        was refused since the program last reported that it had left its training loop."""
        self._exit: int | None = None
        self._completed = False
        self._returned = False
        """True if the program had trained all its steps, but must train further because all ranks
        went back to an earlier step."""
        self.args: Any = None
        """The argument `args` that registered functions of the program receive. Any: objects of the
        program."""
        self.exported = ""
        """The name of the training framework that the program has passed to the function
        `set_mindio_export_version`. Empty if the program has not called this function."""
        self.group_names = torch_groups.GroupNames()
        self.device: int | None = None
        """The number of the device that was current when `tft_init_processor` was called. If no
        device was in use then, it is the number of the device that was current when training
        began."""
        self.position: Callable[[], int] | None = None
        """A function that returns the step to whose end the training state belongs, by the
        program's own count. The function is set only if an adaptor other than `mindio` keeps the
        training state, because that adaptor knows the framework."""

    # ---------------------------------------------------------------- joining the job

    def init(self, told: ProcessorArguments) -> None:
        """
        Store `told`, the arguments of the function `tft_init_processor`. Raises `Refused` on a
        second call in a process.
        """
        if self._told is not None:
            raise Refused(
                "tft_init_processor was already called in this process: a process takes part in "
                "one job only, and cannot join again after tft_destroy_processor"
            )
        self._told = told
        self.device = self.handlers.device = device.current(mindspore=self.variables.mindspore)
        self.group_names.install()

    def start(self, ip: str, port: int, local_ip: str, adaptor_name: str) -> None:
        """
        Join the job whose controller has the address `ip` and `port`, with the adaptor that has the
        name `adaptor_name`. `local_ip` is the address of this machine, or an empty text.

        If no tft agent has started this process, the process replaces itself by the command
        `tft run`. This command starts a new process for the rank, which runs the script again from
        its beginning. Raises `Refused` if the process cannot join the job.
        """
        call = "tft_start_processor"
        told = self._told
        if told is None:
            raise Refused(f"{call}: call tft_init_processor first")
        if self._session is not None:
            raise Refused(f"{call} was already called in this process")
        checks.address(call, "master_ip", ip)
        checks.port(call, port)
        if local_ip:
            checks.address(call, "local_ip", local_ip)
        replaced = ["recover", "migrate"] if told.arf else []
        elastic = ELASTIC if told.zit else ()
        retried = ["retry"] if told.uce and self.variables.enters_again else []
        strategies = ("dump", *retried, *replaced, *elastic)
        program = Program(
            rank=told.rank, world=told.world, handlers=self.handlers, strategies=strategies,
            group_names=self.group_names,
        )  # fmt: skip
        adaptor.announce(program)
        if not environment.below_tft():
            # save the launcher's environment variables, because an agent of tft overwrites them
            environment.carry()
        # --spare-if-taken makes this process a spare if another process of this rank runs already
        options = ["--adaptor", adaptor_name, "--spare-if-taken", *told.curve]
        if local_ip:
            options += ["--host", local_ip]
        if self.variables.task:
            options.append("--led-elsewhere")
        elif orchestrator.registered:
            options.append("--orchestrated")
        try:
            session = tft.init(self._launcher(told, ip, port), options)
        except UsageError as refused:
            raise Refused(f"{call}: {refused}") from refused
        if (session.rank, session.world) != (told.rank, told.world):
            raise Refused(
                f"{call}: tft_init_processor was given rank {told.rank} of {told.world}, but this "
                f"process was started as rank {session.rank} of {session.world}"
            )
        hub = environment.hub()
        environment.restore()
        if told.curve and session.tls is None:
            raise Refused(
                f"{call}: tft_init_processor was given enable_tls=True, but the job was started "
                "without --curve: add --curve with a directory of `tft keys` to the command `tft "
                "run`"
            )
        program.completed = lambda: session.step - 1
        program.incarnation, program.successor = session.incarnation, session.successor
        program.args = self.args
        program.clean_first = environment.variables().clean_before_dump
        program.calls_once = bool(self.exported)
        self._session, self._program = session, program
        if session.adaptor == "mindio":
            session.adopt(program=program)
            if hub is not None and not self.variables.mindspore:
                try:
                    hub = hub_of_all(session.run_dir, *hub)
                except ConnectionError as error:
                    # Continue without an answer of the hub, the server of the rendezvous store. The
                    # controller's first order to form groups has the address of a new hub.
                    log.warning("hub_not_reached", why=str(error))
                program.store.use(*hub)

    def _launcher(self, told: ProcessorArguments, host: str, port: int) -> tft.Launcher:
        # Do not resolve a host name here: many machines resolve their own name to 127.0.1.1,
        # although other machines reach them by that name.
        alone = host.startswith("127.") or host in ("localhost", "::1")
        place = environment.place(told.rank, told.world, alone=alone)
        return tft.Launcher(
            name="mindio_ttp",
            rank=told.rank,
            world=told.world,
            local_rank=place.local_rank,
            local_world=place.local_world,
            machine=place.machine,
            address=host,
            port=port,
            serves=False,
            alone=alone or place.local_world == told.world,
            start=self.variables.task or f"mindio-{host}-{port}",
        )

    @property
    def session(self) -> tft.Session:
        """
        The session, which connects this process with the controller. Raises `Refused` before the
        process has joined its job.
        """
        if self._session is None:
            raise Refused("this process has not joined its job: call tft_start_processor first")
        return self._session

    @property
    def program(self) -> Program:
        """
        The `Program` object of this process, which calls the functions that the training program
        has registered. Raises `Refused` before the process has joined its job.
        """
        if self._program is None:
            raise Refused("this process has not joined its job: call tft_start_processor first")
        return self._program

    @property
    def told(self) -> ProcessorArguments:
        """
        The arguments that the program has passed to the function `tft_init_processor`. Raises
        `Refused` if that function was not called yet.
        """
        if self._told is None:
            raise Refused("tft_init_processor was not called: call it before this function")
        return self._told

    def replicas(self, rank: int, info: Any) -> None:  # Any: not yet checked
        """
        Set which ranks hold copies of the state of this rank. `rank` must be this rank, and `info`
        describes groups of ranks: it is the argument `replica_info` of `tft_set_optimizer_replica`.

        Raises `Refused` for groups that are not valid. Also raises `Refused` if training has begun,
        and the groups differ from the groups that were set before.
        """
        program = self.program
        checks.number(replicas.CALL, "rank", rank, 0, program.world - 1)
        if rank != program.rank:
            raise Refused(
                f"{replicas.CALL}: the argument rank is {rank}, but this process is rank "
                f"{program.rank}: give the rank of this process"
            )
        groups = replicas.read(
            rank,
            program.world,
            info,
            whole=self.variables.mindspore,
            shifted=self.variables.framework == 1,
        )
        # with the adaptor `mindio`, rank 0 logs the groups of all ranks itself
        if self.session.adaptor != "mindio":
            replicas.announce({rank: [[g.type, g.ranks, g.copies] for g in groups]})
        if self._begun and groups != program.groups:
            raise Refused(
                f"{replicas.CALL}: training has already begun with other groups of ranks that hold "
                "the same state: call this function before the first update of the parameters"
            )
        program.groups = groups

    @property
    def reboot(self) -> bool:
        """
        True if this process replaces another process of its rank. A program that has read True must
        report later that it is ready to train.
        """
        self._expects_finish = True
        return self.session.incarnation > 0

    @property
    def reboot_type(self) -> str:
        """
        The reason why this process replaces an earlier process of its rank. The reason is
        `hot switch` if the earlier process still trained when this process was started. Otherwise
        the reason is `arf`.
        """
        return HOT_SWITCH if self._session is not None and self._session.successor else ARF

    def set_args(self, args: Any) -> None:  # Any: objects of the program
        """
        Set the argument `args` that every registered function of the program receives.

        None is ignored. In a program that uses the framework MindSpeed (see `export`), every value
        is ignored. The registered functions of such a program receive the arguments of the training
        function instead.
        """
        self.check_trains("tft_set_step_args")
        if args is None or self.exported:
            log.warning("step_args_ignored", why="None" if args is None else "a MindSpeed program")
            return
        self.args = args
        if self._program is not None:
            self._program.args = args

    def for_mindspore(self) -> None:
        """
        Treat the training program as a program for MindSpore, even if the environment variables do
        not say so.
        """
        self.variables = replace(self.variables, mindspore=True)
        self.handlers.mindspore = True

    def keep_args(self, args: list[Any]) -> None:  # Any: objects of the program
        """
        From now on, pass `args`, the list of the training function's arguments, to every registered
        function of the program.

        A registered function may replace an entry of the list. The next call of the training
        function gets the entries of the same list as its arguments.
        """
        self.args = self.program.args = args

    def export(self, name: str) -> None:
        """
        Record that the program uses the training framework `name`, MindSpeed or MindSpeed-LLM. The
        registered functions `stop` and `clean` of such a program are called before it saves a last
        checkpoint.
        """
        self.exported = name
        environment.clean_before_dump()
        if self._program is not None:
            self._program.clean_first = self._program.calls_once = True

    # ---------------------------------------------------------------- calls inside the training loop

    def enter(self) -> None:
        """
        Enter the training loop. Return when all ranks have entered their training loops, or when
        the job has ended for this rank.

        Return at once if this rank is in its training loop already. Also return at once if this
        process replaces another process, and the program knows that but has not reported yet that
        it is ready to train.
        """
        self._returned = False
        if self._inside:
            return
        if self.session.incarnation > 0 and self._expects_finish and not self._begun:
            # do not begin yet, because the training program will report later that it is ready to
            # train
            return
        self._begin()
        self.wait()

    def open(self, backup: int) -> None:
        """
        Open the update window, because the program is about to change the training state. If the
        program has not entered its training loop yet, enter the loop first.

        If the program must leave its training loop, raise a `RuntimeError` with a text that the
        program recognises. `backup` is checked, but not used.
        """
        call = "tft_start_updating_os"
        checks.number(call, "backup_step", backup, -1, LARGEST_STEP)
        self.check_trains(call)
        if self._window:
            return
        if not self._begun:
            if self.session.incarnation > 0:
                raise RuntimeError(f"{ARF_FINISH}: this process replaces another one")
            self.enter()
            self.check_trains(call)
        if self._leaving:
            raise self._force_stop()
        self._check_step_is_known(call)
        try:
            self.session.open_window()
        except Interrupted:
            raise self._force_stop() from None
        except TrainingFault as refused:
            # keep the reason of the refusal, because the training program will only report that it
            # has left its training loop
            self._refused = refused
            raise self._force_stop() from None
        self._window = True

    def close(self, step: int) -> None:
        """
        Close the update window, because the training state of the end of `step` is complete. `step`
        is numbered by the program's own count.

        Raises `Refused` if `step` is not the step that was trained, or if no update window is open.
        """
        checks.step("tft_end_updating_os", step, least=1)
        self.check_trains("tft_end_updating_os")
        session, program = self.session, self.program
        if not self._window:
            raise Refused(
                f"tft_end_updating_os({step}): tft_start_updating_os was not called before, so "
                "tft does not know when the state of this step is incomplete; call it before the "
                "update"
            )
        base = step - session.step
        if program.base is None or (program.fresh and not self._counted):
            # the difference between the step numbers of the program and of tft is computed from the
            # first step of this run, not taken from an earlier run
            program.base = base
            if program.earlier is not None and program.earlier != base:
                log.warning(
                    "program_began_elsewhere", saved=session.step - 1 + program.earlier, began=step - 1,
                    why="the job goes on from its last checkpoint, and the program began at "
                        "another step. Checkpoints are named by the program's own count; let the "
                        "program load that checkpoint if both should agree",
                )  # fmt: skip
        self._counted = True
        expected = program.program_step(session.step)
        self._window = False
        try:
            session.close_window()
        except Interrupted:
            # raise the error of an interruption only in `pause`, because the program expects the
            # error there
            self._leaving = True
        program.contributing()
        # Check the step number last. If the number is wrong, the state is complete nevertheless,
        # and can be saved.
        if step != expected:
            raise Refused(
                f"tft_end_updating_os({step}): the step that is trained is {expected}; steps are "
                "counted one by one"
            )

    def pause(self) -> None:
        """
        Handle the end of an iteration of the training loop. A program can be stopped there without
        losing work.

        Raises a `RuntimeError` with the text STEP FINISH if the program must leave its training
        loop.
        """
        if self._leaving:
            self._leaving = False
            raise RuntimeError(STEP_FINISH)

    def check_trains(self, call: str) -> None:
        """
        Raise `Refused` if training is over for this rank. `call` is the name of the function that
        the program has called, for the message.
        """
        why = ""
        if self.dumped:
            why = "the last checkpoint is being written, or is written already"
        elif self._exit is not None:
            why = "the job has ended for this rank: tft_wait_next_action has said EXIT"
        elif self._completed:
            why = "all ranks have trained to the end"
        if why:
            raise Refused(f"{call}: training is over: {why}")

    def _check_step_is_known(self, call: str) -> None:
        program = self.program
        if not program.step_is_known:
            raise Refused(
                f"{call}: after a fault, tft has set all ranks back to the end of step "
                f"{program.repaired_to}, but the training script was not told, so it would read "
                "the data of another step: register a function with tft_register_rollback_handler, "
                "or call tft_get_repair_step before training continues"
            )

    def _force_stop(self) -> RuntimeError:
        self._leaving = False
        return RuntimeError(FORCE_STOP_MINDSPORE if self.variables.mindspore else FORCE_STOP)

    # ---------------------------------------------------------------- out of the loop

    def report(self, state: ReportState, code: str, said: str = "") -> None:
        """
        Report that this rank has left its training loop for the reason `state`. `code` is the error
        code of the device, and `said` is the text of the error; both may be empty.

        With RS_UNKNOWN, which means that the program cannot continue, return only when the job has
        ended for this rank. Raises `Refused` for a fault that is reported before training has
        begun.
        """
        self.session  # noqa: B018 (raises if there is no session)
        if state is ReportState.RS_INIT_FINISH and not self._begun:
            # remember only that the training program initialises, because the program has not set
            # its groups and functions yet
            self._initialises = True
            return
        if state in (ReportState.RS_INIT_FINISH, ReportState.RS_PREREPAIR_FINISH):
            self._ready(state)
            return
        if self._returned:
            self._returned = False
            # the method `finish` has already told the program to enter its training loop again
            return
        fault = FAULTS.get(state)
        if not self._begun:
            if fault is not None and state is not ReportState.RS_UNKNOWN:
                raise Refused(
                    f"tft_report_error: {state.name} was reported before training began, so "
                    "nothing can be repaired: let the process end with its error, which tft notices"
                )
            # report no fault, because nothing was trained yet: the process ends, and its agent
            # notices the end
            return
        if state is ReportState.RS_UNKNOWN and self.program.strategies == ("dump",):
            # A program that can only save a last checkpoint reports every error as RS_UNKNOWN. If
            # the text of the error says that a connection was lost, the fault is on another rank.
            fault = ("network", False) if is_cut_off(said) else fault
        # use only the first report after the program has left its training loop, because only this
        # report says in which state the program has left the loop
        if self._inside:
            self.program.uce = state in (ReportState.RS_UCE, ReportState.RS_UCE_CORRUPTED)
            self.program.torn = self._window
            self.program.stepped_out = state is ReportState.RS_STEP_FINISH
        sound = self.program.sound_step(said) if state is ReportState.RS_RETRY else None
        error, self._refused = self._refused, None
        if fault is not None and error is None:
            error = Reported(fault[0], code, said, polluted=fault[1], not_after=sound)
        self._leave(error)
        if state is ReportState.RS_UNKNOWN:
            self.wait()

    def _ready(self, state: ReportState) -> None:
        """
        Tell the controller that this rank is ready to train. The program has reported this with the
        reason `state`. A second report out of the training loop has no effect.

        Raises `Refused` if the program reports this again from inside its training loop. A program
        that does so after each start of its loop would report and start again for ever.
        """
        if self._inside and self._said_ready:
            raise Refused(
                f"tft_report_error: {state.name} was reported a second time, but this rank already "
                f"trains. A process that replaces a failed process reports {state.name} once. "
                "tft_is_reboot_node stays True after that, so the script must remember that it has "
                "reported"
            )
        self._said_ready = True
        self._begin()

    def _leave(self, error: Exception | None) -> None:
        if self._inside:
            self._inside = self._window = self._leaving = False
            self.session.leave(error)

    def wait(self) -> Action:
        """
        Carry out the controller's orders. Return `RETRY` when this rank must enter its training
        loop again, or when all ranks have trained all their steps.

        Return `EXIT` if the job has ended for this rank before that. Return `RETRY` at once if the
        program is still in its own initialisation.
        """
        if self._initialises:
            self._initialises = False
            return Action.RETRY
        self._begin()
        while not self._inside and self._exit is None:
            try:
                order = self.session.obey()
            except JobEnded as ended:
                self._ended(int(ended.code or 0))
                break
            self._leaving = False
            self._inside = order == "resume"
            self._completed = order == "complete"
            self.dumped = self.dumped or order in ("save", "commit")
            if self._inside:
                if self.position is not None:
                    self.program.brought_to(self.position())
                self.program.contributing()
            if self._completed:
                break
        return Action.RETRY if self._exit is None else Action.EXIT

    def finish(self) -> None:
        """
        Report that the program has trained all its steps. Return when all ranks have trained all
        their steps."""
        if not self._begun and self._session is not None and self.session.incarnation > 0:
            # This process replaces another process, and has trained nothing itself. So it enters
            # the training loop at the step of the other ranks.
            self.wait()
            return
        if self._begun and self._inside:
            self._inside = self._leaving = False
            self.program.finished = True
            self.session.finish()
            self.wait()
            self._returned = self._inside

    @property
    def window(self) -> bool:
        """
        True if the update window is open, which means that the program is changing the training
        state.
        """
        return self._window

    @property
    def returned(self) -> bool:
        """
        True if the program must train further although it had trained all its steps, because all
        ranks went back to an earlier step.
        """
        return self._returned

    def loaded(self, step: int) -> None:
        """
        Record that the program has loaded a checkpoint of its own, and continues from the end of
        `step`.

        The program reports this when it begins with a checkpoint. It also reports this in its
        repair function, when tft has asked that function to load a checkpoint.
        """
        checks.step("tft_report_load_ckpt_step", step, least=1)
        if self._program is not None:
            self._program.loaded = step

    def destroy(self) -> None:
        """
        Report, after the training loop has ended, that the program has trained all its steps.
        Return when all ranks have trained all their steps.

        Raises `Refused` if this rank must train earlier steps again after an incident. The program
        can no longer do that, because it has left its training loop for good.
        """
        while self._begun and self._inside:
            trained = self.session.step
            self.finish()
            if self.session.step < trained:
                raise Refused(
                    "tft_destroy_processor: all ranks continue from the end of step "
                    f"{self.program.repaired_to} after an incident, but this rank has left its "
                    "training loop and cannot go back. Let the process end: tft replaces the "
                    "process. Or decorate the training function with tft_exception_handler, which "
                    "calls the function again"
                )

    @property
    def begun(self) -> bool:
        """
        True if this rank has reported that it is ready to train.
        """
        return self._begun

    def repair_step(self) -> int:
        """
        Return the step to which the last repair has set this rank, by the program's own count.
        Return 0 if there was no repair.

        Also record that the program now knows this step, and so can set its data position to the
        step.
        """
        if self._program is None:
            return 0
        self._program.step_is_known = True
        return self._program.repaired_to

    @property
    def repair_type(self) -> str:
        """
        The name of the repair that is being carried out, as the library MindIO names repairs. The
        name is `unknow` if there is no repair, or if no repair is chosen yet.
        """
        return UNKNOWN if self._program is None else self._program.repair_type

    @property
    def completed(self) -> bool:
        """
        True if all ranks have trained all their steps.
        """
        return self._completed

    @property
    def exit_code(self) -> int | None:
        """
        The exit code of the job. None while the job has not ended for this rank.
        """
        return self._exit

    def _ended(self, code: int) -> None:
        self._exit = code
        if self.variables.mindspore and self.handlers.has("exit"):
            self.handlers.call("exit")

    def _begin(self) -> None:
        if not self._begun:
            self.session  # noqa: B018 (raises if there is no session)
            for name, without in MISSED.items():
                # warn only for the adaptor `mindio`, because any other adaptor does the work of
                # these functions itself
                if self.session.adaptor == "mindio" and not self.handlers.has(name):
                    log.warning("function_missing", name=name, without=without)
            self._begun = True
            # look for the device again, because `init` found none if the program had not imported
            # its framework yet
            if self.device is None:
                self.device = device.current(mindspore=self.variables.mindspore)
                self.handlers.device = self.device
            if self.session.adaptor == "mindio":
                self.program.settle_strategies()
            self.session.begin()


processor = Processor()
"""The object that connects the training program of this process to its job."""


# Any: the program chooses the context and the types of its functions
def register(name: str, function: Callable[..., Any], context: Any) -> None:
    """
    Register `function`, a function of the training program, under `name`, such as `stop`. Some
    functions get the `context` as their last argument.
    """
    processor.handlers.register(name, function, context)


def curve(tls_on: Any, info: Any) -> tuple[str, ...]:  # Any: not checked yet
    """
    Return the options of the command `tft run` that encrypt the bus with keys derived from the
    private key in `info`.

    `tls_on` is the argument `enable_tls` of a function of MindIO, and `info` is its argument
    `tls_info`. Return no options if `tls_on` is False. Raises `Refused` if `info` is not valid.
    """
    if not tls_on:
        return ()
    handlers = processor.handlers
    decrypt = partial(handlers.call, "decrypt") if handlers.has("decrypt") else None
    return tls.options(info, decrypt, processor.variables.certificate_ahead)
