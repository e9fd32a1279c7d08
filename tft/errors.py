"""
All errors that tft raises, sorted by the side that causes them.

    TftError
    ├── UsageError            the caller: refused before anything was changed
    │   ├── UnknownAdaptor
    │   ├── AddressTaken
    │   └── RankTaken
    ├── PeerError             another process: what it sent or did not send
    │   ├── MalformedMessage
    │   ├── TransferFailed
    │   └── OrderRefused
    │       └── StateChanged
    ├── CheckpointCorrupt     the disk: a checkpoint is not as it was written
    ├── StoryCorrupt          the disk: the record of a run is not as it was written
    └── InternalError         tft itself: please report it
    JobEnded(SystemExit)      not an error: the job is over and this process must end
    Interrupted(BaseException)  not an error: an incident makes the rank leave its training loop

The message of each error tells an operator what was expected, what came instead, and from which
process.
"""

from collections.abc import Iterator


class TftError(Exception):
    """
    The base class of all errors of tft; `JobEnded` and `Interrupted` are not errors.
    """


class UsageError(TftError):
    """
    The user or the calling code has asked for something that cannot be done as it was asked.

    The command line prints the message and exits with code 2.
    """


class UnknownAdaptor(UsageError):
    """
    No installed package has a usable entry point with the requested name. The entry point may be
    for an adaptor, or for another extension of tft.
    """


class AddressTaken(UsageError):
    """
    Another process already listens on the address at which tft was told to listen.
    """


class RankTaken(UsageError):
    """
    Two processes want to be the same rank, and this process came second.
    """


class PeerError(TftError):
    """
    Another process sent something wrong, or failed to send something.
    """


class MalformedMessage(PeerError):
    """
    A received frame is not a message of this version of tft.
    """


class TransferFailed(PeerError):
    """
    A shard could not be fetched completely from any of the ranks that should send it.
    """


class OrderRefused(PeerError):
    """
    The process that received an order cannot carry it out.
    """


class StateChanged(OrderRefused):
    """
    An order that must not change the training state has changed it, so this rank has no complete
    state any more.
    """


class CheckpointCorrupt(TftError):
    """
    A checkpoint on the disk differs from what was written: a file is missing or its digest differs.
    """


class StoryCorrupt(TftError):
    """
    The record of a run is not as it was written: a line is missing or unreadable.
    """


class InternalError(TftError):
    """
    A bug in tft, such as a transition that is not in the table of a state machine.
    """


class JobEnded(SystemExit):
    """
    Raised on the training thread, for example by `Session.run`, when the job ends before the script
    has ended.

    This exception is a `SystemExit`, so an ordinary script runs its `finally` blocks and exits with
    the status `code` and without a traceback. A fault that ended the job has been reported already.
    """


class Interrupted(BaseException):
    """
    Raised on the training thread when the thread must leave the training loop because of an
    incident. It is raised before an update window opens, or at the end of a step.

    This exception is a `BaseException`, so an ordinary `except Exception` in a training loop does
    not catch it. `Session.run` catches the exception. After the incident, `Session.run` enters the
    loop again, at the step that the controller has chosen.
    """


def chain_of(error: BaseException, *, hidden: bool = False) -> Iterator[BaseException]:
    """
    Yield an exception, and then the exceptions from which it was raised (`raise … from …`), or
    during whose handling it was raised. With `hidden`, follow also a context that `raise … from
    None` hides. Each exception comes once, also if they refer to each other in a circle.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (
            None if link.__suppress_context__ and not hidden else link.__context__
        )
