"""
The wire: a publish/subscribe bus through a broker, and the same contract within one process.
"""
