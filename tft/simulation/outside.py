"""
The launcher of a simulated cluster, and other senders of reports outside the processes of the job.
"""

from tft.protocol.messages import OutsideReport
from tft.simulation.mail import Link, Mail, Post


class Outside:
    """
    The launcher, and any other sender of reports outside the job's processes.
    """

    def __init__(self, stage: Post) -> None:
        self._link = Link()
        self.mail = Mail(stage, "run", self._link)

    def report(self, report: OutsideReport) -> None:
        """
        Send a report to the leading controller, and repeat the report until it is acknowledged.
        """
        self.mail.post(report)
