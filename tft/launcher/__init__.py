"""
The code of the command `tft run`: the plan that is made from its options, the run directory, the
processes that the command starts, and the exit codes.
"""
