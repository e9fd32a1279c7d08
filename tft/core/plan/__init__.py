"""
Pure functions from facts to what can be done: coverage, repair, savers, offers.
"""
