"""
The callback `TrainFaultTolerance` for `Model.train`, which is MindSpore's own loop.

MindSpore has a callback of the same name, which works on Ascend devices only. That callback stops,
cleans and repairs devices, and uses a kernel to count the ranks that have begun an update. The
class in this module derives from MindSpore's callback, so that `Model.train` recognises the class.
It works on every device.

As with MindSpore's callback, steps are repeated after a fault, and last checkpoints are saved and
named. Other modules of this adaptor send state between ranks and reduce the gradients. No function
of MindSpore is replaced.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mindspore
from mindspore import nn, train
from mindspore.train.callback import _train_fault_tolerance as stock

from tft.errors import Interrupted, JobEnded, OrderRefused, UsageError
from tft.spi import sync
from tft_mindspore import environment
from tft_mindspore.datasets import refuse_unseeded
from tft_mindspore.groups import GroupBroken
from tft_mindspore.kept_attributes import KeptAttributes
from tft_mindspore.layout import Series, open_series
from tft_mindspore.memory import content, put
from tft_mindspore.process import groups, trained_by_model
from tft_mindspore.state import Part, named_parameters

_ADAPTOR = "mindspore"
_NEEDED = ("TTP", "UCE", "HCCE", "ARF")
_ANYWHERE = ("127.0.0.1", 30051)
"""The controller address to pass to MindIO's interface if the environment names no controller. A
process that a tft agent has started ignores this address, because it knows the real address of the
controller. Any other process uses this address, so all ranks must run on this machine."""

_STEP_FINISH = "STEP FINISH"
_ARF_FINISH = "ARF FINISH"
_FORCE_STOP = "ForceStopError"
_CONNECTION = "HCCEError"
"""`_STEP_FINISH`, `_ARF_FINISH`, `_FORCE_STOP` and `_CONNECTION` are texts in messages of errors.
`Model.train` searches the message of an error for these texts to find out the kind of the error."""


class TrainFaultTolerance(train.TrainFaultTolerance):  # type: ignore[misc]  # MindSpore is untyped
    """
    The callback for `Model.train(..., callbacks=[...])`, in PyNative mode and without a data sink.

    The optimizer must be made with `TrainFaultTolerance.get_optimizer_wrapper(nn.Adam)(...)`.
    """

    def __init__(
        self,
        ckpt_save_path: str | None = None,
        *,
        prefix: str | None = None,
        ranks: Sequence[int] | None = None,
        monitor_config: Mapping[str, object] | None = None,
        **others: Any,  # Any: arguments of MindSpore's callback, of various types
    ) -> None:
        """
        Join the job. Raises `UsageError` for a setup that tft cannot handle.

        `ckpt_save_path` is the directory for last checkpoints. Without `prefix`, their files have
        MindSpore's names. With `prefix`, they have the names of MindSpore Transformers, such as
        `rank_0/PREFIX_rank_0-5_1.ckpt`. `ranks` are the ranks that hold the same state as this
        rank, including this rank; None means all ranks.

        `monitor_config` has the same keys as in MindSpore Transformers. If `MS_ENABLE_TFT` has
        `TRE:1`, an update is refused when the norm of its gradients is above
        `global_norm_spike_threshold`. `others` are arguments of MindSpore's callback, such as
        `ckpt_save_fn` and `initial_step`.
        """
        self._ranks = None if ranks is None else tuple(sorted(ranks))
        self._prefix = prefix
        self._series: Series | None = None
        self._position = _Position(int(others.get("initial_step", 0)))
        self._adopted = self._entered = self._retried = False
        self._begins_again = False
        """True after `Model.train` has entered its loop again because of an incident, until the
        first step in the loop begins. When that step begins, the attributes of the other callbacks
        are restored once more."""
        self.kept: KeptAttributes | None = None
        self.strategies: tuple[str, ...] = ()
        """The strategies that the environment enables, by tft's names, such as `recover`."""
        if prefix is not None:
            if ckpt_save_path is None or "ckpt_save_fn" in others:
                raise UsageError(
                    "prefix names the files of last checkpoints under ckpt_save_path: give both, "
                    "and no ckpt_save_fn with them"
                )
            others["ckpt_save_fn"] = self._write
        asked = environment.settle()
        _check_enabled(asked)
        _settle_norms(asked, monitor_config or {})
        super().__init__(ckpt_save_path, **others)

    # ---------------------------------------------------------------- methods that MindSpore's constructor calls

    def _check_init(self) -> None:
        """
        Check the setup and join the job. The constructor of MindSpore's callback calls this method.
        In MindSpore's callback, the method checks that the device is an Ascend device.

        Raises `UsageError` for a setup that tft cannot handle.
        """
        asked = environment.settle()
        if mindspore.get_context("mode") != mindspore.PYNATIVE_MODE:
            raise UsageError(
                "a compiled step cannot be interrupted and repeated in the same process: train "
                "with mindspore.set_context(mode=mindspore.PYNATIVE_MODE)"
            )
        self.strategies = asked.strategies
        trained_by_model(self)
        try:
            from mindio_ttp import framework_ttp
            from mindio_ttp import hosted_mode as hosted
        except ModuleNotFoundError as error:
            raise UsageError(
                "Model.train uses tft through the interface of MindIO, which needs the package "
                "tft-mindio: pip install tft-mindio"
            ) from error
        self.tft = framework_ttp
        self._hosted = hosted
        rank, world = environment.place()
        if self._ranks is not None and rank not in self._ranks:
            raise UsageError(
                "the argument ranks must name the ranks that hold the same state as this rank, "
                f"{rank}, but {list(self._ranks)} does not contain it"
            )
        hosted.for_mindspore()
        self.tft.tft_init_processor(
            rank, world, False, False, "",
            enable_uce="retry" in asked.strategies, enable_arf="recover" in asked.strategies,
        )  # fmt: skip
        self._session = hosted.start(*self._controller(asked), _ADAPTOR)
        hosted.count_by(lambda: self._position.step)

    def _controller(self, asked: environment.Environment) -> tuple[str, int]:
        if asked.address is None and asked.port is None:
            return _ANYWHERE
        return asked.controller()

    def _tft_register(self) -> None:
        """
        Register the functions that save and rename checkpoints. MindSpore's constructor calls this
        method.

        MindSpore's callback also registers functions that stop a rank, clean the rank, repair its
        state and form groups. The hooks of the adaptor do this work, so these functions are not
        registered here.
        """
        self.tft.tft_register_save_ckpt_handler(stock._save_checkpoint_on_failure, self)
        self.tft.tft_register_rename_handler(stock._rename_save_result, self)

    @classmethod
    def get_optimizer_wrapper(cls, origin_opt_cls: type) -> type:
        """
        Return a subclass of the optimizer class `origin_opt_cls`. Before each update, the subclass
        averages the gradients over all ranks that hold the same state, and opens an update window.

        The subclass overrides `__call__`, which is Python code in PyNative mode. MindSpore still
        compiles the computation of the update (`construct`), so the update has the same bits as
        that of `origin_opt_cls`.
        """
        return _marked(origin_opt_cls)

    # ---------------------------------------------------------------- methods that MindSpore's loop calls

    def on_train_begin(self, run_context: train.RunContext) -> None:
        """
        Pass the training state to tft, in the first call. In a call after a rollback, set
        MindSpore's step counter.
        """
        super().on_train_begin(run_context)
        told = self.cb_params
        # set the entry `net_outputs`, because MindSpore reads it even if no step has been computed
        told.setdefault("net_outputs", None)
        if not self._adopted:
            self._adopt(told)
        if self._retried:
            # Correct the counter of steps, because MindSpore has set it back to the start of the
            # epoch in which training continues.
            told.cur_step_num = self._position.step - self.initial_step
            self._put_back()
            self._begins_again = True

    def on_train_step_begin(self, run_context: train.RunContext) -> None:
        """
        End the previous step, because all callbacks of that step have been called by now. Record
        the number of the present step. In the first call, also tell tft that the training loop
        begins.

        In a replacement process, the first call raises a `RuntimeError`. This error makes
        `Model.train` continue at the step of the other ranks.
        """
        super().on_train_step_begin(run_context)
        if self._begins_again:
            # Restore the attributes once more: `on_train_begin` of callbacks that come after this
            # one may have set them anew since the first time.
            self._put_back()
            self._begins_again = False
        if not self._entered:
            self._note_callbacks()
            self._enter()
        self._end_step()
        told = run_context.original_args()
        self._position.step = told.cur_step_num + self.initial_step

    def _enter(self) -> None:
        """
        Tell tft that this rank enters its training loop, and wait for the other ranks.

        If training continues at another step, raise a `RuntimeError` that makes `Model.train` go to
        that step. Raises `UsageError` if the first epoch is not the one that follows after
        `initial_step` steps.
        """
        self._entered = True
        before, batches = self._epochs_before(self.cb_params), self.cb_params.batch_num
        if self.cb_params.cur_epoch_num != before + 1 and not self._retried:
            raise UsageError(
                f"{self.initial_step} steps were trained before this run, and an epoch has "
                f"{batches} steps, but Model.train begins with epoch "
                f"{self.cb_params.cur_epoch_num}: give Model.train the argument "
                f"initial_epoch={before}"
            )
        if self._session.incarnation > 0 and self._reenters:
            raise RuntimeError(f"{_ARF_FINISH}: this process replaces another one")
        at = self._position.step
        self._hosted.enter()
        if self._position.step != at:
            raise RuntimeError(f"{_STEP_FINISH}: training goes on at another step")

    def _end_step(self, *, stopped: bool = False) -> None:
        """
        End the step whose update window was closed last, if it has not ended. Pass `stopped=True`
        if a callback has stopped the training.

        If this rank must leave its loop after the step, raise a `RuntimeError` that `Model.train`
        recognises.
        """
        step = self._position.step
        self._note_callbacks(stopped=stopped)
        try:
            self._session.end_step()
        except Interrupted:
            if not self._reenters:
                self._await(self.tft.ReportState.RS_STEP_FINISH)
            if self._reenters or self._position.step != step:
                raise RuntimeError(f"{_STEP_FINISH}: an incident interrupts the training") from None

    def _note_callbacks(self, *, stopped: bool = False) -> None:
        assert self.kept is not None  # the method `_adopt` has set `kept`
        self.kept.note(self._position.step, whole=True, stopped=stopped)
        for what, sentence in self.kept.unkept():
            self._session.unkept(what, sentence)

    def _put_back(self) -> None:
        assert self.kept is not None  # the method `_adopt` has set `kept`
        self.kept.put_back()

    def update(self, gradients: Sequence[Any], write: Callable[[tuple[Any, ...]], Any]) -> Any:
        """
        Average the gradients, open the update window, and call the function `write` with the
        averages. `write` makes one update of the optimizer. Return the result of `write`.

        Gradients and result are Tensors, which have no type for the type checker. If this rank must
        leave the training loop, raise a `RuntimeError` that `Model.train` recognises.
        """
        try:
            group = groups().present
            summed = tuple(group.mean(list(gradients), self._ranks))
        except GroupBroken as broken:
            raise self._out(self._left_by(broken)) from None
        self._open()
        return write(summed)

    def _open(self) -> None:
        try:
            self.tft.tft_start_updating_os()
        except RuntimeError as stopped:
            raise self._out(stopped) from None

    def _left_by(self, broken: GroupBroken) -> RuntimeError:
        """
        Return the error that tells `Model.train` why the process group no longer works.

        If tft itself has closed the connections (`Group.shut`), the error says that this rank was
        stopped. Otherwise the error says that a connection was lost, which is a fault.
        """
        try:
            cut = groups().present.broken
        except GroupBroken:
            cut = True
        return RuntimeError(f"{_FORCE_STOP if cut else _CONNECTION}: {broken}")

    @property
    def _reenters(self) -> bool:
        """
        True if `Model.train` enters its loop again after an incident.

        `Model.train` enters its loop again if `retry` or `recover` is enabled. Otherwise it treats
        every error that leaves its loop as an unknown fault of this rank, and ends.
        """
        return "retry" in self.strategies or "recover" in self.strategies

    def _out(self, error: RuntimeError) -> RuntimeError:
        """
        Return the error that this rank raises to leave its loop because of another rank's fault.

        If `Model.train` does not enter its loop again after such an error, first report the error
        to tft and wait for the next order. Raises `JobEnded` if tft orders the end of the job.
        """
        if not self._reenters:
            states = self.tft.ReportState
            failed = _CONNECTION in str(error)
            self._await(states.RS_HCCL_FAILED if failed else states.RS_NORMAL)
        return error

    def _await(self, state: Any) -> None:  # Any: a ReportState, which gives mypy no types
        """
        Report `state` to tft, and wait until training can continue. Raises `JobEnded` if the job
        ends instead.
        """
        self.tft.tft_report_error(state.value)
        if self.tft.tft_wait_next_action() == self.tft.Action.EXIT.value:
            raise JobEnded(self._hosted.exit_code())

    # Any: `cb_params` is an object of MindSpore, which gives mypy no types
    def _end_update_report(self, cb_params: Any) -> None:
        """
        Close the update window. MindSpore calls this method at the end of each step. For tft the
        step ends later (see `on_train_step_begin`), because MindSpore may call further callbacks
        for the same step.
        """
        # open an update window even if this step has made no update, because tft expects an update
        # window in each step
        if not self._hosted.in_window():
            self._open()
        step = self.cur_step_num + self.initial_step
        self.tft.tft_end_updating_os(step)
        self.tft.tft_pause_train(step)

    def _reset_acc_grads(self) -> None:
        """
        Set the accumulated gradients to zero, and set the dataset to the step that all ranks agreed
        on. MindSpore calls this method before it enters its loop again at that step.
        """
        self._retried = True
        network = self.cb_params.train_network
        sums = {p.name: p for p in network.get_parameters() if p.name.startswith("accu_grads")}
        put({name: content(p) * 0 for name, p in sums.items()}, sums)
        data = self.cb_params.train_dataset
        done = self._position.step
        size = data.get_dataset_size()
        # Set the step of the data, because otherwise MindSpore would draw the data in the order of
        # the first epoch.
        data.set_init_step(done if done < self._epochs * size else 0)

    def end(self, run_context: train.RunContext) -> None:
        """
        Report that this rank has trained all steps. Return when all ranks have trained all steps.

        If the ranks go back to an earlier step, raise a `RuntimeError` that makes `Model.train` go
        back to this step too.
        """
        if self._begins_again:
            self._put_back()
        else:
            self._end_step(stopped=run_context.get_stop_requested())
        if not self._hosted.finish():
            raise RuntimeError(f"{_STEP_FINISH}: the other ranks have not reached the end")

    # ---------------------------------------------------------------- the training state

    def _adopt(self, told: Any) -> None:  # Any: an object of MindSpore, which gives mypy no types
        optimizer = self._get_optim(told)
        if not isinstance(optimizer, _Marks):
            name = type(optimizer).__name__
            raise UsageError(
                f"the optimizer must tell tft when it changes the state: make it with "
                f"TrainFaultTolerance.get_optimizer_wrapper({name})(...), not with {name}(...)"
            )
        if told.loss_scale_mananger and told.loss_scale_mananger.get_drop_overflow_update():
            raise UsageError(
                "the loss scale manager drops an update when gradients overflow, but would do so "
                "only on some ranks: set drop_overflow_update=False"
            )
        refuse_unseeded(told.train_dataset)
        rank, world = self._session.rank, self._session.world
        ranks = self._ranks or tuple(range(world))
        same = {"type": 1, "rank_list": list(ranks), "replica_cnt": len(ranks), "replica_shift": 0}
        self.tft.tft_set_optimizer_replica(rank, [same])
        self.has_init_replica = True
        self.kept = KeptAttributes(told.list_callback, self._position.step)
        self._session.adopt(
            model=told.network, optimizer=optimizer, data=self._position,
            shards=self._parts(told.network, optimizer, ranks),
        )  # fmt: skip
        self._epochs = told.epoch_num + self._epochs_before(told)
        if self._prefix is not None:
            self._series = open_series(Path(self.ckpt_save_path), rank, self._prefix)
        optimizer.tft_callback(self)
        self._adopted = True

    def _parts(
        self, network: nn.Cell, optimizer: nn.Cell, ranks: tuple[int, ...]
    ) -> Mapping[str, Part]:
        if len(ranks) == self._session.world:
            return {}
        names = [*named_parameters(network), *named_parameters(optimizer)]
        return {f"part{ranks[0]}": Part(names=tuple(dict.fromkeys(names)), ranks=ranks)}

    def _epochs_before(self, told: Any) -> int:  # Any: MindSpore gives mypy no types
        return int(self.initial_step) // int(told.batch_num)

    def _is_params_consistent(self) -> bool:
        """
        Return whether the parameters are consistent, which means that no update window is open.
        MindSpore calls this method before it writes a checkpoint.
        """
        return not self._hosted.in_window()

    # ---------------------------------------------------------------- the last checkpoint

    def save(self, directory: Path, shard: str, step: int) -> list[str]:
        """
        Let MindSpore save the state to its own checkpoint. Write a small file (a note) under
        `directory`, which says that the state was saved. Return the file name of the note.
        """
        at = self._hosted.program_step(step)
        batches = int(self.cb_params.batch_num)
        # MindSpore puts the numbers of step and epoch into the name of the checkpoint. Set both
        # numbers to those of the saved step, because this rank may be in another step.
        self.cur_step_num, self.cur_epoch_num = at, (at - 1) // batches + 1
        self.global_step = self._get_optim(self.cb_params).global_step
        self._hosted.save(at, [self._session.rank])
        note = self._note(directory, shard)
        note.write_text(json.dumps({"step": at, "rank": self._session.rank}))
        sync(note)
        return [note.name]

    def rename(self, directory: Path, files: Sequence[str], step: int) -> list[str]:
        """
        Let MindSpore give its checkpoint the final name. This method is called when all ranks have
        saved. Later calls for the same `directory` do nothing. `files` are the names of the files
        that `save` has written on all ranks. The result is empty, because tft need not keep any
        further file in `directory`.
        """
        mark = directory / "named"
        notes = [directory / name for name in files if name.endswith(_NOTE)]
        if notes and not mark.exists():
            self._hosted.rename(int(json.loads(notes[0].read_bytes())["step"]))
            mark.touch()
        return []

    def has_saved(self, directory: Path, shard: str) -> bool:
        """
        Return True if MindSpore itself has saved the state in a directory of its own. Then
        `directory` has only the small file that `save` has written instead of the state.

        Raises `OrderRefused` if the step from which the script continues is not the step that this
        file names.
        """
        note = self._note(directory, shard)
        if not note.exists():
            return False
        step = int(json.loads(note.read_bytes())["step"])
        if step != self._position.step:
            raise OrderRefused(
                f"the checkpoint {directory} was saved by the script's own callback at step "
                f"{step}, but the script continues from step {self._position.step}: load that "
                f"checkpoint, and give the callback initial_step={step}; or use another --run-dir"
            )
        return True

    def _note(self, directory: Path, shard: str) -> Path:
        return directory / f"{shard}{_NOTE}"

    # Any: `told` is an object of MindSpore, which gives mypy no types
    def _write(self, told: Any, beside: Mapping[str, Any]) -> None:
        assert self._series is not None  # the method `_adopt` has set `_series`
        step = (told.cur_step_num - 1) % told.batch_num + 1
        kept = {"epoch_num": told.cur_epoch_num, "step_num": told.cur_step_num}
        self._series.save(
            told.cur_epoch_num, step,
            lambda path: mindspore.save_checkpoint(
                told.train_network, str(path), integrated_save=False, append_dict=kept
            ),
        )  # fmt: skip
        self._series.note(told.cur_epoch_num, step)


_NOTE = ".saved.json"
"""The end of the name of the small file which says that MindSpore has saved the shard in another
place."""


def _check_enabled(asked: environment.Environment) -> None:
    """
    Check which features the environment enables.

    Raises `UsageError` if the environment enables none of the features in `_NEEDED`, or a feature
    of MindSpore's callback that this callback does not have.
    """
    if not any(feature in asked.features for feature in _NEEDED):
        raise UsageError(
            f"{environment.ENABLE} enables none of {', '.join(_NEEDED)}: expected is, for example, "
            f"{environment.ENABLE}={{TTP:1,UCE:1,ARF:1}}"
        )
    if asked.features.get("TRE") == "2":
        raise UsageError(
            f"{environment.ENABLE} has TRE:2, with which MindSpore itself restores a copy of the "
            "state, on some ranks and not on others: use TRE:1, with which all ranks compute the "
            "step again"
        )


def _settle_norms(asked: environment.Environment, monitor: Mapping[str, object]) -> None:
    """
    If the environment enables the feature TRE, which refuses updates with too large gradients, set
    the largest allowed norm of the gradients to the threshold in `monitor`.

    Raises `UsageError` if TRE is enabled without a threshold, or a threshold is given without TRE.
    """
    limit = environment.norm_limit(monitor, "monitor_config")
    if (limit is None) == ("TRE" in asked.features):
        raise UsageError(
            f"{environment.ENABLE} with TRE:1 and monitor_config with {environment.CHECKS}: True "
            f"belong together: give the callback monitor_config={{{environment.CHECKS!r}: True, "
            f"{environment.THRESHOLD!r}: NORM}} with TRE:1, and leave both out otherwise"
        )
    if limit is not None:
        environment.refuse_norms(limit)


class _Position:
    """
    The data position of a script that trains with `Model.train`. The position is the number of
    steps for which data was drawn, earlier runs of the script included.
    """

    def __init__(self, step: int) -> None:
        self.step = step

    def state_dict(self) -> dict[str, int]:
        """
        Return the position as a dict of numbers.
        """
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """
        Set the step from which training continues.
        """
        self.step = state["step"]


class _Marks:
    """
    The base class of all optimizer classes that `get_optimizer_wrapper` returns. Such an optimizer
    calls the callback before each update.
    """

    _callback: TrainFaultTolerance | None = None

    def tft_callback(self, callback: TrainFaultTolerance) -> None:
        """
        Set the callback that reduces the gradients of each update and opens the update window.
        """
        # set the attribute with `object.__setattr__`, because MindSpore's class Cell handles an
        # ordinary assignment itself
        object.__setattr__(self, "_callback", callback)


@cache
def _marked(origin: type) -> type:
    # Override `__call__` and not `construct`, because MindSpore compiles `construct` and would drop
    # the calls of Python functions in it.
    class Marked(_Marks, origin):  # type: ignore[misc]  # its base is not known
        """
        A subclass of the user's optimizer that averages its gradients and opens an update window
        for each update.
        """

        def __call__(self, gradients: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            callback = self._callback
            if callback is None:
                raise UsageError(
                    "an optimizer class from TrainFaultTolerance.get_optimizer_wrapper works only "
                    "in Model.train with the callback TrainFaultTolerance of tft_mindspore"
                )
            step = super().__call__
            return callback.update(gradients, lambda summed: step(summed, *args, **kwargs))

    Marked.__name__ = Marked.__qualname__ = f"Marked{origin.__name__}"
    return Marked
