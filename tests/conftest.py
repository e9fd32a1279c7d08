"""
Settings for all tests: `mindio_ttp` logs to the output of a test's processes and keeps no file in
the checkout. Tests of the log files change this for their own processes.
"""

import os

os.environ.setdefault("TTP_LOG_STDOUT", "1")
