"""
Every error that tft raises, and whose fault it is.

    TftError
    ├── UsageError            the caller's: refused before anything was changed
    │   ├── UnknownAdaptor
    │   ├── AddressTaken
    │   └── RankTaken
    ├── PeerError             somebody else's: what they sent or did not send
    │   ├── MalformedMessage
    │   ├── TransferFailed
    │   └── OrderRefused
    ├── CheckpointCorrupt     the world's: what is on the disk is not what was written
    ├── StoryCorrupt          the same of the record of a run
    └── InternalError         ours: please report it
    JobEnded(SystemExit)      not an error: the job is over and this process is to leave
    Interrupted(BaseException)  not an error: the training loop is left, to be entered again

Messages are sentences an operator can act on: what was expected, what came, from whom.
"""


class TftError(Exception):
    """
    The root: catches everything of ours except `JobEnded`.
    """


class UsageError(TftError):
    """
    What was asked for cannot be done as asked. The command line exits 2 with the sentence.
    """


class UnknownAdaptor(UsageError):
    """
    No installed package offers an adaptor of that name.
    """


class AddressTaken(UsageError):
    """
    Something else listens where tft was told to bind.
    """


class RankTaken(UsageError):
    """
    Two processes claim one rank; this one came second.
    """


class PeerError(TftError):
    """
    What another process sent, or failed to send.
    """


class MalformedMessage(PeerError):
    """
    A frame that is no message of this version of tft.
    """


class TransferFailed(PeerError):
    """
    A shard could not be fetched whole from any of its sources.
    """


class OrderRefused(PeerError):
    """
    An order cannot be carried out by the one it was given to.
    """


class CheckpointCorrupt(TftError):
    """
    A checkpoint is not the one that was committed: a file is missing or its digest differs.
    """


class StoryCorrupt(TftError):
    """
    The record of a run is not as it was written: a line is missing, or cannot be read.
    """


class InternalError(TftError):
    """
    A bug of ours: a move that is not in the table.
    """


class JobEnded(SystemExit):
    """
    Raised out of `Session.run` in the training thread when the job is over before its script is.

    A `SystemExit`, so that an ordinary script unwinds, runs its `finally` blocks and leaves
    with `code` without a traceback: the fault that ended the job has been reported already.
    """


class Interrupted(BaseException):
    """
    Raised in the training thread at the edge of an update window while an incident is handled.

    A `BaseException`, so that an ordinary `except Exception` in a training loop does not keep it:
    `Session.run` catches it and enters the loop again at the agreed step.
    """
