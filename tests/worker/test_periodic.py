"""
Periodic checkpoints: each rank writes its part in the background, on a real disk, also during
incidents and errors.
"""

import errno
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pluggy
import pytest

from tests.exhausted import no_more_threads
from tft import checkpoint
from tft.checkpoint import CheckpointStore
from tft.config import RankSettings
from tft.errors import UsageError
from tft.protocol.messages import Checkpointed, CheckpointFailed, ShardCopies
from tft.spi.adaptor import AdaptorSpecs
from tft.spi.markers import hookimpl
from tft.worker.periodic import Periodic
from tft.worker.saving import Own, Saving

WORLD = 3


@dataclass
class Adaptor:
    """
    An adaptor whose shard `dense` all ranks hold. The test can make its disk slow or full.
    """

    content: bytes = b"fresh"
    disk: threading.Event = field(default_factory=threading.Event)
    full: bool = False
    room: bool = True
    fault: BaseException | None = None
    joining: threading.Event = field(default_factory=threading.Event)
    copies: "weakref.WeakSet[Callable[[Path], Sequence[str]]]" = field(
        default_factory=weakref.WeakSet
    )

    def digests(self) -> dict[str, dict[str, str]]:
        """
        Return the digest of the content that the adaptor holds.
        """
        return {"dense": {"model": self.content.hex()}}

    @hookimpl
    def tft_shards(self, rank: int, world: int) -> Sequence[ShardCopies]:
        return (ShardCopies(shard="dense", ranks=tuple(range(world))),)

    @hookimpl
    def tft_join(self, directory: Path) -> Sequence[str]:
        assert directory.exists()
        assert self.joining.wait(30.0)
        return ()

    @hookimpl
    def tft_stage(self, shard: str) -> Callable[[Path], Sequence[str]]:
        if not self.room:
            raise MemoryError
        copy = self.content

        def write(directory: Path) -> Sequence[str]:
            assert self.disk.wait(30.0)
            if self.full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))
            if self.fault is not None:
                raise self.fault
            (directory / shard).write_bytes(copy)
            return (shard,)

        self.copies.add(write)
        return write


@dataclass
class Post:
    """
    A receiver of a rank's reports. While `away` is set, the controller acknowledges no report.
    """

    reports: list[Checkpointed] = field(default_factory=list)
    failures: list[CheckpointFailed] = field(default_factory=list)
    unheard: list[Callable[[], None]] = field(default_factory=list)
    away: bool = False
    failing: bool = False
    tried: list[CheckpointFailed] = field(default_factory=list)
    """The failures that the rank has tried to report, whether the report succeeded or not."""

    def take(
        self, report: Checkpointed | CheckpointFailed, heard: Callable[[], None] | None
    ) -> None:
        """
        Receive a report of the rank. `heard` is called when the controller has acknowledged the
        report.

        Raises `OSError` if `failing` is set.
        """
        if isinstance(report, CheckpointFailed):
            self.tried.append(report)
        if self.failing:
            raise OSError("nothing can be sent")
        if isinstance(report, CheckpointFailed):
            self.failures.append(report)
            return
        assert heard is not None
        self.reports.append(report)
        self.unheard.append(heard)
        if not self.away:
            self.comes_back()

    def comes_back(self) -> None:
        """
        Let the controller return and acknowledge all reports that it has missed.
        """
        self.away = False
        while self.unheard:
            self.unheard.pop(0)()


@dataclass
class Rank:
    """
    The objects of one rank that periodic checkpoints need.
    """

    periodic: Periodic
    adaptor: Adaptor
    post: Post
    expected: list[float]
    abandoned: threading.Event


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Rank]]:
    """
    Yield three ranks in the training loop of round 0, with a checkpoint every second step.
    """
    with job(tmp_path) as made:
        yield made


@pytest.fixture
def sparing(tmp_path: Path) -> Iterator[list[Rank]]:
    """
    Yield the same ranks as `ranks`, but only the two newest checkpoints are kept.
    """
    with job(tmp_path, keep=2) as made:
        yield made


@contextmanager
def job(
    run_dir: Path, keep: int = 0, own: Own | None = None, copies: str = "one"
) -> Iterator[list[Rank]]:
    """
    Make all ranks, yield them for the `with` block, and then wait until they have written
    everything.
    """
    made = [make(run_dir, rank, keep=keep, own=own, copies=copies) for rank in range(WORLD)]
    for rank in made:
        rank.periodic.resumed((0, 0))
    yield made
    for rank in made:
        rank.post.comes_back()
        rank.adaptor.disk.set()
        rank.periodic.resumed((9, 0))
        rank.periodic.finish(0, None)


def make(
    run_dir: Path,
    number: int,
    plugin: object | None = None,
    keep: int = 0,
    own: Own | None = None,
    copies: str = "one",
) -> Rank:
    """
    Make a rank with a fast disk and a controller that acknowledges at once.
    """
    adaptor = Adaptor()
    adaptor.disk.set()
    adaptor.joining.set()
    plugins = pluggy.PluginManager("tft")
    plugins.add_hookspecs(AdaptorSpecs)
    plugins.register(plugin or adaptor)
    settings = RankSettings(
        rank=number, world=WORLD, job="j", run_dir=run_dir, broker="h:1", adaptor="own",
        incarnation=0, page=0, host="h", checkpoint_every=2, keep_checkpoints=keep,
        save_copies=copies,
    )  # fmt: skip
    expected: list[float] = []
    abandoned = threading.Event()
    post = Post()
    saving = Saving(plugins.hook)
    if own is not None:
        saving.give(own)
    periodic = Periodic(
        settings, plugins.hook, saving, post.take, expected.append, abandoned, adaptor.digests
    )
    periodic.check()
    return Rank(periodic, adaptor, post, expected, abandoned)


def stage(ranks: Sequence[Rank], step: int) -> None:
    """
    Complete `step` on all ranks and stage its checkpoint.
    """
    for number, rank in enumerate(ranks):
        assert rank.periodic.due(step)
        rank.periodic.stage(step, b"local_state %d" % number)


def written(ranks: Sequence[Rank]) -> None:
    """
    Wait until no rank is writing a checkpoint.
    """
    for rank in ranks:
        rank.periodic.finish(0, None)


@contextmanager
def held(rank: Rank) -> Iterator[None]:
    """
    Block the disk of this rank during the `with` block.
    """
    rank.adaptor.disk.clear()
    yield
    rank.adaptor.disk.set()


def steps(run_dir: Path) -> list[int]:
    """
    Return the steps of all committed checkpoints, after a check that each is complete.
    """
    places = sorted((run_dir / "checkpoints").glob("step-*"))
    return [checkpoint.verify(place).step for place in places if not place.suffix]


def test_rank_that_writes_its_part_last_makes_the_checkpoint(
    tmp_path: Path, ranks: list[Rank]
) -> None:
    """When all ranks have written their copies, then there is one checkpoint with the rank-local state
    of every rank, and one rank reports it. State that was trained meanwhile is not in the
    checkpoint."""
    with held(ranks[0]):
        stage(ranks, 2)
        ranks[0].adaptor.content = b"later"
        written(ranks[1:])
        assert steps(tmp_path) == []
    written(ranks)
    place = CheckpointStore(directory=tmp_path / "checkpoints").place(2)
    assert steps(tmp_path) == [2]
    assert (place / "dense").read_bytes() == b"fresh"
    assert [checkpoint.read_local_state(place, r) for r in range(WORLD)] == [
        b"local_state %d" % r for r in range(WORLD)
    ]
    [report] = [report for rank in ranks for report in rank.post.reports]
    assert (report.step, report.directory, report.compared) == (2, str(place), True)


def test_copies_that_differ_make_no_checkpoint(tmp_path: Path, ranks: list[Rank]) -> None:
    """When the copy of one rank differs from the other copies, also if this rank does not write the
    copy, then no checkpoint is made. One rank reports which rank has the wrong copy."""
    ranks[2].adaptor.content = b"wrong"
    stage(ranks, 2)
    written(ranks)
    assert steps(tmp_path) == []
    assert [report for rank in ranks for report in rank.post.reports] == []
    [word] = [word for rank in ranks for word in rank.post.failures]
    assert (word.step, word.differ, word.wrong) == (2, True, (2,))
    assert word.why == (
        "ranks [2] hold another copy of model of shard 'dense' at the end of step 2 than ranks [0, "
        "1]"
    )


def test_parts_of_different_rounds_are_not_combined(tmp_path: Path, ranks: list[Rank]) -> None:
    """When one rank wrote its part before an incident and the others after it, then these parts
    make no checkpoint. The next checkpoint is made, and the incomplete one is removed."""
    stage(ranks[:1], 2)
    written(ranks)
    for rank in ranks:
        rank.periodic.left()
        rank.periodic.rolled_back(2)
        rank.periodic.resumed((1, 0))
    stage(ranks[1:], 2)
    written(ranks)
    assert steps(tmp_path) == []
    stage(ranks, 4)
    written(ranks)
    assert [place.name for place in (tmp_path / "checkpoints").iterdir()] == ["step-00000004"]


def test_checkpoint_of_the_last_step_is_written_again_after_an_incident(
    tmp_path: Path, ranks: list[Rank]
) -> None:
    """When a rank is lost while the checkpoint of the last step is written, then all ranks write it
    again when they have finished a second time. A checkpoint that exists is not written again."""
    stage(ranks[:2], 2)
    written(ranks)
    for again in (1, 2):
        for number, rank in enumerate(ranks):
            rank.periodic.left()
            rank.periodic.rolled_back(2)
            rank.periodic.resumed((again, 0))
            rank.periodic.finish(2, b"local_state %d" % number)
        written(ranks)
        assert steps(tmp_path) == [2]
    assert sum(len(rank.post.reports) for rank in ranks) == 1


def test_parts_of_two_rollbacks_in_one_incident_are_not_combined(
    tmp_path: Path, ranks: list[Rank]
) -> None:
    """When some ranks have written their parts of a step, and all ranks roll back in the same
    incident and reach this step again, then the checkpoint has only the parts that were written the
    second time."""
    for number, members in ((1, ranks[:2]), (2, ranks)):
        for rank in ranks:
            rank.periodic.left()
            rank.periodic.rolled_back(0)
            rank.periodic.resumed((1, number))
            rank.adaptor.content = b"way %d" % number
        stage(members, 2)
        written(members)
        assert steps(tmp_path) == ([] if number == 1 else [2])
    assert (
        CheckpointStore(directory=tmp_path / "checkpoints").place(2) / "dense"
    ).read_bytes() == b"way 2"


def test_checkpoint_is_not_committed_while_ranks_are_out_of_the_loop(
    tmp_path: Path, ranks: list[Rank]
) -> None:
    """When ranks have left the loop, then their written parts are committed only after they enter
    it again. If the job has gone back before that step, the parts are not committed."""
    for step, back, there in ((2, 2, [2]), (4, 3, [2])):
        with held(ranks[2]) if step == 2 else held(ranks[0]):
            stage(ranks, step)
            for rank in ranks:
                rank.periodic.left()
        for rank in ranks:
            rank.periodic.rolled_back(back)
        assert steps(tmp_path) == [each for each in there if each < step]
        for rank in ranks:
            rank.periodic.resumed((step, 0))
        written(ranks)
        assert steps(tmp_path) == there


@pytest.mark.parametrize(("what", "normally"), [("full", False), ("room", True)])
def test_failed_write_costs_only_one_checkpoint(
    tmp_path: Path, ranks: list[Rank], what: str, *, normally: bool
) -> None:
    """When a rank cannot write its part, or has no memory for its copy, then this checkpoint is not
    made and the reason is reported. The next checkpoint is made."""
    setattr(ranks[0].adaptor, what, not normally)
    stage(ranks, 2)
    written(ranks)
    (told,) = ranks[0].post.failures
    why = "OSError: No space left on device" if what == "full" else "MemoryError: "
    assert (told.rank, told.step, told.why) == (0, 2, why)
    setattr(ranks[0].adaptor, what, normally)
    stage(ranks, 4)
    written(ranks)
    assert steps(tmp_path) == [4]
    assert [failed.step for rank in ranks for failed in rank.post.failures] == [2]


class Unusual(BaseException):
    """
    An error that is not a subclass of `Exception`, as some libraries raise.
    """


def test_writer_thread_survives_any_exception(tmp_path: Path, ranks: list[Rank]) -> None:
    """When a write raises an exception that is not an `Exception`, or the report of the failure
    fails too, then the writer thread still writes the next checkpoint."""
    for step, error, failing in ((2, Unusual("odd"), False), (4, OSError("odd"), True)):
        ranks[0].adaptor.fault, ranks[0].post.failing = error, failing
        stage(ranks, step)
        written(ranks)
    ranks[0].adaptor.fault, ranks[0].post.failing = None, False
    stage(ranks, 6)
    written(ranks)
    assert steps(tmp_path) == [6]
    assert [(told.step, told.why) for told in ranks[0].post.failures] == [(2, "Unusual: odd")]


def test_failure_after_the_commit_does_not_report_a_failed_checkpoint(tmp_path: Path) -> None:
    """When a checkpoint is committed and its report fails, then no rank reports that the checkpoint
    failed."""
    with job(tmp_path) as ranks:
        for rank in ranks:
            rank.post.failing = True
        stage(ranks, 2)
        written(ranks)
        assert steps(tmp_path) == [2]
        for rank in ranks:
            rank.post.failing = False
        stage(ranks, 4)
        written(ranks)
        assert steps(tmp_path) == [2, 4]
        assert [failed for rank in ranks for failed in rank.post.tried] == []


def test_files_of_failed_checkpoints_are_removed(tmp_path: Path, ranks: list[Rank]) -> None:
    """When one rank can never write its part, then the files that the other ranks wrote do not
    accumulate."""
    ranks[0].adaptor.full = True
    for step in range(2, 14, 2):
        stage(ranks, step)
        written(ranks)
    assert len(list((tmp_path / "checkpoints").iterdir())) <= 3


def test_memory_of_a_copy_is_freed_after_the_write(ranks: list[Rank]) -> None:
    """When a part has been written, then no reference keeps the memory of its copy."""
    copies = ranks[0].adaptor.copies
    with held(ranks[0]):
        stage(ranks, 2)
        assert len(copies) == 1
    written(ranks)
    assert len(copies) == 0


def test_training_thread_waits_for_a_slow_disk(tmp_path: Path, ranks: list[Rank]) -> None:
    """When the checkpoint before is still being written, then the training thread waits. It reports
    repeatedly that it does not hang."""
    with held(ranks[0]):
        stage(ranks, 2)
        waiting = threading.Thread(target=ranks[0].periodic.stage, args=(4, b""))
        waiting.start()
        while len(ranks[0].expected) < 4:  # the copy of step 2 made two of these entries
            assert waiting.is_alive()
    waiting.join()
    stage(ranks[1:], 4)
    written(ranks)
    assert steps(tmp_path) == [2, 4]


def test_incident_interrupts_the_wait_for_the_disk(tmp_path: Path, ranks: list[Rank]) -> None:
    """When an incident begins while the training thread waits for the disk, then the thread stops
    waiting, and that checkpoint is not made."""
    with held(ranks[0]):
        stage(ranks, 2)
        waiting = threading.Thread(target=ranks[0].periodic.stage, args=(4, b""))
        waiting.start()
        ranks[0].abandoned.set()
        waiting.join()
        ranks[0].abandoned.clear()
    written(ranks)
    stage(ranks[1:], 4)
    written(ranks)
    assert steps(tmp_path) == [2]


def test_slow_commit_does_not_block_the_training_thread(tmp_path: Path, ranks: list[Rank]) -> None:
    """When the adaptor takes long to join the parts, then the training thread can report that it is
    alive, and can leave the loop."""
    ranks[0].adaptor.joining.clear()
    stage(ranks[1:], 2)
    written(ranks[1:])
    stage(ranks[:1], 2)  # the last rank, which commits
    waiting = threading.Thread(target=ranks[0].periodic.finish, args=(0, None))
    waiting.start()
    while len(ranks[0].expected) < 4:
        assert waiting.is_alive()
    ranks[0].abandoned.set()
    waiting.join()
    ranks[0].periodic.left()
    ranks[0].adaptor.joining.set()
    ranks[0].periodic.resumed((1, 0))
    written(ranks)
    assert steps(tmp_path) == [2]


def test_only_the_requested_number_of_checkpoints_is_kept(
    tmp_path: Path, sparing: list[Rank]
) -> None:
    """When two checkpoints are to be kept, then a third replaces the oldest, and no file of the
    oldest remains."""
    for step, there in ((2, [2]), (4, [2, 4]), (6, [4, 6]), (8, [6, 8])):
        stage(sparing, step)
        written(sparing)
        assert steps(tmp_path) == there
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_checkpoint_without_threads_fails_and_the_next_one_is_made(
    tmp_path: Path, sparing: list[Rank]
) -> None:
    """When a rank can start no thread to write its part, then it reports the failure and trains on,
    and does not wait for the part at the end. The next checkpoint is made."""
    with no_more_threads():
        stage(sparing[:1], 2)
    stage(sparing[1:], 2)
    written(sparing)
    assert steps(tmp_path) == []
    assert [word.why for word in sparing[0].post.failures] == [
        "RuntimeError: can't start new thread"
    ]
    stage(sparing, 4)
    written(sparing)
    assert steps(tmp_path) == [4]


def test_old_checkpoint_stays_until_the_controller_knows_the_new_one(
    tmp_path: Path, sparing: list[Rank]
) -> None:
    """When the controller has not acknowledged a new checkpoint, then the older checkpoints stay.
    The job can go back to one of them if this rank is lost."""
    for step in (2, 4):
        stage(sparing, step)
        written(sparing)
    for rank in sparing:
        rank.post.away = True
    stage(sparing, 6)
    while not any(rank.post.unheard for rank in sparing):
        assert all(rank.post.away for rank in sparing)
    assert steps(tmp_path) == [2, 4, 6]
    for rank in sparing:
        rank.post.comes_back()
    written(sparing)
    assert steps(tmp_path) == [4, 6]


def test_old_checkpoint_stays_while_a_rank_is_out_of_the_loop(
    tmp_path: Path, sparing: list[Rank]
) -> None:
    """When a rank has left the loop, then it removes no old checkpoint until it enters the loop
    again. If the job has given up the newest checkpoint by then, the rank does not remove the
    checkpoints before it."""
    for step in (2, 4):
        stage(sparing, step)
        written(sparing)
    for rank in sparing:
        rank.post.away = True
    stage(sparing, 6)
    while not any(rank.post.unheard for rank in sparing):
        assert all(rank.post.away for rank in sparing)
    for rank in sparing:
        rank.periodic.left()
        rank.post.comes_back()
    assert steps(tmp_path) == [2, 4, 6]
    checkpoint.give_up(CheckpointStore(directory=tmp_path / "checkpoints"), 5)
    for rank in sparing:
        rank.periodic.rolled_back(5)
        rank.periodic.resumed((1, 0))
    written(sparing)
    assert steps(tmp_path) == [2, 4]


def test_user_function_writes_the_state_at_the_end_of_the_step(tmp_path: Path) -> None:
    """When the script has its own save function, then one rank writes the state at the end of the
    step, and the checkpoint is marked as the script's own. If the function raises, only that
    checkpoint is not made."""
    content = [b"two", b"four"]

    def save(directory: Path, step: int) -> None:
        if step == 2:
            raise OSError("no space left on device")
        (directory / "deep").mkdir()
        (directory / "deep" / "weights").write_bytes(content.pop())

    with job(tmp_path, own=Own(save=save, load=print)) as ranks:
        for step in (2, 4):
            stage(ranks, step)
            content = [b"later", *content[:-1]] if step == 4 else content
            written(ranks)
        place = CheckpointStore(directory=tmp_path / "checkpoints").place(4)
        assert steps(tmp_path) == [4]
        assert (place / "dense" / "deep" / "weights").read_bytes() == b"four"
        assert checkpoint.verify(place).own
        assert ranks[0].expected == [1800.0, 0.0] * 2


def test_every_holder_writes_its_copy_with_the_option_all(tmp_path: Path) -> None:
    """When all copies are to be saved, then each rank that holds a shard writes its copy. If a rank
    has no memory or disk space, only its own copy is missing. Without the copy of the first rank,
    no checkpoint is made."""
    with job(tmp_path, copies="all") as ranks:
        ranks[1].adaptor.room = False
        stage(ranks, 2)
        written(ranks)
        ranks[1].adaptor.room, ranks[2].adaptor.full = True, True
        stage(ranks, 4)
        written(ranks)
        ranks[2].adaptor.full, ranks[0].adaptor.full = False, True
        stage(ranks, 6)
        written(ranks)
        store = CheckpointStore(directory=tmp_path / "checkpoints")
        found = {step: checkpoint.verify(store.place(step)).copies for step in steps(tmp_path)}
        assert {step: [file.name for file in files] for step, files in found.items()} == {
            2: ["copy-rank2/dense"],
            4: ["copy-rank1/dense"],
        }


def test_adaptor_without_tft_stage_is_refused(tmp_path: Path) -> None:
    """When periodic checkpoints are requested and the adaptor has no `tft_stage`, then an error
    says so at once."""
    with pytest.raises(UsageError, match="'own' cannot write periodic checkpoints"):
        make(tmp_path, 0, plugin=object())
