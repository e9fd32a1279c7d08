"""
The rank machine: the state machine with which the process of one rank carries out its orders.
"""
