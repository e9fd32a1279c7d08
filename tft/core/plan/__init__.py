"""
The planner: pure functions from facts to plans. They find a common step, transfers, savers and
offers.
"""
