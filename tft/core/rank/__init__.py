"""
The rank machine: the state machine that decides how the process of one rank carries out the orders
of the controller.
"""
