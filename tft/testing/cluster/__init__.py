"""
A cluster that is simulated: the real machines, in virtual time, under every kind of trouble that
one seed decides. `python -m tft.testing.cluster --seeds 0:2000` runs it.
"""
