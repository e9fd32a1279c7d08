"""
The shape of the code: the size of functions and classes in `tft`, and imports without circles.
"""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Literal

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = {
    ROOT: ("tft",),
    ROOT / "adaptors": ("tft_pytorch", "tft_megatron", "tft_mindspore"),
    ROOT / "adaptors/mindio_ttp/src": ("mindio_ttp", "taskd"),
    ROOT / "plugins": (
        "tft_chaos",
        "tft_integrity",
        "tft_numerics",
        "tft_loggers",
        "tft_otel",
        "tft_prometheus",
        "tft_stragglers",
    ),
}
"""The packages in each directory."""

Rule = Literal["lines", "parameters", "fields"]
LIMITS: Mapping[Rule, int] = {"lines": 60, "parameters": 7, "fields": 15}
"""The most lines and parameters of a function, and the most fields of a class that can change."""
MANY_FIELDS = ("tft/config.py", "tft/protocol/")
"""The files in which classes may have any number of fields: settings, and messages on the wire."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


# ---------------------------------------------------------------- functions and classes of a file


@cache
def parsed(path: Path) -> ast.Module:
    """
    Return the tree of a file.
    """
    return ast.parse(path.read_text())


def defined(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """
    Yield the functions and classes of a tree, at any depth, each with its qualified name.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function | ast.ClassDef):
            yield prefix + node.name, node
            yield from defined(node, f"{prefix}{node.name}.")
        else:
            yield from defined(node, prefix)


def lines(function: Function) -> int:
    """
    Return the number of lines of a function, without its decorators.
    """
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def parameters(function: Function) -> int:
    """
    Return the number of named parameters of a function, without `self` and `cls`.
    """
    every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return len(every) - bool(every and every[0].arg in ("self", "cls"))


def fields(cls: ast.ClassDef) -> int:
    """
    Return the number of fields of a class that can change: attributes assigned to `self`, and names
    annotated in the class body. Return 0 for a class whose objects do not change, and for a
    protocol, which has no objects.
    """
    if unchangeable(cls) or any("Protocol" in ast.unparse(base) for base in cls.bases):
        return 0
    annotated = {
        node.target.id
        for node in cls.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and "ClassVar" not in ast.unparse(node.annotation)
    }
    return len(annotated | set(assigned(cls)))


def assigned(tree: ast.AST) -> Iterator[str]:
    """
    Yield the attributes that the methods of a class assign to `self`. Classes within the class are
    left out.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            continue
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            yield node.attr
        yield from assigned(node)


def unchangeable(cls: ast.ClassDef) -> bool:
    """
    Return whether a class is a frozen dataclass or a frozen `Struct`.
    """
    keywords = [keyword for node in cls.decorator_list for keyword in _keywords(node)]
    return any(
        keyword.arg == "frozen" and ast.unparse(keyword.value) == "True"
        for keyword in (*keywords, *cls.keywords)
    )


def _keywords(decorator: ast.expr) -> list[ast.keyword]:
    return decorator.keywords if isinstance(decorator, ast.Call) else []


def too_large(rule: Rule, tree: ast.AST, file: str) -> Iterator[tuple[str, int]]:
    """
    Yield each function or class of a file that is over the limit of a rule: its name, as `FILE
    NAME`, and its number of lines, parameters or fields.
    """
    for name, node in defined(tree):
        if isinstance(node, ast.ClassDef):
            free = rule != "fields" or file.startswith(MANY_FIELDS)
            number = 0 if free else fields(node)
        elif rule == "fields":
            number = 0
        else:
            number = lines(node) if rule == "lines" else parameters(node)
        if number > LIMITS[rule]:
            yield f"{file} {name}", number


# ---------------------------------------------------------------- imports


def modules() -> dict[str, Path]:
    """
    Return the files of all packages, by the names of their modules.
    """
    found = {}
    for directory, packages in SOURCES.items():
        for package in packages:
            for path in (directory / package).rglob("*.py"):
                name = ".".join(path.relative_to(directory).with_suffix("").parts)
                found[name.removesuffix(".__init__")] = path
    return found


def imports(module: str, tree: ast.AST, known: set[str]) -> set[str]:
    """
    Return the modules among `known` that a module imports by name, in functions and for type checks
    too. The packages above an imported module do not count.
    """
    named = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} has a relative import, which is not followed here"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                named.add(inner if inner in known else str(node.module))
    return (named & known) - {module}


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """
    Return the import circles of a graph: groups of two or more modules, each of which leads to all
    the others.
    """
    reached = {module: _reached(graph, module) for module in graph}
    groups = {
        tuple(sorted(other for other in there if module in reached[other]))
        for module, there in reached.items()
        if module in there
    }
    return [list(group) for group in sorted(groups)]


def _reached(graph: Mapping[str, set[str]], module: str) -> set[str]:
    seen: set[str] = set()
    waiting = list(graph[module])
    while waiting:
        there = waiting.pop()
        if there not in seen:
            seen.add(there)
            waiting += graph[there]
    return seen


# ---------------------------------------------------------------- the limits that the code keeps


@pytest.mark.parametrize("rule", LIMITS)
def test_functions_and_classes_stay_small(rule: Rule) -> None:
    """When a function or a class is over the limit, then the test fails and names the function or
    class."""
    found = {
        name: number
        for path in sorted((ROOT / "tft").rglob("*.py"))
        for name, number in too_large(rule, parsed(path), str(path.relative_to(ROOT)))
    }
    assert not found, f"more than {LIMITS[rule]} {rule}: {found}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    """When modules import each other in a circle, then the test fails and names the modules."""
    files = modules()
    graph = {name: imports(name, parsed(path), set(files)) for name, path in files.items()}
    found = circles(graph)
    assert not found, f"import circles: {found}"


# ---------------------------------------------------------------- tests of these rules

SAMPLE = """
import abc
from functools import wraps
class Many:
    kind: ClassVar[str] = "many"
    first: int
    def __init__(self, a, b, *rest, c, **more):
        self.first, self.second = a, b
        with c as self.third:
            self.third.inner = 1
        class Other:
            def __init__(self): self.fourth = 1
@dataclass(slots=True, frozen=True)
class Value:
    first: int
class Message(Struct, frozen=True):
    first: int
class Able(Protocol):
    first: int
"""


def test_fields_and_parameters_are_counted() -> None:
    """When a class has fields, then each mutable field counts once, and fields of an inner class do
    not count."""
    nodes = dict(defined(ast.parse(SAMPLE)))
    classes = {name: node for name, node in nodes.items() if isinstance(node, ast.ClassDef)}
    counted = {name: fields(node) for name, node in classes.items()}
    other = "Many.__init__.Other"
    assert counted == {"Many": 3, other: 1, "Value": 0, "Message": 0, "Able": 0}
    begin = nodes["Many.__init__"]
    assert isinstance(begin, ast.FunctionDef)
    assert (parameters(begin), lines(begin)) == (3, 6)


def test_imports_in_functions_and_for_types_are_found() -> None:
    """When a module imports another one only for types, or in a function, then that import counts
    too."""
    source = "import a\nif TYPE_CHECKING:\n  from b import c\ndef f():\n  from d import e, g\n"
    assert imports("m", ast.parse(source), {"a", "b.c", "d", "d.e", "m"}) == {
        "a",
        "b.c",
        "d.e",
        "d",
    }


def test_import_circle_is_found_with_all_its_modules() -> None:
    """When modules import each other in circles, then each circle is found, without other modules."""
    graph = {
        **{"a": {"b"}, "b": {"c"}, "c": {"a", "d"}},
        **{"d": {"e"}, "e": {"d"}, "f": {"a"}, "g": set[str]()},
    }
    assert circles(graph) == [["a", "b", "c"], ["d", "e"]]
