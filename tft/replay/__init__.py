"""
The story of a run: the recorded events of the job machine. This package records a story, judges it
again with the present job machine, and prints it.
"""
