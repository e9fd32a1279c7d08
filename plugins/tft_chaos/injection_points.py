"""
The places in a step where chaos makes a fault.

Each function `watch_…` installs hooks in the objects that the user has passed to tft, so that the
fault happens in the phase that the spec (the argument of `--chaos`) names. The hooks also record
evidence that the process was in that phase.

The functions expect objects of torch, but do not import torch: they only call methods of the
objects. For objects of MindSpore they call `mindspore_hooks.py`.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps

from tft.spi import SessionView
from tft_chaos import mindspore_hooks as cells
from tft_chaos.actions import ChaosMissed, Theirs, act
from tft_chaos.barrier_files import BarrierFiles
from tft_chaos.collective import await_peers
from tft_chaos.group import Victim
from tft_chaos.record import Firing, Ledger
from tft_chaos.spec import Hang, Kill, Raise, Slow, Spec, Stop


class Blow:
    """
    Carries out one spec (an argument of `--chaos`) in the process of a rank at which the spec is
    aimed. Decides when the fault is due, and makes the fault.
    """

    def __init__(
        self,
        victim: Victim,
        spec: Spec,
        session: SessionView,
        ledger: Ledger,
        marks: BarrierFiles,
    ) -> None:
        self.spec = spec
        self.session = session
        self.victim = victim
        self._ledger = ledger
        self._marks = marks
        self._fired = ledger.fired(victim.name)

    @property
    def spent(self) -> bool:
        """
        True if the spec (an argument of `--chaos`) has already made all faults that it asks for.
        """
        return self._fired >= self.spec.count

    def due(self, step: int) -> bool:
        """
        Return whether the spec (an argument of `--chaos`) makes its next fault at `step`.
        """
        return not self.spent and step == self.spec.step + self._fired

    @contextmanager
    def noting_a_miss(self) -> Iterator[None]:
        """
        If a `ChaosMissed` is raised in the `with` block, record the reason in the ledger, and let
        the exception pass.
        """
        try:
            yield
        except ChaosMissed as missed:
            self._ledger.miss(self.victim.name, self.spec.text, str(missed))
            raise

    def enter(self, step: int, evidence: Mapping[str, object]) -> bool:
        """
        Record that the spec makes its next fault. Return True if the caller must make the fault
        now. Return False if an earlier process or run has recorded this fault already.

        If the spec is aimed at several ranks, first wait until all of them have reached the place
        of the fault. Raises `ChaosMissed` if one of these ranks does not reach it in time.
        """
        self._fired += 1
        with self.noting_a_miss():
            self.victim.await_others(self._fired, self._ledger, self._marks)
        firing = Firing(
            spec=self.spec.text,
            at=time.monotonic(),
            rank=self.session.rank,
            incarnation=self.session.incarnation,
            step=step,
            phase=self.spec.phase,
            evidence=evidence,
        )
        return self._ledger.enter(self.victim.name, self._fired, firing)

    def fall(self, step: int, evidence: Mapping[str, object]) -> None:
        """
        Record that the spec makes its next fault, and make the fault. Make no fault if an earlier
        process or run has recorded this fault already.

        Return only if the process continues after the fault.
        """
        if self.enter(step, evidence) and isinstance(self.spec.action, Kill | Stop | Hang | Raise):
            act(self.spec.action)


def watch_forward(blow: Blow, model: Theirs) -> None:
    """
    Arrange that the fault of a spec (an argument of `--chaos`) is made inside a forward pass of the
    model, when the first submodule has been computed.

    If the phase of the spec is `forward`, this is a forward pass of a training step. If the phase
    is `evaluation`, it is a forward pass in the evaluation after a step.
    """
    inside, session = False, blow.session
    evaluates = blow.spec.phase == "evaluation"

    def enter(*_: object) -> None:
        nonlocal inside
        inside = True

    def leave(*_: object) -> None:
        nonlocal inside
        inside = False

    def computed(name: str) -> Callable[..., None]:
        def fall(*_: object) -> None:
            # an evaluation comes after its step has ended, so `session.step` is the next step
            # already
            step = session.step - evaluates
            if inside and session.evaluating == evaluates and blow.due(step):
                blow.fall(step, {"computed": name})

        return fall

    if cells.is_cell(model):
        cells.watch_parts(model, computed)
        cells.watch_calls(model, enter, leave)
        return
    model.register_forward_pre_hook(enter)
    # `named_modules` includes the model itself, so a model without submodules gets a hook too
    for name, module in model.named_modules():
        module.register_forward_hook(computed(name))
    model.register_forward_hook(leave, always_call=True)


def watch_speed(blow: Blow, action: Slow, model: Theirs) -> None:
    """
    Arrange that, from the step of the spec on, every forward pass takes longer by the factor of
    `action`.
    """
    began = 0.0
    slow = False

    def enter(*_: object) -> None:
        nonlocal began, slow
        if blow.due(blow.session.step):
            slow = blow.enter(blow.session.step, {"factor": action.factor})
        began = time.monotonic()

    def leave(*_: object) -> None:
        until = began + (time.monotonic() - began) * action.factor
        while slow and time.monotonic() < until:
            pass  # use the processor, as really slow code does, and do not sleep

    if cells.is_cell(model):
        cells.watch_calls(model, enter, leave)
        return
    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave)


def watch_gradients(model: Theirs, seen: Callable[[int, int], None]) -> None:
    """
    Arrange that the function `seen` is called as `seen(number, of)` whenever a gradient is computed
    in a backward pass of the model.

    `number` counts the gradients of the pass from 1, in the order in which they are computed. `of`
    is the number of trained parameters.
    """
    number = of = 0

    def begin(*_: object) -> None:
        nonlocal number
        number = 0

    def came(_: object) -> None:
        nonlocal number
        number += 1
        seen(number, of)

    if cells.is_cell(model):
        of = cells.watch_gradients(model, begin, came)
        return
    parameters = [p for p in model.parameters() if p.requires_grad]
    of = len(parameters)
    model.register_forward_pre_hook(begin)
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(came)


def watch_backward(blow: Blow, model: Theirs) -> None:
    """
    Arrange that the fault of a spec (an argument of `--chaos`) is made when the second gradient of
    a backward pass is computed. If the model has only one trained parameter, the fault is made when
    the gradient of this parameter is computed.
    """

    def seen(number: int, of: int) -> None:
        if number == min(2, of) and blow.due(blow.session.step):
            blow.fall(blow.session.step, {"gradients": number, "of": of})

    watch_gradients(model, seen)


def watch_collective(blow: Blow, marks: BarrierFiles, model: Theirs) -> None:
    """
    Arrange that this rank waits when it has computed its first gradient, until all ranks that get
    no fault are inside their last collective of the step. Then chaos makes the fault on this rank.

    At that time this rank has not started a collective of the step.
    """
    others = [rank for rank in range(blow.session.world) if rank not in blow.victim.ranks]

    def seen(number: int, of: int) -> None:
        step = blow.session.step
        if number == 1 and blow.due(step):
            with blow.noting_a_miss():
                peers = await_peers(marks, others, step)
            blow.fall(step, {"gradients": number, "of": of, **peers})

    watch_gradients(model, seen)


def mark_collectives(
    specs: Sequence[Spec], marks: BarrierFiles, session: SessionView, model: Theirs
) -> None:
    """
    Arrange that this rank writes a marker file when it has computed its last gradient, in each step
    in which a spec in `specs` makes a fault.

    `specs` are specs (arguments of `--chaos`) of phase `collective` that are aimed at other ranks.
    Those ranks wait for the marker files before they make their fault.
    """

    def seen(number: int, of: int) -> None:
        step = session.step
        if number == of and any(s.step <= step < s.step + s.count for s in specs):
            marks.enter(step, on_device=on_device)

    # for a Cell of MindSpore it is not known here whether it computes on a device, so assume the
    # host
    on_device = not cells.is_cell(model) and any(p.device.type != "cpu" for p in model.parameters())

    watch_gradients(model, seen)


def watch_update(blow: Blow, optimizer: Theirs) -> None:
    """
    Arrange that the fault of a spec (an argument of `--chaos`) is made inside the optimizer's step,
    when some parameters are changed and other parameters are not.

    A sharded optimizer, such as torch's ZeroRedundancyOptimizer, has another optimizer for this
    rank's share in its attribute `optim`. In this case the fault is made when the optimizer in
    `optim` has changed only some of its parameters. The optimizer's `step` raises `ChaosMissed` if
    all parameters are changed at once.
    """
    if cells.is_cell(optimizer):

        def halfway_there(changed: int, of: int) -> None:
            blow.fall(blow.session.step, {"changed": changed, "of": of})

        cells.watch_halfway(optimizer, lambda: blow.due(blow.session.step), halfway_there)
        return
    local = optimizer.optim if hasattr(optimizer, "optim") else optimizer
    if not hasattr(local, "param_groups"):
        with blow.noting_a_miss():
            raise ChaosMissed(
                "chaos: phase=update needs an optimizer with param_groups, as those of torch, but "
                f"{type(local).__name__} has none: choose another phase, such as between or tail"
            )
    # this is the optimizer's own method `step`, or a function by which a learning-rate scheduler
    # has replaced that method
    whole = local.step

    @wraps(whole)
    def watched(*arguments: Theirs, **named: Theirs) -> Theirs:
        step = blow.session.step
        if not blow.due(step):
            return whole(*arguments, **named)
        groups = local.param_groups
        parameters = [p for group in groups for p in group["params"]]
        before = [own_part(p).clone() for p in parameters]

        def halfway() -> None:
            changed = sum(not own_part(p).equal(b) for p, b in zip(parameters, before, strict=True))
            if 0 < changed < len(parameters) and blow.due(step):
                blow.fall(step, {"changed": changed, "of": len(parameters)})

        local.param_groups = _Groups(groups, halfway)
        try:
            result = whole(*arguments, **named)
        finally:
            local.param_groups = groups
        with blow.noting_a_miss():
            if blow.due(step):
                raise ChaosMissed(
                    "chaos: phase=update needs an optimizer that changes its parameters one after "
                    f"another, but the optimizer of this script has changed its {len(parameters)} "
                    "parameters at once: choose another phase"
                )
        return result

    local.step = watched


def own_part(parameter: Theirs) -> Theirs:
    """
    Return this rank's part of a parameter: the local tensor of a distributed parameter, or else the
    whole parameter.

    Reading a whole distributed parameter would need a collective with the other ranks.
    """
    own = parameter.detach()
    return own.to_local() if hasattr(own, "to_local") else own


class _Groups(list[dict[str, Theirs]]):
    """
    A list of parameter groups that calls `on_the_way` whenever the optimizer has finished a group.

    If only one group has parameters, that group is split into two, so that there is a moment when
    some parameters are changed and others are not.
    """

    def __init__(self, groups: Sequence[dict[str, Theirs]], on_the_way: Callable[[], None]) -> None:
        groups = [group for group in groups if group["params"]]
        if len(groups) == 1:
            params = groups[0]["params"]
            middle = len(params) // 2
            groups = [groups[0] | {"params": part} for part in (params[:middle], params[middle:])]
        super().__init__(groups)
        self._on_the_way = on_the_way

    def __iter__(self) -> Iterator[dict[str, Theirs]]:
        for group in super().__iter__():
            yield group
            self._on_the_way()
