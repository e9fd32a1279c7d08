"""
The command line: `tft run`, which supervises a job, and the parts it starts.
"""
