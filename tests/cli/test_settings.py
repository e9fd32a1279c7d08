"""
Settings as options: the parts of a job get the settings that the launcher was given.
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
    warm_ranks=st.integers(),
    backup_every=st.integers(),
    checkpoint_every=st.integers(),
    checkpoint_dir=st.none() | words.map(Path),
    checkpoint_name=words,
    keep_checkpoints=st.integers(),
    save_copies=words,
    resume=st.booleans(),
    curve=st.none() | words.map(Path),
    audit=words,
    last_step=st.integers(),
    record_digests=st.booleans(),
)


def understood(arguments: list[str]) -> JobSettings:
    """
    Return the settings that a part reads from its arguments.
    """
    part = click.Command("part", params=job_options(given=True))
    with part.make_context("part", arguments) as context:
        return job_settings(context.params)


@given(settings=jobs)
def test_settings_survive_as_command_line_arguments(settings: JobSettings) -> None:
    """When settings are written as command-line arguments, then the options read the same settings
    from the arguments."""
    assert understood(job_arguments(settings)) == settings


def test_option_defaults_are_those_of_the_config_module() -> None:
    """When only the settings without a default are given, then all other settings have the defaults
    that `tft.config` declares."""
    least = JobSettings(job="j", run_dir=Path("/d"), broker="h:1")

    assert understood(["--job", "j", "--run-dir", "/d", "--broker", "h:1"]) == least


def test_missing_run_directory_is_refused() -> None:
    """When `--run-dir` is left out of the arguments of a controller or an agent, then the command
    line is refused."""
    with pytest.raises(click.MissingParameter, match="run_dir"):
        understood(["--job", "j", "--broker", "h:1"])


def test_empty_enable_list_is_refused() -> None:
    """When `--enable` names no strategy, then the command line is refused, because an empty list
    could mean none or all."""
    with pytest.raises(click.BadParameter, match="name at least one"):
        understood(["--job", "j", "--run-dir", "/d", "--broker", "h:1", "--enable", " ,"])


@pytest.mark.parametrize("declared", [config.JobSettings, config.RankSettings])
def test_every_setting_has_a_help_sentence(declared: type) -> None:
    """When a setting is declared, then it has a sentence that is the help text of its option."""
    for setting in settings_of(declared):
        assert setting.sentence.endswith("."), setting.name
