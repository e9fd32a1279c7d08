"""
The job machine: the state machine that makes the decisions of the controller about one job.
"""
