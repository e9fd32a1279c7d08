"""
What `tft run` does: its plan, the run directory, the processes and their exit codes.
"""
