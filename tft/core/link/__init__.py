"""
Rules for processes that communicate over a bus: delivery of reports, leases, and hang detection.
"""
