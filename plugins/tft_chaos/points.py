"""
The places in a step where chaos strikes. Each function here watches the objects that the user
handed over, so that its blow falls where the phase says, and knows how that can be shown.

The objects are used as torch's are, but by their methods alone: nothing of torch is imported. How those of
MindSpore are used is in `cells.py`.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps

from tft.hooks import SessionView
from tft_chaos import cells
from tft_chaos.actions import ChaosMissed, Theirs, act, flip
from tft_chaos.collective import await_peers
from tft_chaos.marks import Marks
from tft_chaos.record import Firing, Ledger
from tft_chaos.spec import Bitflip, Hang, Kill, Raise, Slow, Spec, Stop


class Blow:
    """
    One spec in the process that holds its rank: whether it is due, and its fall.
    """

    def __init__(self, index: int, spec: Spec, session: SessionView, ledger: Ledger) -> None:
        self.spec = spec
        self.session = session
        self._index = index
        self._ledger = ledger
        self._fired = ledger.fired(index)

    @property
    def spent(self) -> bool:
        """
        It has fallen as often as it was to.
        """
        return self._fired >= self.spec.count

    def due(self, step: int) -> bool:
        """
        It is to fall at this step.
        """
        return not self.spent and step == self.spec.step + self._fired

    def enter(self, step: int, evidence: Mapping[str, object]) -> bool:
        """
        Write it down. True: it falls now.
        """
        self._fired += 1
        firing = Firing(
            spec=self.spec.text,
            at=time.monotonic(),
            rank=self.session.rank,
            incarnation=self.session.incarnation,
            step=step,
            phase=self.spec.phase,
            evidence=evidence,
        )
        return self._ledger.enter(self._index, self._fired, firing)

    def fall(self, step: int, evidence: Mapping[str, object]) -> None:
        """
        Write it down and do it. Returns, if at all, when the process is to go on.
        """
        if self.enter(step, evidence) and isinstance(self.spec.action, Kill | Stop | Hang | Raise):
            act(self.spec.action)


def watch_forward(blow: Blow, model: Theirs) -> None:
    """
    Fall inside the model call, when the first of its submodules has been computed: in a step, or in a function that
    is called after one.
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
            step = session.step - evaluates  # it is called after the step before
            if inside and session.evaluating == evaluates and blow.due(step):
                blow.fall(step, {"computed": name})

        return fall

    if cells.is_cell(model):
        cells.watch_parts(model, computed)
        cells.watch_calls(model, enter, leave)
        return
    model.register_forward_pre_hook(enter)
    for name, module in model.named_modules():  # the model itself is one: for want of another
        module.register_forward_hook(computed(name))
    model.register_forward_hook(leave, always_call=True)


def watch_speed(blow: Blow, action: Slow, model: Theirs) -> None:
    """
    Stretch every forward, from the step on.
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
            pass  # busy, as a slow processor is

    if cells.is_cell(model):
        cells.watch_calls(model, enter, leave)
        return
    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave)


def watch_gradients(model: Theirs, seen: Callable[[int, int], None]) -> None:
    """
    Call `seen(number, of)` in the hook of each gradient of a backward pass, as it comes.
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
    Fall in a gradient's hook, when it is the second to have come.
    """

    def seen(number: int, of: int) -> None:
        if number == min(2, of) and blow.due(blow.session.step):
            blow.fall(blow.session.step, {"gradients": number, "of": of})

    watch_gradients(model, seen)


def watch_collective(blow: Blow, marks: Marks, model: Theirs) -> None:
    """
    Fall at the first gradient, before any collective of this step has been launched here, once
    all the others are inside theirs.
    """
    others = [rank for rank in range(blow.session.world) if rank != blow.session.rank]

    def seen(number: int, of: int) -> None:
        step = blow.session.step
        if number == 1 and blow.due(step):
            evidence = {"gradients": number, "of": of, **await_peers(marks, others, step)}
            blow.fall(step, evidence)

    watch_gradients(model, seen)


def mark_collectives(
    specs: Sequence[Spec], marks: Marks, session: SessionView, model: Theirs
) -> None:
    """
    Be a peer: leave a mark at the last gradient of the steps in which others wait for it.
    """

    def seen(number: int, of: int) -> None:
        step = session.step
        if number == of and any(s.step <= step < s.step + s.count for s in specs):
            marks.enter(step)

    watch_gradients(model, seen)


def watch_update(blow: Blow, optimizer: Theirs) -> None:
    """
    Fall inside the optimizer's step, when it has changed some parameters and not the others. One that
    leaves the work on this rank's share to another has that one as `optim`, as torch's own
    ZeroRedundancyOptimizer does.
    """
    if cells.is_cell(optimizer):

        def halfway_there(changed: int, of: int) -> None:
            blow.fall(blow.session.step, {"changed": changed, "of": of})

        cells.watch_halfway(optimizer, lambda: blow.due(blow.session.step), halfway_there)
        return
    local = optimizer.optim if hasattr(optimizer, "optim") else optimizer
    whole = optimizer.step  # whatever stands there: a scheduler may have put its own in its place

    @wraps(whole)
    def watched(*arguments: Theirs, **named: Theirs) -> Theirs:
        step = blow.session.step
        if not blow.due(step):
            return whole(*arguments, **named)
        groups = local.param_groups
        parameters = [p for group in groups for p in group["params"]]
        before = [_own(p).clone() for p in parameters]

        def halfway() -> None:
            changed = sum(not _own(p).equal(b) for p, b in zip(parameters, before, strict=True))
            if 0 < changed < len(parameters) and blow.due(step):
                blow.fall(step, {"changed": changed, "of": len(parameters)})

        local.param_groups = _Groups(groups, halfway)
        try:
            result = whole(*arguments, **named)
        finally:
            local.param_groups = groups
        if blow.due(step):
            raise ChaosMissed(
                "chaos: phase update needs an optimizer that changes one parameter before another, "
                f"and this one changed its {len(parameters)} at once"
            )
        return result

    optimizer.step = watched


def _own(parameter: Theirs) -> Theirs:
    """
    What this rank has of it: to compare a distributed one takes all ranks, and the others are not there.
    """
    own = parameter.detach()
    return own.to_local() if hasattr(own, "to_local") else own


class _Groups(list[dict[str, Theirs]]):
    """
    Parameter groups that tell when an optimizer, on its way through them, goes on to the next. A
    single group with anything in it is cut in the middle.
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


def flip_bit(blow: Blow, action: Bitflip, optimizer: Theirs, step: int) -> None:
    """
    Between two steps: flip a bit of the largest element of the first parameter, or of what the
    optimizer keeps for it.
    """
    if cells.is_cell(optimizer):
        array = cells.array_of(optimizer, action.part)
        largest = int(abs(array).argmax())
        if blow.enter(step, {"part": action.part, "element": largest}):
            cells.flip(array, largest)
        return
    parameter = optimizer.param_groups[0]["params"][0]
    tensor = parameter if action.part == "param" else optimizer.state[parameter].get(action.part)
    if tensor is None:
        raise ChaosMissed(
            f"chaos: the optimizer keeps {sorted(optimizer.state[parameter])} of its first "
            f"parameter, and no {action.part}"
        )
    element = int(_own(tensor).abs().argmax())
    if blow.enter(step, {"part": action.part, "element": element}):
        flip(_own(tensor), element)
