"""
Which sentences the controller has for consoles.
"""

from tft.controller.notices import KEPT, OF_ALL, OF_ONE, SPAN, Notices
from tft.protocol.messages import Notice


def texts(notices: Notices) -> list[str]:
    """
    Return the sentences that consoles get now.
    """
    news = notices.news(1)
    return [] if news is None else [notice.text for notice in news.notices]


def test_sentences_are_numbered_and_the_last_ones_are_repeated() -> None:
    """When there are sentences, then each message has the last ones, with their numbers. Before the
    first sentence there is no message."""
    notices = Notices()
    assert notices.news(1) is None
    for number in range(1, KEPT + 3):
        notices.incident(f"incident {number}", number)
    news = notices.news(7)
    assert news is not None
    assert (news.epoch, len(news.notices)) == (7, KEPT)
    assert news.notices[0] == Notice(number=3, text="incident 3", incident=3)


def test_rank_that_is_slow_and_fast_in_turn_does_not_flood_the_console() -> None:
    """When the remarks about one rank come again and again, then some are left out, others are
    not, and the next one says how many are missing."""
    notices = Notices()
    shown = [notices.remark("rank_slow_over", {"rank": 1, "step": i}, i) for i in range(10)]
    assert shown == [True] * OF_ONE + [False] * (10 - OF_ONE)
    assert notices.remark("rank_slow_over", {"rank": 2, "step": 11}, 11.0)
    assert texts(notices)[-1] == (
        "rank 2 is as fast as the others again since step 11 (6 remarks before it were left out "
        "here: see remarks.jsonl)"
    )
    assert notices.remark("rank_slow_over", {"rank": 1, "step": 99}, SPAN + 1)
    assert texts(notices)[-1] == "rank 1 is as fast as the others again since step 99"


def test_remarks_about_many_ranks_are_limited_and_incidents_are_not() -> None:
    """When hundreds of ranks are remarked at once, then only the first ones are told. An incident
    is told all the same."""
    notices = Notices()
    shown = [notices.remark("seen", {"rank": rank}, 0.0) for rank in range(300)]
    assert sum(shown) == OF_ALL
    notices.incident("incident 1", 1)
    assert texts(notices)[-1] == "incident 1"
