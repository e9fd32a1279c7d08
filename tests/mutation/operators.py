"""
Makes mutants: copies of a source file with one small mistake each. Decides which mistakes are made,
and where.

No mistakes are made in annotations, decorators, docstrings, names of enumeration members, and in
conditions that only a type checker needs, because such mistakes say nothing about the tests.
"""

import ast
import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as of
from itertools import pairwise

Step = tuple[str, int | None]
"""From a node to one of its children: the field, and the place in it where it is a list."""

SHORTEST = 24
"""A mutant is named by the code it changes; by at least so much of it that a reader sees where."""
LONGEST = 110

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.BitXor: ast.BitOr,
}
ONE_SIDED = (ast.Sub, ast.BitOr, ast.BitAnd)
"""On sets as on numbers, what is left without the right side is a value of the same kind."""
CALLS = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "sorted": "list",
    "union": "intersection",
    "intersection": "union",
    "popleft": "pop",
}
UNREACHABLE = ("assert_never",)
TYPES = ("Literal", "Mapping", "Sequence", "Callable")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """
    One mistake in one file.
    """

    module: str
    name: str
    """What it changes into what, and where: stays the same when lines move."""
    line: int
    lines: frozenset[int]
    """A test that runs none of these cannot tell the mutant from the original."""
    always: bool
    """It is run when the module is imported, by all tests."""
    path: tuple[Step, ...]
    substitute: ast.AST | None
    """What stands there instead; None: nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """
    The present place of the search in the source.
    """

    scope: str = ""
    inside: bool = False
    """In a function: not run by the import."""
    statement: ast.AST | None = None
    assigned: Counter[str] = of(default_factory=Counter)
    """How often each local name is given a value in this function."""
    last: ast.stmt | None = None
    """The statement after which this function ends anyway."""
    enumeration: bool = False


def mutants(module: str, source: str, optional: frozenset[str]) -> list[Mutant]:
    """
    Return all mutants of a module. `optional` has the names of arguments with a default: leaving
    them out of a call is a mistake that Python does not report.
    """
    tree = ast.parse(source)
    short = module.rpartition(".")[2]
    seen: Counter[str] = Counter()
    found = []
    for chain, path, place, substitute in _search(tree, optional):
        node = chain[-1]
        before, after = _texts(chain, path, substitute)
        if before == after:
            continue
        name = f"{short}.{place.scope}: {before} -> {after}"
        seen[name] += 1
        lines = _lines(node) or _lines(place.statement)
        found.append(
            Mutant(
                module=module,
                name=name if seen[name] == 1 else f"{name} #{seen[name]}",
                line=min(lines),
                lines=lines,
                always=not place.inside,
                path=tuple(path),
                substitute=substitute,
            )
        )
    return found


def mutated(source: str, mutant: Mutant) -> ast.Module:
    """
    Return the source with the mistake in it.
    """
    tree = ast.parse(source)
    _put(tree, mutant.path, mutant.substitute)
    return ast.fix_missing_locations(tree)


def optional_names(source: str) -> frozenset[str]:
    """
    Return the names of arguments and fields that have a default in this source.
    """
    names = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ClassDef():
                fields = (f for f in node.body if isinstance(f, ast.AnnAssign) and f.value)
                names |= {f.target.id for f in fields if isinstance(f.target, ast.Name)}
            case ast.arguments():
                pairs = zip(node.kwonlyargs, node.kw_defaults, strict=True)
                names |= {argument.arg for argument, default in pairs if default is not None}
                names |= {a.arg for a in node.args[len(node.args) - len(node.defaults) :]}
            case _:
                pass
    return frozenset(names)


# ---------------------------------------------------------------- search for places to mutate

Site = tuple[list[ast.AST], list[Step], _Place, ast.AST | None]
"""The nodes from the module down to the one changed, the way there, and what to put there."""


def _search(tree: ast.Module, optional: frozenset[str]) -> Iterator[Site]:
    def walk(chain: list[ast.AST], path: list[Step], place: _Place) -> Iterator[Site]:
        node = chain[-1]
        place = _enter(node, place)
        known: set[str] = set()
        for substitute in _substitutes(chain, path, place, optional):
            text = "" if substitute is None else ast.dump(substitute)
            if text not in known:
                known.add(text)
                yield chain, path, place, substitute
        for field, position, child in _children(node):
            yield from walk([*chain, child], [*path, (field, position)], place)

    yield from walk([tree], [], _Place())


def _enter(node: ast.AST, place: _Place) -> _Place:
    if isinstance(node, ast.stmt):
        place = replace(place, statement=node)
    match node:
        case ast.ClassDef():
            bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
            scope = _joined(place.scope, node.name)
            return replace(place, scope=scope, enumeration=any("Enum" in b for b in bases))
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            stores = (n for n in ast.walk(node) if isinstance(n, ast.Name))
            assigned = Counter(n.id for n in stores if isinstance(n.ctx, ast.Store))
            scope = _joined(place.scope, node.name)
            return _Place(scope=scope, inside=True, assigned=assigned, last=node.body[-1])
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return place if place.inside else replace(place, scope=_joined(place.scope, name))
        case ast.Lambda():
            return replace(place, inside=True)
        case _:
            return place


def _joined(scope: str, name: str) -> str:
    return f"{scope}.{name}" if scope else name


def _children(node: ast.AST) -> Iterator[tuple[str, int | None, ast.AST]]:
    """
    Return the parts of a node in which a mistake would change behaviour.
    """
    match node:
        case ast.Expr(value=ast.Constant()) | ast.Import() | ast.ImportFrom():
            return
        case ast.Subscript(value=ast.Name(id=name)) if name in TYPES:
            return
        case ast.Call(func=ast.Name(id=name)) if name in UNREACHABLE:
            return
        case _:
            pass
    if isinstance(node, ast.Dict):  # keys stay: a wrong key is the same as a missing entry
        for position, value in enumerate(node.values):
            yield "values", position, value
        return
    skipped = {"annotation", "returns", "decorator_list", "bases", "type_comment", "format_spec"}
    for field, value in ast.iter_fields(node):
        if field in skipped:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = [p if isinstance(p, ast.FormattedValue) else None for p in value]
        else:
            parts = value if isinstance(value, list) else [value]
        for position, child in enumerate(parts):
            if isinstance(child, ast.AST):
                yield field, position if isinstance(value, list) else None, child


def _lines(node: ast.AST | None) -> frozenset[int]:
    """
    Return the lines of a node; for a node that contains statements, only the lines of its head.
    """
    places = [
        (part.lineno, part.end_lineno or part.lineno)
        for part in (
            [node] if hasattr(node, "lineno") else ast.iter_child_nodes(node or ast.Pass())
        )
        if isinstance(part, ast.expr | ast.stmt | ast.pattern | ast.keyword)
    ]
    if isinstance(node, ast.match_case):
        places = places[:1]
    return frozenset(line for first, last in places for line in range(first, last + 1))


# ---------------------------------------------------------------- mistakes by kind of node


def _substitutes(
    chain: Sequence[ast.AST], path: Sequence[Step], place: _Place, optional: frozenset[str]
) -> Iterator[ast.AST | None]:
    node = chain[-1]
    parent = chain[-2] if len(chain) > 1 else node
    match node:
        case ast.stmt():
            yield from _statements(node, place)
        case ast.expr():
            yield from _expressions(node, parent, place)
            if path[-1][0] in ("test", "guard") and not isinstance(
                node, ast.Compare | ast.BoolOp | ast.UnaryOp
            ):
                yield ast.UnaryOp(op=ast.Not(), operand=node)
            if path[-1][0] == "guard" or (path[-1][0] == "ifs"):
                yield None
        case ast.keyword() if node.arg in optional or node.arg in ("key", "reverse", "default"):
            yield None
        case ast.MatchOr():
            for index in range(len(node.patterns)):
                yield _without(node, "patterns", index)
        case ast.match_case() if isinstance(parent, ast.Match) and len(parent.cases) > 1:
            if not _idle(node.body):
                yield None
        case _:
            return


def _idle(body: list[ast.stmt]) -> bool:
    match body:
        case [ast.Pass()]:
            return True
        case [ast.Expr(value=ast.Call(func=ast.Name(id=name)))] if name in UNREACHABLE:
            return True
        case _:
            return False


def _statements(node: ast.stmt, place: _Place) -> Iterator[ast.AST]:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Name(id=name))) if name in UNREACHABLE:
            return
        case ast.Expr(value=ast.Constant()):
            return
        case ast.Expr() | ast.Raise() | ast.Delete():
            yield ast.Pass()
        case ast.Assign() | ast.AnnAssign() if _keeps_meaning_without(node, place):
            yield ast.Pass()
        case ast.AugAssign():
            yield ast.Pass()
            yield from (_with(node, op=op()) for op in _other(ARITHMETIC, node.op))
        case ast.Break():
            yield ast.Continue()
        case ast.Continue():
            yield ast.Break()
        case ast.Return(value=None | ast.Constant(value=None)) if node is not place.last:
            yield ast.Pass()
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield ast.Return(value=ast.Constant(value=None))
        case _:
            return


def _keeps_meaning_without(node: ast.Assign | ast.AnnAssign, place: _Place) -> bool:
    """
    Return False for the first assignment to a local name: without it, every run would end in a
    NameError.
    """
    if not place.inside or node.value is None:
        return False
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    for target in targets:
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        for name in names:
            if isinstance(name, ast.Name) and place.assigned[name.id] < 2:
                return False
    return True


def _expressions(node: ast.expr, parent: ast.AST, place: _Place) -> Iterator[ast.AST]:
    match node:
        case ast.Compare():
            for index, op in enumerate(node.ops):
                for other in COMPARISONS[type(op)]:
                    yield _with(node, ops=[*node.ops[:index], other(), *node.ops[index + 1 :]])
        case ast.BoolOp():
            yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
            for index in range(len(node.values)):
                yield _without(node, "values", index)
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node.operand
        case ast.BinOp() if place.inside or not _is_type(node):
            yield from (_with(node, op=op()) for op in _other(ARITHMETIC, node.op))
            if isinstance(node.op, ONE_SIDED):
                yield node.left
        # members of a set are not changed, because other mutants leave each of them out
        case ast.Constant() if not isinstance(parent, ast.MatchValue | ast.Set):
            yield from _constants(node.value, parent, place)
        case ast.JoinedStr():
            yield ast.Constant(value="")
        case ast.Call(func=ast.Name(id=name)) if name in CALLS:
            keywords = [] if name == "sorted" else node.keywords
            yield _with(node, func=ast.Name(id=CALLS[name], ctx=ast.Load()), keywords=keywords)
        case ast.Call(func=ast.Attribute(attr=name) as method) if name in CALLS:
            yield _with(node, func=_with(method, attr=CALLS[name]))
        case ast.Set():
            yield from (_without(node, "elts", index) for index in range(len(node.elts)))
        case ast.Tuple() | ast.List() if isinstance(parent, ast.Compare) or not place.inside:
            yield from (_without(node, "elts", index) for index in range(len(node.elts)))
        case ast.Dict():
            yield from _entries(node, place)
        case _:
            return


def _is_type(node: ast.expr) -> bool:
    match node:
        case ast.BinOp(op=ast.BitOr()):
            return _is_type(node.left) and _is_type(node.right)
        case ast.Name() | ast.Subscript() | ast.Constant(value=None):
            return True
        case _:
            return False


def _constants(value: object, parent: ast.AST, place: _Place) -> Iterator[ast.AST]:
    match value:
        case bool():
            yield ast.Constant(value=not value)
        case int():
            yield ast.Constant(value=value + 1)
            if value > 0:
                yield ast.Constant(value=value - 1)
        case float():
            yield ast.Constant(value=value * 2 + 1)
        case str() if not (place.enumeration and isinstance(parent, ast.Assign)):
            yield ast.Constant(value="" if value else "mutated")
        case _:
            return


def _entries(node: ast.Dict, place: _Place) -> Iterator[ast.AST]:
    """
    Yield mutants of a dict: an entry is missing, or in a table an entry has the value of the next
    one.
    """
    for index in range(len(node.keys)):
        keys = [*node.keys[:index], *node.keys[index + 1 :]]
        values = [*node.values[:index], *node.values[index + 1 :]]
        yield ast.Dict(keys=keys, values=values)
    if not place.inside:
        for index, (one, other) in enumerate(pairwise(node.values)):
            if ast.dump(one) != ast.dump(other):
                values = [*node.values[:index], other, *node.values[index + 1 :]]
                yield ast.Dict(keys=node.keys, values=values)


def _other(
    table: dict[type[ast.operator], type[ast.operator]], op: ast.operator
) -> list[type[ast.operator]]:
    return [table[type(op)]] if type(op) in table else []


def _with(node: ast.AST, **changes: object) -> ast.AST:
    """
    Return a shallow copy of a node with some fields changed.
    """
    fields = dict(ast.iter_fields(node))
    return ast.copy_location(type(node)(**(fields | changes)), node)


def _without(node: ast.AST, field: str, index: int) -> ast.AST:
    """
    Return a copy of a node that lacks one of several elements. If it had two, return the other
    element itself.
    """
    items = getattr(node, field)
    left = [*items[:index], *items[index + 1 :]]
    if isinstance(node, ast.BoolOp | ast.MatchOr) and len(left) == 1:
        only: ast.AST = left[0]
        return only
    if isinstance(node, ast.Set) and not left:
        return ast.Call(func=ast.Name(id="set", ctx=ast.Load()), args=[], keywords=[])
    return _with(node, **{field: left})


# ---------------------------------------------------------- changing the source and naming a mutant


def _put(tree: ast.AST, path: Sequence[Step], substitute: ast.AST | None) -> None:
    """
    Replace the node at the end of the path.
    """
    node = tree
    for field, position in path[:-1]:
        inner = getattr(node, field)
        node = inner if position is None else inner[position]
    field, position = path[-1]
    if position is None:
        setattr(node, field, substitute)
    elif substitute is None:
        del getattr(node, field)[position]
    else:
        getattr(node, field)[position] = substitute


def _texts(
    chain: Sequence[ast.AST], path: Sequence[Step], substitute: ast.AST | None
) -> tuple[str, str]:
    """
    Return the code before and after the mistake, with enough context for a reader to recognise it.
    """
    if isinstance(chain[-1], ast.stmt):
        gone = substitute is None or isinstance(substitute, ast.Pass)
        return _window(_flat(chain[-1]), "(removed)" if gone else _flat(substitute))
    if isinstance(chain[-1], ast.match_case):
        return f"case {ast.unparse(chain[-1].pattern)}", "(removed)"
    if isinstance(chain[-1], ast.Dict) and isinstance(substitute, ast.Dict):
        return _entry_texts(chain[-1], substitute)
    up = len(chain) - 1
    while up > 0 and len(ast.unparse(chain[up])) < SHORTEST and _belongs(chain[up - 1]):
        up -= 1
    if up == len(chain) - 1:
        return _window(_flat(chain[-1]), _flat(substitute))
    whole = chain[up]
    after = copy.deepcopy(whole)
    _put(after, path[up:], substitute)
    if isinstance(whole, ast.Dict) and isinstance(after, ast.Dict):
        return _entry_texts(whole, after)
    return _window(_flat(whole), _flat(after))


def _entry_texts(before: ast.Dict, after: ast.Dict) -> tuple[str, str]:
    old, new = (
        [f"{_flat(key)}: {_flat(value)}" for key, value in zip(d.keys, d.values, strict=True)]
        for d in (before, after)
    )
    place = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), len(new))
    return _window(old[place], new[place] if len(old) == len(new) else "(removed)")


def _belongs(node: ast.AST) -> bool:
    """
    Return True if a node gives context to its part and is not a whole block.
    """
    simple = (
        ast.expr
        | ast.keyword
        | ast.comprehension
        | ast.Expr
        | ast.Return
        | ast.Assign
        | ast.AnnAssign
    )
    return isinstance(node, simple | ast.AugAssign | ast.pattern)


def _flat(node: ast.AST | None) -> str:
    return "(removed)" if node is None else " ".join(ast.unparse(node).split())


def _window(before: str, after: str) -> tuple[str, str]:
    """
    Return the parts of two long texts in which they differ.
    """
    pairs = enumerate(zip(before, after, strict=False))
    differ = next((place for place, (a, b) in pairs if a != b), min(len(before), len(after)))
    first = max(0, differ - LONGEST // 3) if max(len(before), len(after)) > LONGEST else 0
    return _cut(before, first), _cut(after, first)


def _cut(text: str, first: int) -> str:
    part = text[first : first + LONGEST]
    return f"{'…' if first else ''}{part}{'…' if first + LONGEST < len(text) else ''}"
