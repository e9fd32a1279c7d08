"""
Adaptors that break the contract in one way each: the matching test fails with a sentence.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.contract import broken
from tft.testing import contract_ranks
from tft.testing.contract import AdaptorContract, Training

BREACHES: Mapping[type[Training], tuple[str, str]] = {
    broken.WithoutClassify: ("test_needed_hooks_are_there", "tft_classify"),
    broken.WithoutBackups: (
        "test_hooks_that_belong_together_are_there_together",
        "the adaptor has only",
    ),
    broken.TakesAnything: ("test_an_unknown_object_is_refused", "it raised nothing"),
    broken.NeverTheSame: ("test_two_undisturbed_jobs_are_identical", "instead of"),
    broken.CaptureDraws: ("test_reading_the_state_changes_nothing", "two calls of `tft_capture`"),
    broken.OtherHolders: ("test_all_holders_of_a_shard_name_the_same_holders", "rank 1 says"),
    broken.DigestsOfAnAddress: ("test_copies_of_a_shard_have_equal_digests", "equal copies"),
    broken.WithoutDigests: ("test_copies_of_a_shard_have_equal_digests", "nothing is compared"),
    broken.DigestsOfACopy: ("test_a_changed_element_changes_a_digest", "no digest of a shard"),
    broken.UnknownFailure: ("test_a_killed_rank_changes_no_bit", "`tft_classify` does not know"),
    broken.GivesTooLittle: ("test_damaged_memory_changes_no_bit", "ends with another state"),
    broken.ForgetsTheData: ("test_a_killed_rank_changes_no_bit", "instead of"),
    broken.ChangesWhileForming: (
        "test_copies_may_be_read_while_groups_are_formed",
        "digests differ|with another state|instead of",
    ),
    broken.RestoresTheNewest: ("test_a_kept_copy_brings_back_its_step", "with another state"),
    broken.GivesThePresent: ("test_a_kept_copy_brings_back_its_step", "with another state"),
    broken.KeepsLaterCopies: ("test_a_kept_copy_brings_back_its_step", "that were given up"),
    broken.NeverWaits: ("test_a_rank_that_waits_is_known_to_wait", "has not said so"),
    broken.DeafToQuiesce: ("test_a_rank_that_waits_is_known_to_wait", "has not done `interrupted`"),
    broken.QuiesceOnce: ("test_quiesce_may_be_called_at_any_time", "called twice"),
    broken.SavesHalf: ("test_a_saved_job_is_loaded_bit_for_bit", "with another state"),
    broken.StagesAView: ("test_a_staged_checkpoint_is_loaded_bit_for_bit", "with another state"),
}
"""By training: the test that its adaptor fails, and words of the failure."""


@pytest.mark.parametrize("training", BREACHES, ids=lambda training: training.__name__)
def test_a_broken_adaptor_fails_the_matching_contract_test(
    training: type[Training], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When an adaptor breaks the contract in one way, then the test of that way fails, and its
    message names the failure."""
    limit = 3.0 if training in (broken.NeverWaits, broken.DeafToQuiesce) else 30.0
    for module in ("contract", "contract_ranks"):
        monkeypatch.setattr(f"tft.testing.{module}.LIMIT", limit)
    test, words = BREACHES[training]
    suite = type("Suite", (AdaptorContract,), {"training": training})()
    arguments = (tmp_path,) if test.endswith("loaded_bit_for_bit") else ()
    with pytest.raises(AssertionError, match=words):
        getattr(suite, test)(*arguments)


def test_every_contract_test_has_an_adaptor_that_fails_it() -> None:
    """When a test is in the contract, then this module has an adaptor that fails it."""
    tests = {name for name in vars(AdaptorContract) if name.startswith("test_")}
    assert {test for test, _ in BREACHES.values()} == tests
    assert contract_ranks.LIMIT > 30.0
