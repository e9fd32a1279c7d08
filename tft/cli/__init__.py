"""
The command line: `tft run`, which supervises a job, commands that start one process of a job, such
as `tft broker`, and commands about jobs and their records.
"""
