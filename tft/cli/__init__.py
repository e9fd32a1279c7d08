"""
The command line: `tft run`, which supervises a job, and the commands for its parts.
"""
