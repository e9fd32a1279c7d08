"""
The story of a run: the recorded events of the job machine (the state machine that makes the
decisions of the controller). This package records a story, replays it with the present version of
the job machine, and prints it as a timeline.
"""
