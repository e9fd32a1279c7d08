"""
`tft verify`: runs a user's script without faults and with killed ranks, and compares what the runs
compute.
"""
