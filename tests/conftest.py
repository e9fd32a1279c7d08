"""
What holds for all tests: the lines of `mindio_ttp` go to the output of the processes of a test, and no file is
kept in the checkout. Tests of the files say otherwise for their own processes.
"""

import os

os.environ.setdefault("TTP_LOG_STDOUT", "1")
