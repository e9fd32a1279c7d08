"""
The job machine: the state machine with which the controller decides.
"""
