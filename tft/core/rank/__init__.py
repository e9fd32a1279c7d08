"""
The rank machine: what one rank's process does with orders.
"""
