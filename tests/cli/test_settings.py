"""
Settings as options: what a launcher says, its parts understand.
"""

from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tft import config
from tft.config import JobSettings
from tft.core.job.policy import STRATEGIES
from tft.launcher.options import job_arguments, job_options, job_settings, settings_of

words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)

jobs = st.builds(
    JobSettings,
    job=words,
    run_dir=words.map(Path),
    broker=words,
    nnodes=st.integers(),
    nproc_per_node=st.integers(),
    adaptor=words,
    enable=st.lists(st.sampled_from(STRATEGIES), unique=True).map(tuple),
    max_incidents=st.integers(),
    max_rank_faults=st.integers(),
    replace_nodes=st.booleans(),
    spread_savers=st.booleans(),
    skip_batch=st.booleans(),
    checkpoint_every=st.integers(),
    checkpoint_dir=st.none() | words.map(Path),
    checkpoint_name=words,
    keep_checkpoints=st.integers(),
    save_copies=words,
    resume=st.booleans(),
    curve=st.none() | words.map(Path),
    audit=words,
)


def understood(arguments: list[str]) -> JobSettings:
    """
    What a part makes of its arguments.
    """
    part = click.Command("part", params=job_options(given=True))
    with part.make_context("part", arguments) as context:
        return job_settings(context.params)


@given(settings=jobs)
def test_a_part_is_told_what_its_launcher_was_told(settings: JobSettings) -> None:
    """
    When settings are written as arguments, then the options read the same settings from them.
    """
    assert understood(job_arguments(settings)) == settings


def test_the_defaults_are_those_of_the_declaration() -> None:
    """
    When only what has no default is given, then the rest is as `tft.config` declares it.
    """
    least = JobSettings(job="j", run_dir=Path("/d"), broker="h:1")

    assert understood(["--job", "j", "--run-dir", "/d", "--broker", "h:1"]) == least


def test_a_part_must_be_told_what_has_no_default() -> None:
    """
    When the run directory is left out, then a part refuses to guess it.
    """
    with pytest.raises(click.MissingParameter, match="run_dir"):
        understood(["--job", "j", "--broker", "h:1"])


def test_an_empty_list_is_refused() -> None:
    """
    When --enable names nothing, then that is refused: it might be meant as none or as all.
    """
    with pytest.raises(click.BadParameter, match="name at least one"):
        understood(["--job", "j", "--run-dir", "/d", "--broker", "h:1", "--enable", " ,"])


@pytest.mark.parametrize("declared", [config.JobSettings, config.RankSettings])
def test_every_setting_says_what_it_is(declared: type) -> None:
    """
    When a setting is declared, then a sentence stands under it: it is the option's help.
    """
    for setting in settings_of(declared):
        assert setting.sentence.endswith("."), setting.name
