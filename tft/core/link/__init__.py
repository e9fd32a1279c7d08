"""
What holds between parts that talk over a bus: delivery, leases, silence.
"""
