"""
A simulated cluster: the real state machines of tft run in virtual time. One seed decides all faults
and delays. `python -m tft.simulation --seeds 0:2000` runs 2000 seeds.
"""
