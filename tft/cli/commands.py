"""
The commands of `tft` as click commands. Each command imports the code it needs when it runs.
"""

import signal
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import click
import pluggy

from tft.config import inherited_environment
from tft.errors import UsageError
from tft.launcher.options import LOOPBACK, job_options, job_settings
from tft.logs import configure_logs
from tft.parent_death import die_with_parent
from tft.pulse import Pulse


def run_command() -> click.Command:
    """
    Return the command `tft run`, with the options that plugins add.
    """
    from tft.plugins import call_guarded, load_plugins

    configure_logs()
    plugins = load_plugins()

    return click.Command(
        "run",
        callback=partial(_run_job, plugins),
        params=[
            *job_options(given=False),
            click.Option(
                ["--node-rank"],
                type=click.INT,
                default=0,
                show_default=True,
                help="The number of this node, from 0. Node 0 runs the broker and the controller.",
            ),
            _host_option("The address at which other nodes can reach this node."),
            _insecure_option(),
            *_reporting("A file for a copy of the run directory's report.json (on node 0)."),
            _spare_option(),
            click.Option(
                ["--spare-if-taken"],
                is_flag=True,
                help=(
                    "If a launcher of this node is still running, join as an additional node "
                    "with room for its ranks."
                ),
            ),
            click.Option(
                ["--led-elsewhere"],
                is_flag=True,
                help="The broker and the controller are run by a `tft lead`, not by node 0.",
            ),
            click.Option(
                ["--resume-if-any"],
                is_flag=True,
                help="As --resume if there is a checkpoint; otherwise begin anew.",
            ),
            *chain.from_iterable(call_guarded(plugins, "tft_options")),
            *_script(),
        ],
        context_settings={"allow_interspersed_args": False, "max_content_width": 100},
        help="Run SCRIPT as a training job on this node and supervise it until it ends.\n\n"
        "Options after SCRIPT are the script's own.",
    )


# Any: the options have different types
def _run_job(plugins: pluggy.PluginManager, **options: Any) -> int:
    """
    Run a job as `tft run` does, and then export its last checkpoint if the user wants that. Return
    the exit code of the job.
    """
    die_with_parent()
    from tft.launcher.export import export_last
    from tft.launcher.plan import Plan, check_plan, make_plan
    from tft.launcher.run import launch
    from tft.plugins import call_guarded

    def run(plan: Plan, options: Mapping[str, Any]) -> int:
        added = call_guarded(plugins, "tft_environment", may_refuse=True, options=options)
        check_plan(plan)
        return launch(plan, _joined(added))

    plan = make_plan(options)
    code = run(plan, options)
    export_last(plan, code, options, lambda other: run(make_plan(other), other))
    return code


def _joined(answers: Sequence[object]) -> dict[str, str]:
    """
    Return the environment variables of all answers to `tft_environment`. Raises `UsageError` for an
    answer that is no mapping of texts, because no process could be started with it.
    """
    added: dict[str, str] = {}
    for answer in answers:
        texts = isinstance(answer, Mapping) and all(
            isinstance(each, str) for pair in answer.items() for each in pair
        )
        if not texts:
            raise UsageError(
                "the hook tft_environment of a plugin must return a dict of texts, but it has "
                f"returned {answer!r}: correct the plugin"
            )
        added.update(cast("Mapping[str, str]", answer))
    return added


def lead_command() -> click.Command:
    """
    Return the command `tft lead`.
    """

    def lead(start: str, **options: Any) -> int:  # Any: the options have different types
        configure_logs()
        from tft.launcher.plan import LEADER, check_plan, make_plan
        from tft.launcher.run import launch
        from tft.worker.launcher_bootstrap import default_run_dir

        fixed = {
            "node_rank": LEADER, "led_elsewhere": True, "resume_if_any": True,
            "placed": None, "starter": None, "spare": 0, "spare_if_taken": False, "script": "", "arguments": (), "module": False,
        }  # fmt: skip
        if start and options["run_dir"] is None:
            options["run_dir"] = Path(default_run_dir(start))
        plan = make_plan({**options, **fixed})
        check_plan(plan)
        return launch(plan, {})

    return click.Command(
        "lead",
        callback=lead,
        params=[
            *job_options(given=False),
            _host_option("The address at which other nodes can reach this node."),
            _insecure_option(),
            *_reporting("A file for a copy of the run directory's report.json."),
            click.Option(
                ["--start"],
                metavar="NAME",
                default="",
                help="Another launcher's name for this job; the run directory is named after it.",
            ),
        ],
        help=(
            "Run the broker and the controller of a job, but no ranks. The nodes of the job are "
            "started with `tft run --led-elsewhere`."
        ),
    )


def broker_command() -> click.Command:
    """
    Return the command `tft broker`.
    """

    def broker(host: str, port: int, insecure: bool, curve: Path | None, pulse: int | None) -> int:
        die_with_parent()
        configure_logs()
        from tft.bus.broker import main

        def opened(first: int) -> None:
            click.echo(f"broker at {host}:{first}", err=True)
            # Start this thread only now, when SIGTERM and SIGINT are blocked. The thread inherits
            # the blocking, so these signals reach only the thread that waits for them.
            if pulse is not None:
                Pulse(pulse).beat_in_thread()

        main(host, port, insecure=insecure, curve=curve, opened=opened)
        return 0

    return click.Command(
        "broker",
        callback=broker,
        params=[
            _host_option("The address to listen at."),
            click.Option(
                ["--port"],
                type=click.INT,
                default=0,
                help="Listen at PORT for publishers and PORT + 1 for subscribers; 0: a free pair.",
            ),
            _insecure_option(),
            click.Option(
                ["--curve"],
                type=click.Path(path_type=Path),
                help=(
                    "The directory with the keys of a job: only processes with these keys can "
                    "connect."
                ),
            ),
            _pulse_option(),
        ],
        help="Forward the messages of jobs, until it is told to stop. Holds no state.",
    )


def controller_command() -> click.Command:
    """
    Return the command `tft controller`.
    """

    # Any: the options have different types
    def controller(pulse: int | None, **options: Any) -> int:
        die_with_parent()
        # Let Ctrl-C kill the controller like any other accident. If the controller handled the
        # signal, its exit code would look like the regular end of a job.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        configure_logs()
        from tft.controller.service import main
        from tft.launcher.plan import check_settings
        from tft.launcher.run_directory import check_no_launcher, make_run_dir, write_job

        settings = job_settings(options)
        check_settings(settings)
        # `tft run` gives the run a name and writes the file job.json. If the run has no name, this
        # controller was started by hand, and must write the file itself.
        by_hand = not settings.run
        if by_hand:
            check_no_launcher(settings.run_dir)
        make_run_dir(settings.run_dir)
        if by_hand:
            write_job(settings, ())  # `tft pause` and similar commands find the job by this file
        return main(settings, None if pulse is None else Pulse(pulse))

    return click.Command(
        "controller",
        callback=controller,
        params=[*job_options(given=True), _pulse_option()],
        help="Lead one job. Started again, it goes on from the story in the run directory.",
    )


def agent_command() -> click.Command:
    """
    Return the command `tft agent`.
    """

    def agent(
        placed: tuple[int, int, int] | None,
        starter: tuple[int, str] | None,
        pulse: int | None,
        **options: Any,  # Any: the options have different types
    ) -> int:
        die_with_parent()
        configure_logs()
        from tft.agent.service import main
        from tft.agent.settings import AgentSettings, Placed, StartedElsewhere
        from tft.launcher.plan import check_settings

        names = ("node", "script", "arguments", "host", "module", "spare")
        own = {name: options.pop(name) for name in names}
        settings = job_settings(options)
        check_settings(settings)
        return main(
            AgentSettings(
                job=settings,
                environment=inherited_environment(),
                placed=Placed.read(placed) if placed else None,
                starter=StartedElsewhere.read(starter) if starter else None,
                pulse=pulse,
                **own,
            )
        )

    return click.Command(
        "agent",
        callback=agent,
        params=[
            *job_options(given=True),
            click.Option(
                ["--node"], type=click.INT, required=True, help="The number of the node, from 0."
            ),
            _host_option("The address at which other nodes can reach this node."),
            _spare_option(),
            _pulse_option(),
            *_script(),
        ],
        context_settings={"allow_interspersed_args": False},
        help="Start this node's ranks of SCRIPT as the controller orders, and report on them.",
    )


def keys_command() -> click.Command:
    """
    Return the command `tft keys`.
    """

    def keys(directory: Path) -> int:
        from tft.keys import make_keys

        make_keys(directory)
        click.echo(
            f"tft: {directory} has the keys of a job: give it to `tft run --curve` on all nodes",
            err=True,
        )
        return 0

    return click.Command(
        "keys",
        callback=keys,
        params=[click.Argument(["directory"], type=click.Path(path_type=Path))],
        help="Make the keys of a job in DIRECTORY, for `tft run --curve`.",
    )


def pause_command() -> click.Command:
    """
    Return the command `tft pause`.
    """

    def pause(run_dir: Path, check: str, why: str) -> int:
        from tft.cli.ask import pause as ask

        return ask(run_dir, check, why)

    # import this module only here, because `tft run` needs no module of other commands
    from tft.cli.parts import run_dir_option

    return click.Command(
        "pause",
        callback=pause,
        params=[
            run_dir_option(),
            click.Option(
                ["--check"],
                metavar="NAME",
                default="",
                help="Have every rank run this check of a plugin, and go on if all of them pass.",
            ),
            _why_option("tft pause"),
        ],
        help="Pause a job between two steps, until `tft resume`.",
    )


def resume_command() -> click.Command:
    """
    Return the command `tft resume`.
    """

    def resume(run_dir: Path, why: str) -> int:
        from tft.cli.ask import resume as ask

        return ask(run_dir, why)

    from tft.cli.parts import run_dir_option

    return click.Command(
        "resume",
        callback=resume,
        params=[run_dir_option(), _why_option("tft resume")],
        help="Continue a paused job.",
    )


def dump_command() -> click.Command:
    """
    Return the command `tft dump`.
    """

    def dump(run_dir: Path, why: str) -> int:
        from tft.cli.ask import dump as ask

        return ask(run_dir, why)

    from tft.cli.parts import run_dir_option

    return click.Command(
        "dump",
        callback=dump,
        params=[run_dir_option(), _why_option("tft dump")],
        help="End a job after a last checkpoint.",
    )


def _why_option(command: str) -> click.Option:
    return click.Option(
        ["--why"],
        default=f"somebody called `{command}`",
        show_default=True,
        help="A sentence for the job's records.",
    )


def _host_option(sentence: str) -> click.Option:
    return click.Option(
        ["--host"], metavar="ADDRESS", default=LOOPBACK, show_default=True, help=sentence
    )


def _spare_option() -> click.Option:
    return click.Option(
        ["--spare"],
        metavar="RANKS",
        type=click.INT,
        default=0,
        show_default=True,
        help=(
            "The number of ranks of other nodes for which this node has room, if their node is "
            "lost or given up. With a --node-rank of --nnodes or more this node has no ranks of "
            "its own."
        ),
    )


def _reporting(copy: str) -> list[click.Parameter]:
    """
    Return the options `--report` and `--progress`. `copy` is the help text of `--report`.
    """
    return [
        click.Option(["--report"], type=click.Path(path_type=Path, dir_okay=False), help=copy),
        click.Option(
            ["--progress"],
            metavar="SECONDS",
            type=click.INT,
            help="Print a line about the job every SECONDS; 0: never. Not given: a live line in a "
            "terminal, and elsewhere lines that become rarer.",
        ),
    ]


def _insecure_option() -> click.Option:
    return click.Option(
        ["--insecure"],
        is_flag=True,
        help="Allow addresses that other machines can reach without --curve; nothing is encrypted.",
    )


def _pulse_option() -> click.Option:
    return click.Option(
        ["--pulse"],
        type=click.INT,
        metavar="DESCRIPTOR",
        help="Write a byte to this pipe each second, as a sign of life for the launcher.",
    )


def _script() -> list[click.Parameter]:
    """
    Return the command-line parameters for the script and its arguments, and the options for a job
    whose ranks another launcher starts or has placed on nodes.
    """
    return [
        click.Option(
            ["--module", "-m"],
            is_flag=True,
            help="SCRIPT is the name of a module, and is run as `python -m` runs it.",
        ),
        click.Option(
            ["--placed"],
            type=click.INT,
            nargs=3,
            metavar="LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK",
            help="The rank that another launcher has placed on this node as its only one.",
        ),
        click.Option(
            ["--starter"],
            type=(int, str),
            default=None,
            metavar="DESCRIPTOR MARK",
            help="The program that starts the ranks of this node, at the other end of a socket.",
        ),
        click.Argument(["script"]),
        click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]..."),
    ]
