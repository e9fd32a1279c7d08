"""
The plugin of `tft run --log NAME[,NAME…]`: sends the values of `session.log` to wandb, MLflow,
TensorBoard and other loggers (see `docs/howto/logging.md`).

In the controller's process, the plugin starts one further process, in which all loggers are called.
It runs no code in training processes.
"""

import atexit
import importlib.util
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import click

from tft.errors import UsageError
from tft.spi import RankBeat, Remark, hookimpl, starts_controller
from tft_loggers.supervisor import Supervisor

VARIABLE = "TFT_LOG"
"""The environment variable with the names of the loggers, separated by commas. `tft run` sets it.
For `tft lead` and `tft controller` the operator sets it."""
OPTION = "--log"
GROUP = "tft.loggers"
"""The entry point group in which packages register loggers."""
NEEDED = {"wandb": "wandb", "mlflow": "mlflow", "tensorboard": "tensorboardX"}
"""Maps each logger of this package to the Python module that it needs. To install the module, the
user names the logger as an extra, as in `tft-bus[wandb]`."""


class Plugin:
    """
    The plugin in a process without loggers. Its hooks add the option `--log` to `tft run`, and
    check the given value.
    """

    @hookimpl
    def tft_options(self) -> Sequence[click.Option]:
        return [
            click.Option(
                [OPTION],
                metavar="NAME[,NAME…]",
                help="Send the values of session.log to these loggers: wandb, mlflow, tensorboard, "
                "jsonl (a file only), or those of other packages.",
            )
        ]

    @hookimpl
    # `Any`, because the options of the command line have values of several types
    def tft_environment(self, options: Mapping[str, Any]) -> Mapping[str, str]:
        text: str | None = options["log"]
        if text is None:
            return {}
        if not starts_controller(options, OPTION, f"{VARIABLE}={text}"):
            return {}
        return {VARIABLE: ",".join(checked(text, OPTION))}


class LeadingPlugin(Plugin):
    """
    The plugin in the process of the controller, in a job with loggers.
    """

    def __init__(self) -> None:
        self._supervisor: Supervisor | None = None

    @hookimpl
    def tft_on_event(self, event: str, facts: Mapping[str, object]) -> None:
        if event == "leads":
            names = os.environ.get(VARIABLE, "").split(",")
            self._supervisor = Supervisor(Path(str(facts["run_dir"])), str(facts["job"]), names)
            self._supervisor.start()
            atexit.register(self._supervisor.close)
        elif event == "job_ends" and self._supervisor is not None:
            self._supervisor.ends(str(facts.get("result", "")))

    @hookimpl
    def tft_on_beat(self, node: int, ranks: Sequence[RankBeat]) -> Sequence[Remark]:
        return [] if self._supervisor is None else self._supervisor.remarks()

    @hookimpl
    def tft_on_final_step(self, step: int) -> None:
        if self._supervisor is not None:
            self._supervisor.final(step)


# if the job has no loggers, use an object without the other hooks, so that the controller need not
# call this plugin
plugin = LeadingPlugin() if os.environ.get(VARIABLE) else Plugin()
"""The object that tft loads as the plugin `loggers`."""


def checked(text: str, where: str) -> list[str]:
    """
    Return the names of loggers in `text`, which are separated by commas. `where` is the option or
    the variable that contained `text`, for the error message.

    Raises `UsageError` if no logger has one of the names, if several packages offer a logger with
    the name, or if a package that the logger needs is not installed.
    """
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    offered = sorted({entry.name for entry in entry_points(group=GROUP)})
    for name in names:
        values = {entry.value for entry in entry_points(group=GROUP, name=name)}
        if not values:
            raise UsageError(
                f"{where} {text}: there is no logger {name!r}; installed: {', '.join(offered)}"
            )
        if len(values) > 1:
            raise UsageError(
                f"{where} {text}: several packages offer a logger {name!r} "
                f"({', '.join(sorted(values))}): uninstall all but one"
            )
        needed = NEEDED.get(name)
        if needed is not None and importlib.util.find_spec(needed) is None:
            raise UsageError(
                f"{where} {text}: the logger {name!r} needs the package {needed}, which is not "
                f"installed: install it with `pip install 'tft-bus[{name}]'`"
            )
    return names
