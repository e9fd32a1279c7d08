"""
`tft replicas`: computes from the sizes of the parallelism alone which ranks will hold copies of
each shard, which losses of ranks or nodes the job survives, and how much memory the copies cost.
"""

import json
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from tft.cli.placement import SIZES, Question, as_json, in_words
from tft.errors import UsageError
from tft.placement.layout import DIMENSIONS, Layout, Scheme


class _Amount(click.ParamType[float]):
    """
    The type of an option whose value is a number of parameters, such as `13e9`, `13B` or `350M`.
    """

    name = "n"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        text = str(value)
        times = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper(), 1)
        try:
            number = float(text if times == 1 else text[:-1]) * times
        except ValueError:
            number = -1.0
        if not 0 <= number < float("inf"):
            self.fail(
                f"{text!r} is not a number of parameters, such as 13e9, 13B or 350M", param, ctx
            )
        return number


def replicas_command() -> click.Command:
    """
    Return the command `tft replicas`.
    """

    def command(**options: Any) -> int:  # Any: the options have different types
        asked = _question(options, click.get_current_context())
        if options["as_json"]:
            click.echo(json.dumps(as_json(asked)))
        else:
            click.echo("\n".join(in_words(asked, everything=options["everything"])))
        return 0

    return click.Command(
        "replicas",
        callback=command,
        params=_options(),
        help=(
            "Compute, without running anything, which ranks hold copies of which state, which "
            "losses can be repaired, and what the copies cost.\n\nExits with 0 if everything has "
            "a replica; with 2 and a sentence if something has none or the sizes are impossible."
        ),
    )


def _options() -> list[click.Parameter]:
    sizes = {
        "--dp": "Data-parallel ranks.",
        "--tp": "Tensor-parallel ranks.",
        "--pp": "Pipeline stages.",
        "--cp": "Context-parallel ranks.",
        "--ep": "Expert-parallel ranks, among those of dp * cp.",
        "--optimizer-shards": "Shards of the optimizer state of dp * cp ranks; 1: it is not cut.",
    }
    return [
        *(_number(name, sentence, default=1) for name, sentence in sizes.items()),
        click.Option(
            ["--order"],
            metavar="NAMES",
            default="-".join(DIMENSIONS),
            show_default=True,
            help="How ranks are counted: neighbouring ranks differ in the first dimension.",
        ),
        click.Option(
            ["--yaml"],
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Take all of these from a MindSpore Transformers YAML file.",
        ),
        _number("--ranks-per-node", "Print which nodes can be lost if each has N ranks."),
        _number("--nodes", "Print which nodes can be lost if the job has N nodes."),
        click.Option(
            ["--parameters"],
            type=_Amount(),
            default=0,
            help="Print the bytes that a rank needs for a model of N parameters (13e9, 13B).",
        ),
        click.Option(
            ["--expert-parameters"],
            type=_Amount(),
            default=0,
            help="How many of the --parameters belong to experts.",
        ),
        click.Option(["--json", "as_json"], is_flag=True, help="Print everything, as JSON."),
        click.Option(
            ["--all", "everything"],
            is_flag=True,
            help="Print all groups, pairs and lines, not only the first ones.",
        ),
    ]


def _number(name: str, sentence: str, default: int | None = None) -> click.Option:
    return click.Option(
        [name],
        type=click.INT,
        metavar="N",
        default=default,
        show_default=default is not None,
        help=sentence,
    )


# Any: the options have different types
def _question(options: dict[str, Any], context: click.Context) -> Question:
    layout = _layout(options, context)
    parameters, of_experts = options["parameters"], options["expert_parameters"]
    if of_experts > parameters:
        raise UsageError(
            "--expert-parameters must be at most --parameters, because it counts those of the "
            "--parameters that belong to experts"
        )
    if parameters and layout.ep > 1 and not of_experts:
        raise UsageError("--parameters also needs --expert-parameters if ep is more than 1")
    return Question(
        layout=layout,
        ranks_per_node=_ranks_per_node(options, layout.world),
        parameters=parameters,
        of_experts=of_experts,
    )


# Any: the options have different types
def _layout(options: dict[str, Any], context: click.Context) -> Layout:
    if options["yaml"] is not None:
        for name in (*SIZES, "optimizer_shards", "order"):
            if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
                option = "--" + name.replace("_", "-")
                raise UsageError(
                    f"{option} cannot be used together with --yaml, because the file has this "
                    "value already: give one of the two"
                )
        return read_layout(options["yaml"])
    return Layout(
        **{name: options[name] for name in SIZES},
        shards=options["optimizer_shards"],
        order=tuple(options["order"].split("-")),
    )


def read_layout(file: Path) -> Layout:
    """
    Return the sizes of the parallelism of the job that a framework's YAML file describes.

    Raises `UsageError` if the file or its sizes cannot be used, or if no installed package can read
    such a file.
    """
    # import this module only here: its import is slow, and only the option `--yaml` needs it
    from tft.plugins import read_job_file

    sizes = read_job_file("yaml", file)
    scheme = Scheme(
        name=sizes.framework,
        cuts_parameters=sizes.cuts_parameters,
        experts_as_dense=sizes.experts_as_dense,
    )
    try:
        return Layout(
            dp=sizes.dp, tp=sizes.tp, pp=sizes.pp, cp=sizes.cp, ep=sizes.ep,
            shards=sizes.shards, threshold_kb=sizes.threshold_kb, scheme=scheme,
        )  # fmt: skip
    except UsageError as refused:
        raise UsageError(f"{file}: {refused}") from None


# Any: the options have different types
def _ranks_per_node(options: dict[str, Any], world: int) -> int | None:
    ranks: int | None = options["ranks_per_node"]
    nodes: int | None = options["nodes"]
    if nodes is None:
        return ranks
    if ranks is not None:
        raise UsageError("--ranks-per-node and --nodes exclude each other: give one of the two")
    if nodes < 1 or world % nodes:
        raise UsageError(f"{world} ranks cannot be spread evenly over --nodes {nodes}")
    return world // nodes
