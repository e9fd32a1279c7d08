"""
Module buffers that the forward pass changes ("moving" buffers), such as the running statistics of
BatchNorm.

These buffers change outside every update window, and differently on each rank. So these buffers are
part of the rank-local state, like the random generators. A step that is computed again starts from
the earlier content of the buffers. torch counts the in-place changes of each tensor, and this count
shows which buffers move. The buffers of normalization layers always count as moving, because
torch's native kernels change running statistics without counting.
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase  # the base class of BatchNorm and InstanceNorm

from tft.errors import MalformedMessage
from tft_pytorch.memory import flat_bytes, in_place
from tft_pytorch.names import own_names

INLINE = 224 * 1024
"""
The most bytes of buffers that are stored in the rank-local state itself. Only buffers that are
stored in the rank-local state outlive the process.

The shared memory for the rank-local state has 256 KiB. The rest of the shared memory is for the
random generators (5 KiB) and the user's data position. ResNet-50 has 208 KiB of moving buffers.

Buffers on a device are stored only when the device is at rest, as it is when an update window opens
and when it closes. At the end of the forward pass they are not stored, because the copy would have
to wait for the device. No rank needs that copy: on a device no rank opens its window before all
ranks have reached theirs.
"""

_KEPT = 4
"""The number of copies of the buffers that this process keeps if the buffers are too large for the
rank-local state. One copy is of the last complete step. Three copies are of the present step: when
the rank contributes to the last all-reduce, when the update window opens, and when the step is
interrupted. A step that is complete also has one of the close of its window, until the next step."""


@dataclass(slots=True)
class _Seen:
    tensor: Tensor | None
    changes: int


class RunningBuffers:
    """
    Copies the buffers that the forward pass of a model changes, and restores them.
    """

    def __init__(self, model: nn.Module, at_rest: Callable[[], bool]) -> None:
        """
        `at_rest` returns whether the devices of the model have done the work of this thread.
        """
        self._at_rest = at_rest
        self._slots: list[tuple[dict[str, Tensor | None], str]] = []
        self._names: list[str] = []
        self._seen: list[_Seen] = []
        self._moving: set[int] = set()
        self._uncounted: set[int] = set()
        """The buffers of normalization layers, whose changes torch does not count."""
        self._marks: dict[int, _Seen] = {}
        """Each buffer in the copy of the close of the last window, with torch's count of its changes
        then. Empty if the copy is in the rank-local state itself."""
        self._views: dict[int, tuple[Tensor, memoryview]] = {}
        self._kept: dict[bytes, list[Tensor]] = {}
        self._process = os.urandom(8)
        self._count = 0
        self._begun = False
        self._settled: dict[str, object] | None = None
        self._still: dict[int, Tensor | None] | None = None
        """Copies, in host memory, of the buffers that have never moved. Any of these buffers may
        change for the first time in a step that is interrupted and computed again. None if nothing
        is copied yet."""
        self.watch(model)

    def watch(self, model: nn.Module) -> None:
        """
        Watch the buffers of `model` from now on.

        If `model` replaces an earlier model, `model` must have the same buffers in the same order.
        A buffer that moved in the earlier model then counts as moving in `model`.
        """
        slots = [(module, name) for module in model.modules() for name in module._buffers]
        self.learn(model)
        self._slots = [(module._buffers, name) for module, name in slots]
        self._seen = [_Seen(None, 0) for _ in slots]
        norms = {i for i, (module, _) in enumerate(slots) if isinstance(module, _NormBase)}
        self._uncounted, self._moving = norms, self._moving | norms
        self._views.clear()
        self._marks.clear()
        self.rest()

    def learn(self, model: nn.Module) -> None:
        """
        Note the names of the buffers of `model`, which may be a trial model. The real model, which
        is made later in the same way, has buffers with the same names.
        """
        own = own_names(model)
        self._names = [
            own(f"{path}.{name}" if path else name)
            for path, module in model.named_modules()
            for name in module._buffers
        ]

    def let_go(self) -> None:
        """
        Drop the references to the model, which may refer to process groups. The copies stay: they
        do not refer to groups.

        Before this call, the buffers must already have the content from which training continues.
        """
        self._slots, self._seen = [], []
        self._views.clear()
        self._marks.clear()

    def rest(self) -> None:
        """
        Ignore all changes of the buffers until now, because the forward pass did not cause them.
        """
        for index, seen in enumerate(self._seen):
            tensor = self._tensor(index)
            seen.tensor, seen.changes = tensor, 0 if tensor is None else tensor._version

    def copy(self, *, closing: bool, room: int = INLINE) -> dict[str, object] | None:
        """
        Return a copy of the present content of the moving buffers (those that the forward pass
        changes), as plain values for `restore`. Return None if no buffer moves.

        Pass `closing=True` when a step is complete: `rewind` then restores this copy. `room` is the
        most bytes of content in the result. If the content is larger, or is on a device that is not
        at rest, the copy stays in this process, and the result only refers to it.
        """
        if not self._slots:
            return None
        self._notice()
        # The first call copies all buffers, because it is not known yet which buffers the forward
        # pass changes.
        indices = sorted(self._moving) if self._begun else range(len(self._slots))
        present = self._present(indices)
        if not present:
            return None
        copy = self._inline(present, room)
        if copy is None:
            self._count += 1
            copy = self._keep(present, self._process + self._count.to_bytes(8, "big"))
        if closing:
            self._marks = self._marked(present) if "kept" in copy else {}
        if closing or not self._begun:
            self._settled = copy
        if not self._begun:
            self._copy_still(())
        elif closing and self._still:
            for index in indices:
                self._still.pop(index, None)
        self._begun = True
        return copy

    def again(self, copy: object, room: int) -> object:
        """
        Return a new copy of the buffers at the end of a step. `copy` is the copy that was made when
        the update window of the same step closed. Since then the tail of the step may have changed
        the buffers.

        Return `copy` unchanged if its content was too large and stayed in the process, and the tail
        has not changed it.
        """
        if isinstance(copy, dict) and "kept" in copy and not self._changed_since(copy):
            return copy
        return self.copy(closing=True, room=room)

    def _marked(self, present: list[tuple[int, Tensor]]) -> dict[int, _Seen]:
        tensors = {index: self._tensor(index) for index, _ in present}
        return {i: _Seen(t, 0 if t is None else t._version) for i, t in tensors.items()}

    def _changed_since(self, copy: dict[str, Any]) -> bool:
        """
        Return True if the moving buffers are no longer those in `copy`, which was made when the
        window closed. Compare only the content of buffers whose changes torch does not count: to
        read large buffers in each step would take long.
        """
        self._notice()
        present, kept = self._present(sorted(self._moving)), self._kept.get(copy["kept"])
        if kept is None or [index for index, _ in present] != copy["at"]:
            return True
        counted = any(_moved(self._tensor(index), self._marks.get(index)) for index in copy["at"])
        return counted or any(
            index in self._uncounted and not torch.equal(tensor, content)
            for (index, tensor), content in zip(present, kept, strict=True)
        )

    def own(self, names_of_tensors: Iterable[str]) -> dict[str, bool]:
        """
        Return a dict. Its keys are those of `names_of_tensors` (the names of a shard's tensors)
        that name a buffer of the model. The value is True if the buffer moves, else False.

        A buffer moves if this rank has seen it change in the forward pass. Then the content of the
        buffer belongs to this rank alone. A tensor of another object of the user, such as a moving
        average, may have the name of a buffer behind a name of its own. Then the tensor moves if the
        buffer does. A name that ends with a longer name of a parameter belongs to the parameter.

        Buffers with the value False are in the result too, because another rank may know that these
        buffers move. For example, the process of this rank may be too new to have seen a change.
        """
        found: dict[str, bool] = {}
        names = set(self._names)
        moving = {name for i, name in enumerate(self._names) if i in self._moving}
        parted = [(name, *name.partition(".")[::2]) for name in names_of_tensors]
        known = names | {called for _, whose, called in parted if whose == "model"}
        for name, whose, called in parted:
            if whose == "model" and called in names:
                found[name] = called in moving
            elif whose not in ("model", "optim", "master"):
                words = called.split(".")
                endings = (".".join(words[at:]) for at in range(len(words)))
                longest = next((ending for ending in endings if ending in known), None)
                if longest in names:
                    found[name] = longest in moving
        return found

    def set_aside(self) -> Callable[[], None]:
        """
        Return a function that gives the moving buffers their present content again. Unlike `copy`
        and `restore`, it does not change which copy belongs to the end of a step, and copies
        content of any size.
        """
        kept = [
            (index, self._tensor(index), tensor, tensor.detach().clone())
            for index, tensor in self._present(sorted(self._moving))
        ]

        def put_back() -> None:
            for index, own, tensor, content in kept:
                buffers, name = self._slots[index]
                if buffers[name] is not own:
                    buffers[name] = own
                # leave an unchanged buffer alone. A comparison would wait for a device
                if tensor.device.type != "cpu" or not torch.equal(tensor, content):
                    tensor.copy_(content)

        return put_back

    def restore(self, copy: object) -> str | None:
        """
        Restore the content to which `copy` refers. `copy` was made in this process, or in the
        earlier process of this rank.

        If the content was too large and stayed in the earlier process, the content is lost. Then
        keep the present content, which has come from another rank together with the shard, and
        return a sentence that says so. Raises `MalformedMessage` if `copy` cannot be read.
        """
        lost = None
        if copy is not None and (
            not isinstance(copy, dict) or not {"at", "bytes", "kept"} >= copy.keys()
        ):
            raise MalformedMessage(
                "the buffers in the rank-local state must be a dict with the key `at` and either "
                "`bytes` or `kept`"
            )
        at = () if copy is None else copy["at"]
        if self._slots:
            self._restore_still(at)
        if copy is not None and self._slots:
            present = self._present(copy["at"])
            if "bytes" in copy:
                _write(present, copy["bytes"])
            elif copy["kept"] in self._kept:
                # move this copy to the end of the dict `_kept`, because `_kept` drops the copies at
                # its beginning first
                kept = self._kept[copy["kept"]] = self._kept.pop(copy["kept"])
                for (_, tensor), content in zip(present, kept, strict=True):
                    tensor.copy_(content)
            else:
                self._keep(present, copy["kept"])
                lost = _lost([self._names[index] for index, _ in present])
        self._settled = copy
        self._begun = True
        self.rest()
        if self._still is None and self._slots:
            self._copy_still(at)
        return lost

    def rewind(self) -> None:
        """
        Restore the buffers as they were at the end of the last complete step. Then the buffers
        belong to the same step as the rest of this rank's state.
        """
        if self._settled is not None:
            with torch.no_grad():
                self.restore(self._settled)

    def forget(self) -> None:
        """
        Forget the copy that `rewind` would restore, because the state of this rank now comes from
        another rank or a checkpoint. Until the next rollback `rewind` does nothing.
        """
        self._settled = self._still = None

    def _copy_still(self, moving: Collection[int]) -> None:
        still = [index for index in range(len(self._slots)) if index not in moving]
        present = dict(self._present(still))
        self._still = {
            index: present[index].detach().to("cpu", copy=True) if index in present else None
            for index in still
        }

    def _restore_still(self, moving: Collection[int]) -> None:
        """
        Restore each buffer that had never changed before the last call of `rest`, but has changed
        since. Leave out the buffers in `moving`, which `restore` itself restores.
        """
        for index, seen in enumerate(self._seen):
            if not self._still or index in moving or index not in self._still:
                continue
            tensor, kept = self._tensor(index), self._still[index]
            if tensor is seen.tensor and (tensor is None or tensor._version == seen.changes):
                continue
            if kept is None or tensor is None or tensor.shape != kept.shape:
                buffers, name = self._slots[index]
                buffers[name] = None if kept is None else kept.to(_device(tensor, seen), copy=True)
            else:
                [(_, own)] = self._present([index])
                own.copy_(kept)

    def _tensor(self, index: int) -> Tensor | None:
        buffers, name = self._slots[index]
        return buffers[name]

    def _present(self, indices: Iterable[int]) -> list[tuple[int, Tensor]]:
        """
        Return the index and the tensor of each buffer in `indices` that exists. The tensor is only
        this rank's part if the buffer is distributed.
        """
        found = ((index, self._tensor(index)) for index in indices)
        return [
            (index, tensor._local_tensor if isinstance(tensor, DTensor) else tensor)
            for index, tensor in found
            if tensor is not None
        ]

    def _notice(self) -> None:
        for index, seen in enumerate(self._seen):
            if _moved(self._tensor(index), seen):
                self._moving.add(index)

    def _inline(self, present: list[tuple[int, Tensor]], room: int) -> dict[str, object] | None:
        size = 0
        for _, tensor in present:
            size += tensor.nbytes
            if size > room:
                return None
        on_device = [tensor for _, tensor in present if tensor.device.type != "cpu"]
        if on_device and not self._at_rest():
            return None
        copied = _bytes_of(on_device)
        views = [
            self._view(index, tensor) if tensor.device.type == "cpu" else next(copied)
            for index, tensor in present
        ]
        return {"at": [index for index, _ in present], "bytes": b"".join(views)}

    def _view(self, index: int, tensor: Tensor) -> memoryview:
        if not in_place(tensor):
            return flat_bytes(tensor.detach().contiguous())
        known = self._views.get(index)
        if known is None or known[0] is not tensor:
            known = self._views[index] = tensor, flat_bytes(tensor)
        return known[1]

    def _keep(self, present: list[tuple[int, Tensor]], token: bytes) -> dict[str, object]:
        self._kept[token] = [tensor.detach().clone() for _, tensor in present]
        settled = None if self._settled is None else self._settled.get("kept")
        for oldest in list(self._kept)[:-_KEPT]:
            if oldest != settled:
                del self._kept[oldest]
        return {"at": [index for index, _ in present], "kept": token}


def _moved(tensor: Tensor | None, seen: _Seen | None) -> bool:
    if seen is None or tensor is not seen.tensor:
        return True
    return tensor is not None and tensor._version != seen.changes


def _lost(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"the buffer {names[0]}{more} of the lost process changes in the forward pass, and was not "
        f"kept outside of the process, which is done for at most {INLINE // 1024} KiB: its content is "
        "now that of the rank from which the state was copied"
    )


def _bytes_of(tensors: list[Tensor]) -> Iterator[memoryview]:
    """
    Yield the bytes of each tensor. All tensors of one device are copied to the host together.
    """
    flat = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors]
    hosts = {
        place: torch.cat([each for each in flat if each.device == place]).cpu()
        for place in {each.device for each in flat}
    }
    ends = dict.fromkeys(hosts, 0)
    for each in flat:
        begin = ends[each.device]
        ends[each.device] = begin + each.numel()
        yield flat_bytes(hosts[each.device][begin : begin + each.numel()])


def _device(tensor: Tensor | None, seen: _Seen) -> torch.device:
    before = seen.tensor if tensor is None else tensor
    return torch.device("cpu") if before is None else before.device


def _write(present: list[tuple[int, Tensor]], content: bytes) -> None:
    at = 0
    for _, tensor in present:
        part = bytearray(content[at : at + tensor.nbytes])
        at += tensor.nbytes
        if len(part) != tensor.nbytes:
            raise MalformedMessage(
                "the buffers in the rank-local state have fewer bytes than those of the model"
            )
        if part:
            source = torch.frombuffer(part, dtype=torch.uint8)
            tensor.copy_(source.view(tensor.dtype).view(tensor.shape))
