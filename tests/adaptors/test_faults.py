"""
What an exception stands for, and where a thread may be waiting.
"""

import sys
import threading
from collections.abc import Callable
from types import FrameType

import pytest
import torch
import torch.distributed as dist
from tft_pytorch.faults import classify, waiting
from torch import Tensor

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/"


class Declared(Exception):
    """
    What a test tool raises in place of a fault that needs broken hardware.
    """

    tft_fault_kind = "numeric"


class Undeclared(Exception):
    """
    Of a kind that does not exist.
    """

    tft_fault_kind = "weather"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError(GLOO + "pair.cc:553] Connection closed by peer [127.0.0.1]:4711"), "network"),
        (RuntimeError(GLOO + "pair.cc:537] Read error: Connection reset by peer"), "network"),
        (
            RuntimeError(
                GLOO + "unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation"
            ),
            "network",
        ),
        (dist.DistNetworkError("Broken pipe"), "network"),
        (dist.DistBackendError("NCCL error: remote process exited"), "network"),
        (dist.DistStoreError("wait timeout after 60000ms"), "network"),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "memory"),
        (RuntimeError("UCE ERROR: error code is 507053"), "memory"),
        (RuntimeError("HBM MULTI BIT ECC ERROR"), "memory"),
        (Declared(), "numeric"),
        (Undeclared(), None),
        (torch.OutOfMemoryError("CUDA out of memory"), None),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (RuntimeError("CUDA error: device-side assert triggered"), None),
        (ConnectionResetError("by the user's own server"), None),
        (ValueError("Connection closed by peer [it is only a word]"), None),
        (KeyboardInterrupt(), None),
    ],
    ids=lambda value: str(value)[-40:],
)
def test_an_exception_is_classified_by_its_type_and_words(
    error: BaseException, kind: str | None
) -> None:
    """
    When an exception leaves the loop, then it is a fault of a kind, or the user's own.
    """
    assert classify(error) == kind


def raised(outer: BaseException, inner: BaseException, how: str) -> BaseException:
    """
    `outer`, raised while `inner` was handled.
    """
    try:
        try:
            raise inner
        except BaseException as error:
            if how == "from":
                raise outer from error
            if how == "from none":
                raise outer from None
            raise outer  # noqa: B904 (the case in question)
    except BaseException as error:  # noqa: BLE001 (it is what is wanted)
        return error


@pytest.mark.parametrize(
    ("how", "kind"), [("from", "network"), ("while", "network"), ("from none", None)]
)
def test_an_exception_is_what_it_was_raised_from(how: str, kind: str | None) -> None:
    """
    When the user's code wraps a fault, then it is still that fault, unless it says it is not.
    """
    error = raised(ValueError("a step failed"), dist.DistNetworkError("Broken pipe"), how)

    assert classify(error) == kind


def test_a_circle_of_causes_ends() -> None:
    """
    When exceptions are each other's causes, then classifying them ends.
    """
    one, other = ValueError(), ValueError()
    one.__cause__, other.__cause__ = other, one

    assert classify(one) is None


def test_a_backward_may_be_waiting_but_a_hook_in_it_is_not() -> None:
    """
    When the innermost frame is autograd's, then DDP may be waiting inside it; when a hook of the
    user's runs there, then that is not waiting.
    """
    frames: list[FrameType] = []

    def hook(gradient: Tensor) -> Tensor:
        frames.append(sys._getframe())
        return gradient

    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(hook)  # type: ignore[no-untyped-call]  # torch has no types here
    torch.autograd.backward([leaf.sum()])

    caller = frames[0].f_back
    assert not waiting(frames[0])
    assert caller is not None
    assert caller.f_code.co_name == "_engine_run_backward"
    assert waiting(caller)


@pytest.mark.parametrize(
    ("where", "for_others"),
    [("/home/user/train.py", False), ("/packages/tft_pytorch/interruptible.py", True)],
)
def test_who_waits_on_a_lock_is_judged_by_its_caller(where: str, *, for_others: bool) -> None:
    """
    When a thread waits inside `threading`, then it waits for other ranks if who called it does.
    """
    named: dict[str, Callable[[threading.Event], None]] = {}
    exec(compile("def call(event): event.wait()", where, "exec"), named)
    event = threading.Event()
    thread = threading.Thread(target=named["call"], args=(event,))
    thread.start()
    frame = sys._current_frames()[thread.ident or 0]
    while frame.f_code.co_name != "wait" or frame.f_code.co_filename != threading.__file__:
        frame = sys._current_frames()[thread.ident or 0]
    assert waiting(frame) is for_others
    event.set()
    thread.join()


def test_computing_is_not_waiting() -> None:
    """
    When the innermost frame is the user's or one of torch's modules, then nobody is waited for.
    """
    frames: list[FrameType] = []
    layer = torch.nn.Linear(2, 2)
    layer.register_forward_hook(lambda *_: frames.append(sys._getframe()))
    layer(torch.ones(2))
    module = frames[0].f_back

    assert module is not None
    assert module.f_code.co_filename.endswith("torch/nn/modules/module.py")
    assert not waiting(module)
    assert not waiting(sys._getframe())
