"""
The command line: `tft run`, which looks after a job, and the parts it starts.
"""
