"""
Settings for all tests: `mindio_ttp` logs to the output of a test's processes and keeps no file in
the checkout. Tests of the log files change this for their own processes. Hypothesis does not look
at the time that an example takes: the machines are shared.
"""

import os
from contextlib import suppress

os.environ.setdefault("TTP_LOG_STDOUT", "1")
with suppress(ImportError):  # the environments of the frameworks do not have it
    from hypothesis import settings

    settings.register_profile("tft", deadline=None)
    settings.load_profile("tft")
