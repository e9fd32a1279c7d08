"""
Tests of the state of a MindSpore rank: sending, receiving, saving, reading, and refused input.

After each kind of restoration, the next steps must equal, bit for bit, the steps of a training
without it.
"""

import random
import resource
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mindspore
import numpy
import pytest
from mindspore import Parameter, Tensor, mint, nn
from mindspore.experimental import optim
from tft_mindspore import Part
from tft_mindspore.memory import content, flat_bytes
from tft_mindspore.step_numbers import watch
from tft_mindspore.training_state import Adopted, adopt

from tft.errors import CheckpointCorrupt, OrderRefused, UsageError
from tft.spi import Numbers

Theirs = Any  # MindSpore has no types

OPTIMIZERS: Mapping[str, Callable[[Theirs], Theirs]] = {
    "Adam": lambda p: nn.Adam(p, 0.01),
    "Adam with a schedule and groups": lambda p: nn.Adam(
        [{"params": p[:2], "lr": nn.ExponentialDecayLR(0.05, 0.9, 4)}, {"params": p[2:]}], 0.01
    ),
    "Momentum": lambda p: nn.Momentum(p, nn.exponential_decay_lr(0.1, 0.9, 100, 2, 1), 0.9),
    "AdamWeightDecay": lambda p: nn.AdamWeightDecay(p, nn.CosineDecayLR(0.001, 0.05, 50)),
    "experimental Adam": lambda p: optim.Adam(p, 0.01),
    "experimental SGD": lambda p: optim.SGD(p, 0.01, momentum=0.9),
}


class Training:
    """
    A training of a small network whose random data depends only on the position.
    """

    def __init__(self, optimizer: str = "Adam", *, norm: bool = False, width: int = 8) -> None:
        mindspore.set_seed(5)
        cells = [nn.Dense(6, width), nn.ReLU(), nn.Dense(width, 2)]
        if norm:
            cells.insert(1, nn.BatchNorm1d(width))
        self.network = nn.SequentialCell(*cells)
        self.network.set_train()
        self.optimizer = OPTIMIZERS[optimizer](list(self.network.trainable_params()))
        self.position = 0

        def forward(rows: Theirs, wanted: Theirs) -> Theirs:
            return ((self.network(rows) - wanted) ** 2).mean()

        self.gradients_of = mindspore.value_and_grad(
            forward, None, list(self.network.trainable_params())
        )

    def step(self) -> str:
        """
        Train one step and return its loss.
        """
        draw = numpy.random.RandomState(self.position)
        self.position += 1
        rows, wanted = draw.randn(4, 6), draw.randn(4, 2)
        loss, gradients = self.gradients_of(
            Tensor(rows.astype(numpy.float32)), Tensor(wanted.astype(numpy.float32))
        )
        self.optimizer(gradients)
        return float(loss).hex()

    def state_dict(self) -> dict[str, int]:
        """
        Return the data position.
        """
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """
        Set the data position.
        """
        self.position = state["position"]

    def adopted(self, **more: Any) -> Adopted:  # Any: arguments of `adopt`
        """
        Hand this training's parts to the adaptor and return the adaptor's object for them.
        """
        parts = {"model": self.network, "optimizer": self.optimizer, "data": self, **more}
        return adopt(parts, None)


def move(giver: Adopted, taker: Adopted, shard: str = "dense") -> None:
    """
    Copy a shard from one training to the other, through the bytes that a transfer would send.
    """
    payload = giver.give(shard)
    rooms = taker.take(shard, payload.meta)
    for buffer, room in zip(payload.buffers, rooms, strict=True):
        assert (buffer.name, buffer.view.nbytes) == (room.name, room.view.nbytes)
        room.view[:] = buffer.view
    taker.taken(shard, payload.meta)


def test_averages_of_the_tail_do_not_count_to_the_next_step() -> None:
    """When the ranks average numbers in the tail of a step, such as a metric, then the norm of the
    next step, and those that this rank has passed to its averages, are without these numbers."""
    adopted = Training().adopted()
    gradient, metric = numpy.full(4, 1.0, numpy.float32), numpy.full(4, 1000.0, numpy.float32)
    watch.begin()
    watch.averaged([gradient], [gradient])
    watch.take()
    watch.averaged([metric], [metric])
    adopted.end_step()
    watch.averaged([gradient], [gradient])
    assert watch.take() == Numbers(norm=2.0, own=(2.0,))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("trained", [0, 3])
def test_a_rank_that_received_a_shard_trains_like_its_source(optimizer: str, trained: int) -> None:
    """When a rank, trained before or not, receives the state of another one, then its next steps
    are those of the source, and both end with the same state: no parameter is frozen."""
    ahead, behind = Training(optimizer), Training(optimizer)
    giver, taker = ahead.adopted(), behind.adopted()
    for _ in range(5):
        ahead.step()
    for _ in range(trained):
        behind.position += 100  # continue with other rows of the data
        behind.step()

    move(giver, taker)
    taker.rollback(giver.capture(closing=True))

    assert taker.digests() == giver.digests()
    before = content(behind.network[0].weight).copy()
    assert [behind.step() for _ in range(4)] == [ahead.step() for _ in range(4)]
    assert not numpy.array_equal(before, content(behind.network[0].weight))
    assert taker.digests() == giver.digests()


def test_a_shard_can_be_received_after_an_interrupted_forward_pass() -> None:
    """When an exception has interrupted a forward pass, and MindSpore therefore still records
    operations for the gradients, then the state can be received, and the next steps are right."""
    calm, struck = Training(), Training()
    giver, taker = calm.adopted(), struck.adopted()
    for _ in range(2):
        assert calm.step() == struck.step()

    def strike(*_: object) -> None:
        raise ConnectionError("struck")

    hook = struck.network[1].register_forward_hook(strike)
    with pytest.raises(ConnectionError):
        struck.step()
    hook.remove()
    taker.clear()
    move(giver, taker)
    taker.rollback(giver.capture(closing=True))

    assert [struck.step() for _ in range(3)] == [calm.step() for _ in range(3)]


def test_running_statistics_are_rolled_back_as_rank_local_state() -> None:
    """When a forward pass has changed the running statistics of a norm and the step is given up,
    then the adaptor restores those of the last complete step. A rollback also replaces statistics
    that were received from another rank."""
    here, other = Training(norm=True), Training(norm=True)
    adopted, peer = here.adopted(), other.adopted()
    other.position = 50
    for training in (here, other):
        training.step()
    closed = adopted.capture(closing=True)
    statistics = content(here.network[1].moving_mean).copy()

    here.network(Tensor(numpy.ones((4, 6), numpy.float32)))
    assert not numpy.array_equal(statistics, content(here.network[1].moving_mean))
    adopted.clear()
    assert numpy.array_equal(statistics, content(here.network[1].moving_mean))

    move(peer, adopted)
    assert not numpy.array_equal(statistics, content(here.network[1].moving_mean))
    adopted.rollback(closed)
    assert numpy.array_equal(statistics, content(here.network[1].moving_mean))


def test_named_generators_are_rolled_back() -> None:
    """When the script names the generators of Python and numpy, then they give the same draws again
    after a rollback."""
    training = Training()
    adopted = training.adopted(rng=("mindspore", "python", "numpy"))
    kept = adopted.capture(closing=True)
    drawn = [random.random(), numpy.random.rand()]
    adopted.rollback(kept)
    assert [random.random(), numpy.random.rand()] == drawn


def test_generators_are_restored_after_the_data_position() -> None:
    """When the data position draws random numbers while it is loaded, then the generators are
    restored after that."""

    class Drawing(Training):
        def load_state_dict(self, state: dict[str, int]) -> None:
            random.random()
            numpy.random.rand()
            super().load_state_dict(state)

    adopted = Drawing().adopted(rng=("mindspore", "python", "numpy"))
    kept = adopted.capture(closing=True)
    drawn = [random.random(), numpy.random.rand()]
    adopted.rollback(kept)
    assert [random.random(), numpy.random.rand()] == drawn


def test_a_shard_of_another_model_is_refused() -> None:
    """When a received shard is of another model, then it is refused with the first difference, and
    the state is unchanged."""
    small, large = Training(), Training(width=16)
    giver, taker = large.adopted(), small.adopted()
    before = taker.digests()

    with pytest.raises(
        OrderRefused,
        match=r"0\.weight is Float32 \[16, 6\] in the shard, and Float32 \[8, 6\] on this rank",
    ):
        taker.take("dense", giver.give("dense").meta)
    assert taker.digests() == before


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("optimizer", ["Adam", "experimental Adam"])
def test_a_saved_shard_is_read_by_mindspore(optimizer: str, tmp_path: Path) -> None:
    """When a shard is saved, then MindSpore reads it like its own files, and a rank that loads it
    trains like the saver."""
    saved, fresh = Training(optimizer), Training(optimizer)
    for _ in range(3):
        saved.step()
    files = saved.adopted().save(tmp_path, "dense", 3)
    write = saved.adopted().stage("dense", 3)
    local_state = saved.adopted().capture(closing=True)

    assert files == ["dense.ckpt", "dense.plain"]
    found = mindspore.load_checkpoint(str(tmp_path / "dense.ckpt"))
    assert int(found["step_num"].asnumpy()) == 3
    weight = content(saved.network[0].weight)
    assert numpy.array_equal(found[saved.network[0].weight.name].asnumpy(), weight)

    expected = [saved.step() for _ in range(3)]
    fresh.step()
    adopted = fresh.adopted()
    adopted.load(tmp_path, "dense")
    adopted.rollback(local_state)
    assert [fresh.step() for _ in range(3)] == expected

    # `write` writes the state of the time when it was staged, and replaces the files
    assert write(tmp_path) == files
    adopted.load(tmp_path, "dense")
    adopted.rollback(local_state)
    assert [fresh.step() for _ in range(3)] == expected


def test_an_unreadable_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    """When a file is damaged, missing or of another model, then the error says so and names the
    file."""
    small = Training().adopted()
    with pytest.raises(CheckpointCorrupt, match=r"dense\.ckpt cannot be read"):
        small.load(tmp_path, "dense")
    Training(width=16).adopted().save(tmp_path, "dense", 1)
    with pytest.raises(
        CheckpointCorrupt, match=r"no parameter 0\.weight of type Float32 and shape \[8, 6\]"
    ):
        small.load(tmp_path, "dense")
    (tmp_path / "dense.ckpt").chmod(0o600)
    (tmp_path / "dense.ckpt").write_bytes(b"no checkpoint")
    with pytest.raises(CheckpointCorrupt, match=r"dense\.ckpt cannot be read"):
        small.load(tmp_path, "dense")


def test_a_full_disk_raises_the_systems_error(tmp_path: Path) -> None:
    """When a checkpoint cannot be written whole, then the system's error is raised, and the next
    attempt, with room, writes it."""
    training = Training()
    adopted = training.adopted()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            adopted.save(tmp_path, "dense", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    adopted.save(tmp_path, "dense", 1)
    adopted.load(tmp_path, "dense")


def test_parameters_of_all_types_and_shapes_are_transferred(tmp_path: Path) -> None:
    """When parameters have 16 bits, no elements, or are single numbers, then they are received
    unchanged."""

    def state(fill: float) -> dict[str, Theirs]:
        whole = numpy.full((3, 2), fill, numpy.float32)
        return {
            "half": Parameter(Tensor(whole.astype(numpy.float16)), name="half"),
            "brain": Parameter(Tensor(whole, mindspore.bfloat16), name="brain"),
            "none": Parameter(Tensor(whole[:0]), name="none"),
            "single": Parameter(Tensor(fill, mindspore.float32), name="single"),
            "count": Parameter(Tensor(int(fill), mindspore.int32), name="count"),
            "switch": Parameter(Tensor([bool(fill)]), name="switch"),
        }

    mine, theirs = state(0.0), state(1.5)
    here, there = Training().adopted(others=mine), Training().adopted(others=theirs)
    move(there, here)
    read = state(0.0)
    loaded = Training().adopted(others=read)
    there.save(tmp_path, "dense", 1)
    loaded.load(tmp_path, "dense")

    for name, wanted in theirs.items():
        for found in (mine[name], read[name]):
            assert bytes(flat_bytes(content(found))) == bytes(flat_bytes(content(wanted))), name
            assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)


# ------------------------------------------------------------- parameters that only some ranks have


def test_parameters_of_some_ranks_are_a_shard_of_their_own() -> None:
    """When the user names the parameters of this rank's part and its holders, then they form a
    shard of their own, and parameters of other parts are in no shard."""
    training = Training()
    names = [p.name for p in training.optimizer.get_parameters()]
    moments = [name for name in names if name.startswith("moment")]
    own, others = moments[: len(moments) // 2], moments[len(moments) // 2 :]
    adopted = training.adopted(
        shards={"optimizer.0": Part(names=own, ranks=(2, 0))}, elsewhere=others
    )

    copies = {each.shard: each.ranks for each in adopted.shards(0, 4)}
    assert copies == {"dense": (0, 1, 2, 3), "optimizer.0": (0, 2)}
    given = {shard: [b.name for b in adopted.give(shard).buffers] for shard in copies}
    assert sorted(given["optimizer.0"]) == sorted(own)
    assert not set(given["dense"]) & set(moments)
    with pytest.raises(UsageError, match=r"this is rank 1 of 4"):
        adopted.shards(1, 4)
    with pytest.raises(OrderRefused, match=r"no shard 'optimizer\.1'"):
        adopted.give("optimizer.1")


# ---------------------------------------------------------------- objects that the adaptor refuses

SCALE = Parameter(Tensor(1.0, mindspore.float32), name="scale")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"modle": 1}, "was given modle"),
        ({"model": object()}, r"model given to session\.adopt must be a mindspore\.nn\.Cell"),
        (
            {"optimizer": nn.ReLU()},
            "optimizer given to session.adopt must be an optimizer of MindSpore, not",
        ),
        ({"data": object()}, r"data given to session\.adopt must have the methods state_dict"),
        (
            {"scheduler": object()},
            r"scheduler given to session\.adopt must have the methods state_dict",
        ),
        (
            {"others": {"average": 3}},
            r"others\['average'\] given to session\.adopt must have the methods state_dict",
        ),
        ({"others": {"scheduler": SCALE}}, "others has the name 'scheduler', which is reserved"),
        ({"others": {"parameters": SCALE}}, "others has the name 'parameters', which is reserved"),
        ({"others": {"0.weight": SCALE}}, "has another Parameter with this name: choose another"),
        ({"rng": ("torch",)}, "rng has the unknown names torch"),
        ({"shards": {"dense": Part(names=["0.weight"], ranks=(0,))}}, "name must not be 'dense'"),
        ({"shards": {"x": ["0.weight"]}}, r"must be a tft_mindspore\.Part"),
        (
            {"shards": {"x": Part(names=["9.weight"], ranks=(0,))}},
            "neither model nor optimizer has",
        ),
        ({"elsewhere": ["9.weight"]}, "neither model nor optimizer has"),
        (
            {"shards": {"x": Part(names=["0.weight"], ranks=(0,))}, "elsewhere": ["0.weight"]},
            "name each parameter in only one of them",
        ),
    ],
)
def test_unsupported_objects_are_refused_with_a_message(more: dict[str, Any], words: str) -> None:
    """When an object cannot be adopted, then it is refused with a message when it is handed
    over."""
    with pytest.raises(UsageError, match=words):
        Training().adopted(**more)


def test_an_optimizer_of_another_model_is_refused() -> None:
    """When the optimizer trains parameters that the model does not have, then it is refused."""
    other = nn.Dense(3, 3)
    stranger = nn.Adam(other.trainable_params())
    with pytest.raises(UsageError, match="which the model does not have"):
        Training().adopted(optimizer=stranger)
    twin = Training()
    with pytest.raises(UsageError, match="different parameters with the name"):
        Training().adopted(optimizer=twin.optimizer)


def test_more_running_statistics_than_can_be_kept_are_refused() -> None:
    """When the norms of a model keep more statistics than fit into the rank-local state, then an
    error says so at once."""
    norm = nn.SequentialCell(nn.BatchNorm1d(50_000))
    optimizer = nn.Momentum(norm.trainable_params(), 0.1, 0.9)
    with pytest.raises(UsageError, match="use layers without running statistics"):
        adopt({"model": norm, "optimizer": optimizer}, None)


def test_mint_optimizers_are_accepted() -> None:
    """When an optimizer of `mindspore.mint` is handed over, then its state is found, although the
    CPU lacks its kernels."""
    training = Training()
    optimizer = mint.optim.AdamW(list(training.network.trainable_params()), 0.01)
    names = {b.name for b in training.adopted(optimizer=optimizer).give("dense").buffers}
    assert {"exp_avg.0.weight", "exp_avg_sq.2.bias"} <= names
