"""
Which incidents of a job of `incident_comparison` compare the copies of the ranks.
"""

TURN = 4
"""The number of incidents in a row with the comparison, and then without it: each kind of fault at
each of two ranks."""


def compares(incident: int) -> bool:
    """
    Return True if copies are compared in this incident, which is counted from 1. The start of the
    job, which is incident 0, has the comparison.
    """
    return (max(incident, 1) - 1) // TURN % 2 == 0
