"""
Tests that programs can import and call MindIO's logger.
"""

import importlib

import pytest


def test_the_logger_formats_messages_like_printf(capfd: pytest.CaptureFixture[str]) -> None:
    """When a program logs with arguments, then they are formatted into the message. If they do not
    fit, the message and the arguments are written one after the other."""
    logger = importlib.import_module("mindio_ttp.controller_ttp.ttp_logger").LOGGER
    logger.info("rank:%s is at step %d", 3, 7)
    logger.warning("%d of them", "many")
    written = "".join(capfd.readouterr())
    assert "rank:3 is at step 7" in written
    assert "%d of them ('many',)" in written
