"""
Rules for processes that communicate over a bus: delivery of reports, leadership of a controller
(leases), and hang detection.
"""
