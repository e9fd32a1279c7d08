"""
The message bus between the processes of a job.

The package has two buses with the same interface: publish/subscribe through a broker (ZeroMQ), and
a bus within one process for tests and simulations.
"""
