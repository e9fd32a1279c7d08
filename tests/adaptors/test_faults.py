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
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
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
    When an exception leaves the loop, then it is one of torch's for a broken connection, or none that
    the adaptor knows.
    """
    assert classify(error) == kind


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
