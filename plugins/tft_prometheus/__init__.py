"""
The plugin of `tft run --metrics ADDRESS:PORT`: serves the state of a job to Prometheus (see
`docs/howto/metrics.md`).

The plugin serves the metrics in the controller's process, and runs no code in training processes.
It changes nothing in the job.
"""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import structlog

from tft.errors import UsageError
from tft.spi import RankBeat, hookimpl, starts_controller
from tft_prometheus.address import FILE, Address
from tft_prometheus.exporter import Exporter

VARIABLE = "TFT_METRICS"
"""The environment variable with the address at which the controller serves the metrics. `tft run`
sets it. For `tft lead` and `tft controller` the operator sets it."""
FILE_VARIABLE = "TFT_METRICS_FILE"
"""The environment variable with the path of the file to which the controller writes the address.
If it is empty or not set, the file is `metrics.json` in the run directory."""
OPTION = "--metrics"
FILE_OPTION = "--metrics-file"

log = structlog.get_logger()


class Plugin:
    """
    The plugin in a process that serves no metrics. Its hooks add the options to `tft run`, and
    check the given values.
    """

    @hookimpl
    def tft_options(self) -> Sequence[click.Option]:
        return [
            click.Option(
                [OPTION],
                metavar="ADDRESS:PORT",
                help="Serve metrics for Prometheus at /metrics, and /healthz; port 0: a free port.",
            ),
            click.Option(
                [FILE_OPTION],
                type=click.Path(dir_okay=False, path_type=Path),
                metavar="FILE",
                help="Write the address of the metrics to this .json file, for file_sd_configs of "
                "Prometheus, instead of RUN_DIR/metrics.json.",
            ),
        ]

    @hookimpl
    # `Any`, because the options of the command line have values of several types
    def tft_environment(self, options: Mapping[str, Any]) -> Mapping[str, str]:
        text: str | None = options["metrics"]
        file: Path | None = options["metrics_file"]
        if text is None:
            if file is not None:
                raise UsageError(f"{FILE_OPTION} does nothing without {OPTION} ADDRESS:PORT")
            return {}
        address = Address.read(f"{text} insecure" if options["insecure"] else text, OPTION)
        if importlib.util.find_spec("prometheus_client") is None:
            raise UsageError(
                f"{OPTION} needs the package prometheus-client, which is not installed: install it "
                "with `pip install 'tft-bus[prometheus]'`"
            )
        if not starts_controller(options, OPTION, f"{VARIABLE}={text}"):
            return {}
        address.check_free(OPTION)
        return {VARIABLE: address.text(), **_checked(file)}


class ServingPlugin(Plugin):
    """
    The plugin in the process of a controller that serves metrics.
    """

    def __init__(self) -> None:
        self._exporter: Exporter | None = None

    @hookimpl
    def tft_on_event(self, event: str, facts: Mapping[str, object]) -> None:
        if event == "leads":
            self._exporter = _exporter(facts)
        if self._exporter is not None:
            self._exporter.event(event, facts)

    @hookimpl
    def tft_on_leader(self) -> None:
        if self._exporter is not None:
            self._exporter.show_that_the_loop_turns()
            self._exporter.start()

    @hookimpl
    def tft_on_beat(self, node: int, ranks: Sequence[RankBeat]) -> None:
        if self._exporter is not None:
            self._exporter.beat(node, ranks)


def _checked(file: Path | None) -> Mapping[str, str]:
    """
    Return the environment variable that tells the controller the path `file`, the value of
    `--metrics-file`. Return no variable if `file` is None. Raises `UsageError` if Prometheus could
    not read this file, or if its directory does not exist.
    """
    if file is None:
        return {}
    if file.suffix != ".json":
        raise UsageError(
            f"{FILE_OPTION} {file}: Prometheus reads it only if its name ends in .json"
        )
    if not file.absolute().parent.is_dir():
        raise UsageError(f"{FILE_OPTION} {file}: the directory {file.parent} does not exist")
    return {FILE_VARIABLE: str(file.absolute())}


# if no metrics are served, use an object without the hook `tft_on_beat`, so that the controller
# need not prepare each heartbeat for this plugin
plugin = ServingPlugin() if os.environ.get(VARIABLE) else Plugin()
"""The object that tft loads as the plugin `prometheus`."""


def _exporter(facts: Mapping[str, object]) -> Exporter | None:
    """
    Return the exporter of the job that this controller leads, or None if it cannot serve metrics at
    the address in the environment. The reason is logged.
    """
    try:
        address = Address.read(os.environ.get(VARIABLE, ""), VARIABLE)
    except UsageError as wrong:
        log.warning("metrics_not_served", why=str(wrong))
        return None
    run_dir = Path(str(facts["run_dir"]))
    file = Path(os.environ.get(FILE_VARIABLE) or run_dir / FILE)
    return Exporter(address, file, str(run_dir))
