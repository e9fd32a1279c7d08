"""
The job machine: what the controller judges.
"""
