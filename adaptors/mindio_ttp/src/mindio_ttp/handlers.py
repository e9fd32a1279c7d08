"""
Stores the functions that a training program registers with `tft_register_…_handler`. Calls these
functions with the same arguments as the library MindIO does.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mindio_ttp import checks, device, logs
from tft.spi import Clock, SystemClock

log = logs.get_logger()

NAMES = (
    "save_ckpt",
    "rename",
    "exit",
    "stop",
    "clean",
    "rebuild_group",
    "repair",
    "rollback",
    "stream_sync",
    "zit_downgrade_rebuild",
    "zit_upgrade_rebuild",
    "zit_upgrade_repair",
    "zit_upgrade_rollback",
    "decrypt",
)


@dataclass(slots=True)
class Handlers:
    """
    The functions that the training program has registered, each under a name of `NAMES`. If two
    functions are registered under the same name, the later function replaces the earlier function.
    """

    mindspore: bool = False
    limit: float = 180.0
    """The seconds that a registered function may take. A warning is logged if a function takes
    longer."""
    device: int | None = None
    """The number of the torch_npu device of this process. This device becomes the current device of
    the calling thread before each call, because functions are called on several threads."""
    _known: dict[str, tuple[Callable[..., Any], Any]] = field(default_factory=dict)
    """Maps a name to the registered function, and to the context that was registered with the
    function. The context is an object of the program, which some functions get as their last
    argument."""
    clock: Clock = field(default_factory=SystemClock)

    # Any: the caller has not checked the arguments
    def register(self, name: str, function: Any, context: Any) -> None:
        """
        Register `function`, a function of the training program, under `name`. Some functions get
        the `context` as their last argument. Raises `TypeError` if `function` cannot be called.
        """
        called = checks.function(f"tft_register_{name}_handler", function)
        self._known[name] = (called, context)

    def has(self, name: str) -> bool:
        """
        Return whether a function is registered under `name`.
        """
        return name in self._known

    def call(self, name: str, *told: Any) -> Any:  # Any: the program chooses the types
        """
        Call the function that is registered under `name` with the arguments `told`. Return the
        result of the function. If functions with this name get a context, pass the registered
        context as the last argument.
        """
        began = self.clock.now()
        try:
            return self._call(name, *told)
        finally:
            took = self.clock.now() - began
            if took > self.limit:
                log.warning("function_slow", name=name, took_s=round(took, 1), limit_s=self.limit)

    def _call(self, name: str, *told: Any) -> Any:  # Any: the program chooses the types
        function, context = self._known[name]
        device.use(self.device)
        if name in ("stream_sync", "decrypt") or name.startswith("zit_"):
            return function(*told)
        if name == "rename" and not self.mindspore:
            return function(*told)
        return function(*told, context)
