"""
The code of `tft run`: its plan, the run directory, the processes that it starts, and their exit
codes.
"""
