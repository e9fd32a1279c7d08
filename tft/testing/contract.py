"""
The contract of an adaptor, as tests that the author of an adaptor runs.

    class MyTraining(Training):
        adaptor = "mine"
        ...

    class TestMyAdaptor(AdaptorContract):
        training = MyTraining

The tests start real processes that call the hooks of the adaptor in the order in which a worker
calls them. In some tests a rank is killed, the memory of a rank is damaged, or the job is
rolled back or loaded. The job must end bit for bit as an undisturbed job.
"""

from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import ClassVar

from tft.protocol.messages import FaultKind
from tft.spi.adaptor import NEEDED_HOOKS
from tft.testing.contract_ranks import LIMIT, RankProcess, Ranks, Training

__all__ = ["AdaptorContract", "Training"]

LAST = 5
"""The last step that each job in these tests trains."""
CUT = 2
"""The step after which the tests disturb the job, for example by killing a rank."""
KINDS = frozenset(FaultKind.__args__)  # type: ignore[attr-defined] # all values of the Literal type

Record = tuple[list[list[object]], list[dict[str, str]]]
"""The results of a job: for each rank the values that its steps have returned, and for each rank
the digests of its final state."""


class AdaptorContract:
    """
    The tests that an adaptor must pass. A subclass sets `training` to the class of its small
    training program.
    """

    training: ClassVar[type[Training]]
    world: ClassVar[int] = 3
    """The number of ranks of each job. There are three, because the sum of an all-reduce of two
    ranks is the same in either order, so two ranks would not show a wrong order."""
    _undisturbed: ClassVar[dict[tuple[type[Training], int], Record]] = {}

    # ---------------------------------------------------------------- which hooks the adaptor has

    def test_needed_hooks_are_there(self) -> None:
        """
        The adaptor implements every needed hook. If one is missing, tft refuses each rank of the
        job.
        """
        hook = self.training.hooks()
        missing = [name for name in NEEDED_HOOKS if not getattr(hook, name).get_hookimpls()]
        assert not missing, f"the adaptor does not implement {missing}"

    def test_hooks_that_belong_together_are_there_together(self) -> None:
        """
        An adaptor implements all hooks of a set that belong together, or none of them. An adaptor
        that can make copies of its state, for example, must also be able to list the copies and to
        restore them.
        """
        hook = self.training.hooks()
        for group in (
            ("tft_backup", "tft_backups", "tft_restore"),
            ("tft_beside", "tft_replaced"),
        ):
            there = [name for name in group if getattr(hook, name).get_hookimpls()]
            assert there in ([], list(group)), (
                f"the hooks {list(group)} belong together, but the adaptor has only {there}"
            )

    def test_an_unknown_object_is_refused(self) -> None:
        """
        An object that the adaptor does not know is refused with `UsageError`. If the adaptor
        ignored it, the job would lose the state of the object in the first incident.
        """
        with Ranks(self.training, 1) as ranks:
            refusal = ranks[0].ask("adopt_more")
            assert refusal == "UsageError", (
                "`tft_adopt` has to raise UsageError for an object that the adaptor does not know; "
                f"it raised {refusal or 'nothing'}"
            )

    # ---------------------------------------------------------------- training without incidents

    def test_two_undisturbed_jobs_are_identical(self) -> None:
        """
        Two undisturbed jobs give the same results. The other tests compare disturbed jobs with an
        undisturbed job, so undisturbed jobs must be repeatable.
        """
        expected = self.undisturbed()
        with self.begun() as ranks:
            told = ranks.all("train", LAST)
            identical((told, ranks.all("digests")), expected, "a second undisturbed job")

    def test_reading_the_state_changes_nothing(self) -> None:
        """
        Capturing, comparing and giving away the state between two steps does not change the result
        of the job.
        """
        expected = self.undisturbed()
        with self.begun() as ranks:
            before = ranks.all("train", CUT)
            for rank in ranks:
                assert rank.ask("capture") == rank.ask("capture"), (
                    f"rank {rank.rank}: two calls of `tft_capture` in a row differ: the first has "
                    "changed the rank-local state"
                )
                for shard in rank.ask("shards"):
                    rank.ask("compared", shard)
                    rank.ask("give", shard, CUT)
            after = ranks.all("train", LAST)
            identical(
                (joined(before, after), ranks.all("digests")), expected, "a job that was read"
            )

    # ---------------------------------------------------------------- copies of shards

    def test_all_holders_of_a_shard_name_the_same_holders(self) -> None:
        """
        All ranks that hold a shard name the same holders of the shard. If two ranks disagree, tft
        may try to fetch a shard from a rank that does not hold it.
        """
        with self.begun() as ranks:
            told = ranks.all("shards")
            for rank, shards in enumerate(told):
                assert shards, f"rank {rank} holds no shard: its state would end with its process"
                for shard, holders in shards.items():
                    assert rank in holders, (
                        f"rank {rank} holds {shard!r}, but names only the holders {holders}"
                    )
                    for other in holders:
                        assert told[other].get(shard) == holders, (
                            f"rank {rank} says that ranks {holders} hold {shard!r}, rank {other} "
                            f"says {told[other].get(shard)}"
                        )

    def test_copies_of_a_shard_have_equal_digests(self) -> None:
        """
        Equal copies of a shard have equal digests. If the digests differ, tft takes equal copies
        for damaged ones, and every incident ends in a return to a checkpoint.
        """
        with self.begun() as ranks:
            ranks.all("train", CUT)
            for rank, shard, holders in replicas(ranks):
                mine, other = (
                    ranks[rank].ask("compared", shard),
                    ranks[holders[0]].ask("compared", shard),
                )
                assert mine, (
                    f"the digests of {shard!r} on rank {rank} are empty: nothing is compared"
                )
                differ = [part for part in mine if mine[part] != other.get(part)]
                differ += mine.keys() ^ other.keys()
                assert not differ, (
                    f"ranks {rank} and {holders[0]} hold equal copies of {shard!r}, but their "
                    f"digests of {differ} differ"
                )

    def test_a_changed_element_changes_a_digest(self) -> None:
        """
        A change of one element changes a digest. If a damaged copy has the digests of a sound copy,
        training continues with wrong numbers.
        """
        with self.begun() as ranks:
            ranks.all("train", CUT)
            shards = list(ranks[0].ask("shards"))
            before = [ranks[0].ask("compared", shard) for shard in shards]
            ranks[0].ask("damage")
            after = [ranks[0].ask("compared", shard) for shard in shards]
            assert before != after, "the state was damaged, and no digest of a shard has changed"

    # ---------------------------------------------------------------- what hooks do in incidents

    def test_a_killed_rank_changes_no_bit(self) -> None:
        """
        A rank is killed while the other ranks wait for it in a collective. The other ranks leave
        the collective. A new process of the killed rank takes its state from them. The job ends as
        the undisturbed job.
        """
        expected = self.undisturbed()
        with self.begun() as ranks:
            before = ranks.all("train", CUT)
            local_state = ranks[1].ask("local_state", CUT)
            ranks[1].kill()
            self.interrupt(ranks, but=1)
            ranks.replace(1)
            self.repair(ranks, CUT, {1: local_state})
            after = ranks.all("train", LAST)
            identical(
                (joined(before, after), ranks.all("digests")), expected, "a job with a killed rank"
            )

    def test_damaged_memory_changes_no_bit(self) -> None:
        """
        The memory of a rank is damaged. The rank keeps its process and takes its state from another
        rank. The job ends as the undisturbed job.
        """
        expected = self.undisturbed()
        with self.begun() as ranks:
            before = ranks.all("train", CUT)
            self.interrupt(ranks, but=1)
            ranks[1].ask("damage")
            for rank in ranks:
                rank.ask("clear")
            ranks.copy(1, CUT)
            self.go_on(ranks, CUT, {})
            after = ranks.all("train", LAST)
            identical(
                (joined(before, after), ranks.all("digests")),
                expected,
                "a job with damaged memory",
            )

    def test_copies_may_be_read_while_groups_are_formed(self) -> None:
        """
        The ranks leave their loops. They form process groups, and another thread computes the
        digests of their shards meanwhile. The digests are those of the state before, and the job
        ends as the undisturbed job.
        """
        expected = self.undisturbed()
        with self.begun() as ranks:
            before = ranks.all("train", CUT)
            digests = ranks.all("all_compared")
            ranks.all("clear")
            assert ranks.form_and_compare() == digests, (
                "digests differ that were computed on another thread while groups were formed"
            )
            for rank in ranks:
                rank.ask("roll_back", CUT, None)
            after = ranks.all("train", LAST)
            identical(
                (joined(before, after), ranks.all("digests")), expected, "a job with new groups"
            )

    def test_a_kept_copy_brings_back_its_step(self) -> None:
        """
        A rank is killed, and the job goes back to an earlier step of which every rank keeps a copy.
        The new process takes the copy of another rank; all other ranks restore their own copies.
        All ranks train the later steps again, with the same results.
        """
        expected = self.undisturbed()
        with self.begun() as ranks:
            ranks.all("train", CUT + 1)
            kept = ranks.all("backups")
            if kept[0] is None:
                return  # the adaptor keeps no copies of ended steps, so there is nothing to test
            for number, steps in enumerate(kept):
                assert CUT + 1 in steps, (
                    f"rank {number} keeps no copy of the step that it has ended"
                )
            step = min(set.intersection(*map(set, kept)))
            local_state = ranks[1].ask("local_state", step)
            ranks[1].kill()
            self.interrupt(ranks, but=1)
            ranks.replace(1)
            for rank in ranks:
                rank.ask("clear")
            ranks.copy(1, step, kept=True)
            for rank in (each for each in ranks if each.rank != 1):
                rank.ask("restore", step)
                assert step in rank.ask("backups"), (
                    f"rank {rank.rank}: `tft_restore` has dropped the copy that it restored"
                )
            self.go_on(ranks, step, {1: local_state})
            for rank in ranks:
                assert all(each <= step for each in rank.ask("backups")), (
                    f"rank {rank.rank} has copies of steps that were given up: `tft_rollback` has "
                    "to drop them"
                )
            after = ranks.all("train", LAST)
            steps, final = expected
            identical(
                (after, ranks.all("digests")),
                ([told[step:] for told in steps], final),
                f"a job that was taken back to its copy of step {step}",
            )

    def test_a_rank_that_waits_is_known_to_wait(self) -> None:
        """
        The hook `tft_waiting` returns True for a rank that waits in a collective. If the hook
        returns False, tft treats this rank as the one that hangs.
        """
        with self.begun() as ranks:
            ranks.all("train", CUT)
            ranks[0].tell("interrupted")
            self.await_waiting(ranks, 0)
            ranks[0].ask("quiesce")
            ranks[0].hear("interrupted")

    def test_quiesce_may_be_called_at_any_time(self) -> None:
        """
        The hook `tft_quiesce` does no harm when no rank hangs, or when no process groups exist. New
        process groups can be formed after the call.
        """
        with self.begun() as ranks:
            ranks.all("quiesce")
            ranks.all("quiesce")
            ranks.all("clear")
            ranks.all("quiesce")
            ranks.form()
            ranks.all("train", CUT)

    # ---------------------------------------------------------------- writing, loading checkpoints

    def test_a_saved_job_is_loaded_bit_for_bit(self, tmp_path: Path) -> None:
        """
        A checkpoint is written by one holder of each shard and loaded by new processes. The job
        ends as the undisturbed job.
        """
        self.saved_and_loaded(tmp_path, staged=False)

    def test_a_staged_checkpoint_is_loaded_bit_for_bit(self, tmp_path: Path) -> None:
        """
        The shards are first copied in memory, written later, and loaded by new processes. The job
        ends as the undisturbed job.
        """
        self.saved_and_loaded(tmp_path, staged=True)

    # ---------------------------------------------------------------- functions that the tests share

    def begun(self) -> Ranks:
        """
        Return the ranks of a new job, as a context manager. When a test enters the context, the
        ranks form their process groups.
        """
        return Ranks(self.training, self.world, formed=True)

    def undisturbed(self) -> Record:
        """
        Return the record of an undisturbed job: the results of its steps and its final digests. The
        job runs once for all tests of a class.
        """
        key = self.training, self.world
        if key not in self._undisturbed:
            with self.begun() as ranks:
                self._undisturbed[key] = ranks.all("train", LAST), ranks.all("digests")
        return self._undisturbed[key]

    def await_waiting(self, ranks: Ranks, rank: int) -> None:
        """
        Wait until the adaptor reports that `rank` waits in a collective. The test has started a
        step on this rank only. Raises `AssertionError` after `LIMIT` seconds.
        """
        end = monotonic() + LIMIT
        while not ranks[rank].ask("is_waiting"):
            assert monotonic() < end, (
                f"rank {rank} waits for other ranks, and `tft_waiting` has not said so in "
                f"{LIMIT:.0f} s"
            )

    def interrupt(self, ranks: Ranks, *, but: int) -> None:
        """
        Let all ranks except the rank `but` begin a step, which they cannot finish without that
        rank. Interrupt the step with the hook `tft_quiesce`.
        """
        others = [rank for rank in ranks if rank.rank != but]
        for rank in others:
            rank.tell("interrupted")
        for rank in others:
            rank.ask("quiesce")
        for rank in others:
            kind = rank.hear("interrupted")
            assert kind in KINDS, (
                f"`tft_classify` does not know the exception that took rank {rank.rank} out of its "
                f"collective (it returned {kind!r}): tft would take it for a bug of the script"
            )

    def repair(self, ranks: Ranks, step: int, local_state: dict[int, bytes]) -> None:
        """
        Give the ranks in `local_state`, which have new processes, the state of `step` from the
        other ranks. `local_state` contains the rank-local state of each of these ranks.
        """
        for rank in ranks:
            rank.ask("clear")
        for rank_number in local_state:
            ranks.copy(rank_number, step)
        self.go_on(ranks, step, local_state)

    def go_on(self, ranks: Ranks, step: int, local_state: dict[int, bytes]) -> None:
        """
        Form new process groups, and roll all ranks back to the end of `step`. `local_state`
        contains the rank-local state of each rank that has a new process.
        """
        ranks.form()
        for rank in ranks:
            rank.ask("roll_back", step, local_state.get(rank.rank))

    def saved_and_loaded(self, directory: Path, *, staged: bool) -> None:
        """
        Save a job after step `CUT`, load the job in new processes, and compare the end of the job
        with that of an undisturbed job. With `staged`, the shards are copied in memory and written
        later.
        """
        expected = self.undisturbed()
        with self.begun() as ranks:
            if staged and not ranks[0].ask("stages"):
                return  # the adaptor cannot stage shards, so there is nothing to test
            before = ranks.all("train", CUT)
            local_state = dict(enumerate(ranks.all("local_state", CUT)))
            state = ranks.all("digests")
            writers = list(self.writers(ranks))
            for rank, shards in writers:
                if staged:
                    rank.ask("stage", shards)
                else:
                    rank.ask("save", directory, shards)
            assert ranks.all("digests") == state, (
                "saving a checkpoint has changed the state of a rank"
            )
            written: list[str] = []
            if staged:
                # train one more step before the staged copies are written: training must not change
                # the copies
                ranks.all("train", CUT + 1)
            for rank, shards in writers:
                again = ("write_staged", directory) if staged else ("save", directory, shards)
                written += rank.ask(*again)
            written += [] if staged else ranks[0].ask("join_files", directory, written)
            for name in written:
                assert (directory / name).is_file(), (
                    f"the adaptor says that it has written {name!r}, but there is no such file"
                )
        with Ranks(self.training, self.world) as ranks:
            ranks.all("load", directory, CUT)
            self.go_on(ranks, CUT, local_state)
            after = ranks.all("train", LAST)
            identical(
                (joined(before, after), ranks.all("digests")), expected, "a job that was loaded"
            )

    def writers(self, ranks: Ranks) -> Iterator[tuple[RankProcess, list[str]]]:
        """
        Yield the ranks that write a checkpoint, each with the shards that the rank writes. Each
        shard is written by one of its holders.
        """
        shards = {shard: holders for told in ranks.all("shards") for shard, holders in told.items()}
        for rank in ranks:
            mine = [shard for shard, holders in shards.items() if holders[-1] == rank.rank]
            if mine:
                yield rank, mine


def replicas(ranks: Ranks) -> Iterator[tuple[int, str, tuple[int, ...]]]:
    """
    Yield each rank with each of its shards that has several copies, and the holders of the shard.
    """
    for rank, shards in enumerate(ranks.all("shards")):
        for shard, holders in shards.items():
            if len(holders) > 1:
                yield rank, shard, holders


def joined(before: list[list[object]], after: list[list[object]]) -> list[list[object]]:
    """
    Return, for each rank, the results of its steps before an incident, followed by the results of
    its steps after the incident.
    """
    return [first + second for first, second in zip(before, after, strict=True)]


def identical(found: Record, expected: Record, what: str) -> None:
    """
    Check that the results of a job are bit for bit those of the undisturbed job. `found` is the
    record of the job, and `expected` that of the undisturbed job. `what` names the job in messages.
    Raises `AssertionError` with the first difference.
    """
    for rank, (mine, theirs) in enumerate(zip(found[0], expected[0], strict=True)):
        for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            assert one == other, (
                f"{what}: rank {rank}, result {number + 1} of {len(theirs)}: {one!r} instead of "
                f"{other!r}"
            )
    for rank, (digests, others) in enumerate(zip(found[1], expected[1], strict=True)):
        differ = sorted(name for name in others if digests.get(name) != others[name])
        assert not differ, f"{what}: rank {rank} ends with another state: {', '.join(differ)}"
