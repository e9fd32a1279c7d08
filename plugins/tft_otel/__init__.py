"""
The plugin of `tft run --otlp URL`: exports incidents as spans, and the events of the controller as
log events, over OTLP (see `docs/howto/opentelemetry.md`).

The plugin exports from the controller's process, and runs no code in training processes. It changes
nothing in the job.
"""

import atexit
import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click
import structlog

from tft.errors import UsageError
from tft.spi import hookimpl, starts_controller

if TYPE_CHECKING:
    from tft_otel.exporter import Exporter

VARIABLE = "TFT_OTLP"
"""The environment variable with the base URL of the receiver. `tft run` sets it. For `tft lead` and
`tft controller` the operator sets it, or one of the standard variables in `ENDPOINTS`."""
OPTION = "--otlp"
ENDPOINTS = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT",
)
"""The standard environment variables of OpenTelemetry that name a receiver. If one of them is set,
the plugin exports."""
DISABLED = "OTEL_SDK_DISABLED"
PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
EXPORTERS = {"traces": "OTEL_TRACES_EXPORTER", "logs": "OTEL_LOGS_EXPORTER"}
NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")

log = structlog.get_logger()


class Plugin:
    """
    The plugin in a process that exports nothing. Its hooks add the option `--otlp` to `tft run`,
    and check the given value.
    """

    @hookimpl
    def tft_options(self) -> Sequence[click.Option]:
        return [
            click.Option(
                [OPTION],
                metavar="URL",
                help="Export incidents as spans, and events as log events, to this receiver of "
                "OpenTelemetry (OTLP over HTTP, such as http://localhost:4318).",
            )
        ]

    @hookimpl
    # `Any`, because the options of the command line have values of several types
    def tft_environment(self, options: Mapping[str, Any]) -> Mapping[str, str]:
        url: str | None = options["otlp"]
        if url is None:
            return {}
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise UsageError(
                f"{OPTION} {url}: give the base URL of a receiver, such as http://localhost:4318"
            )
        if not starts_controller(options, OPTION, f"{VARIABLE}={url}"):
            return {}
        if missing():
            raise UsageError(
                f"{OPTION} needs the packages of OpenTelemetry, which are not installed: install "
                "them with `pip install 'tft-bus[otel]'`"
            )
        return {VARIABLE: url.rstrip("/")}


class ExportingPlugin(Plugin):
    """
    The plugin in the process of a controller that exports incidents and events.
    """

    def __init__(self) -> None:
        self._exporter: Exporter | None = None

    @hookimpl
    def tft_on_event(self, event: str, facts: Mapping[str, object]) -> None:
        if event == "leads":
            self._exporter = _exporter(facts)
            if self._exporter is not None:
                atexit.register(self._exporter.close)
        if self._exporter is not None:
            self._exporter.event(event, facts)

    @hookimpl
    def tft_on_incident_closed(self, incident: Mapping[str, object], began: float) -> None:
        if self._exporter is not None:
            self._exporter.incident(incident, began)


def missing() -> bool:
    """
    Return True if one of the packages of OpenTelemetry that this plugin needs is not installed.
    """
    try:
        return any(importlib.util.find_spec(name) is None for name in NEEDED)
    except ModuleNotFoundError:  # the parent package of a name is missing
        return True


def exports() -> bool:
    """
    Return whether environment variables request an export: one of them names a receiver, and none
    switches OpenTelemetry off.
    """
    if os.environ.get(DISABLED, "").strip().lower() == "true":
        return False
    return any(os.environ.get(name) for name in (VARIABLE, *ENDPOINTS))


def _exporter(facts: Mapping[str, object]) -> "Exporter | None":
    """
    Return the exporter of the job that this controller leads, or None if it cannot export. The
    reason is logged.
    """
    protocol = os.environ.get(PROTOCOL, "http/protobuf")
    if missing():
        why = "the packages of OpenTelemetry are not installed: pip install 'tft-bus[otel]'"
    elif protocol != "http/protobuf" and not os.environ.get(VARIABLE):
        why = f"{PROTOCOL} is {protocol!r}, and tft speaks http/protobuf only"
    else:
        wanted = [signal for signal, name in EXPORTERS.items() if os.environ.get(name) != "none"]
        try:
            from tft_otel.exporter import Exporter

            return Exporter(os.environ.get(VARIABLE), wanted, facts)
        # catch every exception, because the SDK reads many environment variables and may raise an
        # exception for an invalid value of any of them
        except Exception as error:  # noqa: BLE001 (third-party code may raise any exception)
            why = f"{type(error).__name__}: {error}"
    log.warning("telemetry_not_exported", why=why)
    return None


# if nothing is exported, use an object without the other hooks, so that the controller need not
# call this plugin
plugin = ExportingPlugin() if exports() else Plugin()
"""The object that tft loads as the plugin `otel`."""
