"""
The interface for authors of adaptors and plugins.

An adaptor or a plugin imports this package, `tft` and `tft.errors`, and no other module of tft. The
package contains the hook specifications, the markers for hooks, the types that hooks use, and
helpers for adaptors. A program that starts ranks itself also imports `tft.spi.launcher`. An adaptor
may import `tft.spi.generators` and `tft.spi.plain_values`, which need numpy.
"""

from tft.addresses import ListenAddress, read_address
from tft.clock import Clock, SystemClock
from tft.files import sync, write_whole
from tft.keys import share_keys
from tft.last_words import leave_word
from tft.protocol.codec import pack, unpack
from tft.protocol.messages import (
    UNSLICED,
    FaultKind,
    GroupStanding,
    Noticed,
    OrderName,
    OutsideReport,
    PauseRequested,
    ResumeRequested,
    ShardCopies,
    StepWork,
    StopRequested,
    SwitchRequested,
    Verdict,
)
from tft.spi.adaptor import AdaptorSpecs
from tft.spi.digests import digest_parts
from tft.spi.faults import TrainingFault
from tft.spi.markers import hookimpl, hookspec
from tft.spi.options import starts_controller
from tft.spi.plugin import PluginSpecs
from tft.spi.state import (
    StateHooks,
    TrainingState,
    check_parts,
    is_position_of_loop,
    part_digests,
    skip_batches,
)
from tft.spi.types import (
    Advice,
    Buffer,
    CheckResult,
    DeviceBuffer,
    DeviceFault,
    Diagnosis,
    FaultView,
    Guard,
    IncidentView,
    LauncherStore,
    LoggerJob,
    Made,
    Numbers,
    OfferView,
    Parallelism,
    RankBeat,
    RankView,
    Remark,
    SessionView,
    ShardPayload,
    SliceContent,
    StepLogger,
    WorkMeter,
)

__all__ = [
    "UNSLICED",
    "AdaptorSpecs",
    "Advice",
    "Buffer",
    "CheckResult",
    "Clock",
    "DeviceBuffer",
    "DeviceFault",
    "Diagnosis",
    "FaultKind",
    "FaultView",
    "GroupStanding",
    "Guard",
    "IncidentView",
    "LauncherStore",
    "ListenAddress",
    "LoggerJob",
    "Made",
    "Noticed",
    "Numbers",
    "OfferView",
    "OrderName",
    "OutsideReport",
    "Parallelism",
    "PauseRequested",
    "PluginSpecs",
    "RankBeat",
    "RankView",
    "Remark",
    "ResumeRequested",
    "SessionView",
    "ShardCopies",
    "ShardPayload",
    "SliceContent",
    "StateHooks",
    "StepLogger",
    "StepWork",
    "StopRequested",
    "SwitchRequested",
    "SystemClock",
    "TrainingFault",
    "TrainingState",
    "Verdict",
    "WorkMeter",
    "check_parts",
    "digest_parts",
    "hookimpl",
    "hookspec",
    "is_position_of_loop",
    "leave_word",
    "pack",
    "part_digests",
    "read_address",
    "share_keys",
    "skip_batches",
    "starts_controller",
    "sync",
    "unpack",
    "write_whole",
]
