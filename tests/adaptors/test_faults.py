"""
How the adaptor classifies exceptions, and in which functions a thread counts as waiting for other
ranks.
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
def test_exception_is_classified_by_type_and_message(
    error: BaseException, kind: str | None
) -> None:
    """When an exception leaves the loop, then the adaptor classifies it as a network fault of
    torch, or as an unknown fault."""
    assert classify(error) == kind


def test_autograd_frame_counts_as_waiting_but_a_user_hook_does_not() -> None:
    """When the innermost frame of a thread is autograd's, then the thread counts as waiting,
    because DDP may wait in the backward pass. When the innermost frame is a user's hook, it does
    not."""
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
def test_thread_that_waits_on_a_lock_is_classified_by_its_caller(
    where: str, *, for_others: bool
) -> None:
    """When a thread waits inside `threading`, then it counts as waiting for other ranks if its
    caller is tft, and not if its caller is the user's script."""
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


def test_thread_that_computes_is_not_waiting() -> None:
    """When the innermost frame is in the user's script or in a torch module, then the thread does
    not count as waiting."""
    frames: list[FrameType] = []
    layer = torch.nn.Linear(2, 2)
    layer.register_forward_hook(lambda *_: frames.append(sys._getframe()))
    layer(torch.ones(2))
    module = frames[0].f_back

    assert module is not None
    assert module.f_code.co_filename.endswith("torch/nn/modules/module.py")
    assert not waiting(module)
    assert not waiting(sys._getframe())
