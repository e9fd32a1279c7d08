"""
Tests of the mutation tester: mutants are mistakes, all are tried, and survivors are reported.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.operators import mutants, mutated, optional_names

ROOT = Path(__file__).parents[2]


def names(source: str) -> set[str]:
    """
    Return the names of the mutants of a module called `m`.
    """
    return {m.name for m in mutants("m", source, optional_names(source))}


@pytest.mark.parametrize(
    ("source", "mistake"),
    [
        ("def f(a):\n return a <= 1", "return a <= 1 -> return a < 1"),
        ("def f(a):\n return a <= 1", "return a <= 1 -> return a <= 2"),
        ("def f(a):\n return a <= 1", "return a <= 1 -> return None"),
        ("def f(a, b):\n return a and b", "return a and b -> return a or b"),
        ("def f(a, b):\n return a and b", "return a and b -> return b"),
        ("def f(a):\n if a():\n  return 1", "a() -> not a()"),
        ("def f(a):\n if not a:\n  return 1", "not a -> a"),
        ("def f(a):\n a.b = True", "a.b = True -> a.b = False"),
        ("def f(a):\n a.b = 'c'", "a.b = 'c' -> (removed)"),
        ("def f(a):\n a.b = 'c'", "a.b = 'c' -> a.b = ''"),
        ("def f(a):\n a(f'{a}')", "a(f'{a}') -> a('')"),
        ("def f(a):\n a.b += 1", "a.b += 1 -> a.b -= 1"),
        ("def f(a):\n a()", "a() -> (removed)"),
        ("def f(a):\n raise a", "raise a -> (removed)"),
        ("def f(a):\n for b in a:\n  break", "break -> continue"),
        ("def f(a):\n return min(a)", "return min(a) -> return max(a)"),
        ("def f(a):\n return any(a)", "return any(a) -> return all(a)"),
        ("def f(a):\n return sorted(a, key=g)", "return sorted(a, key=g) -> return list(a)"),
        ("def f(a):\n return a - a()", "return a - a() -> return a"),
        ("def f(a):\n return a in (1, a)", "return a in (1, a) -> return a in (a,)"),
        (
            "def f(a):\n return [b for b in a if b]",
            "return [b for b in a if b] -> return [b for b in a]",
        ),
        ("def f(a=3):\n return", "3 -> 4"),
        ("def f(*, a=3):\n return\ndef g():\n f(a=4)", "f(a=4) -> f()"),
        ("def f(a):\n match a:\n  case 1 if a:\n   a()", "a -> (removed)"),
        ("def f(a):\n match a:\n  case 1 | 2:\n   a()", "1 | 2 -> 1"),
        ("def f(a):\n match a:\n  case 1:\n   a()\n  case _:\n   f()", "case 1 -> (removed)"),
        ("T = {1: a, 2: b}", "1: a -> (removed)"),
        ("T = {1: a, 2: b}", "1: a -> 1: b"),
        ("T = frozenset({a, b})", "T = frozenset({a, b}) -> T = frozenset({b})"),
        ("class C:\n a: int = 3", "a: int = 3 -> a: int = 4"),
    ],
)
def test_mutants_contain_every_kind_of_mistake(source: str, mistake: str) -> None:
    """When source code allows a certain kind of mistake, then one of its mutants has that mistake."""
    assert any(mistake in name for name in names(source)), names(source)


@pytest.mark.parametrize(
    "source",
    [
        '"""Text."""',
        "from a import b",
        "def f(a: int | None) -> Literal['a']:\n '''Text.'''",
        "T = A | B[int]\nU = Mapping[int, 'C']",
        "class C(StrEnum):\n A = 'a'",
        "@dataclass(frozen=True)\nclass C:\n a: int",
        "def f(a):\n match a:\n  case b:\n   assert_never(b)",
        "def f(a):\n b = a\n return None",
    ],
)
def test_code_without_effect_at_run_time_is_not_mutated(source: str) -> None:
    """When a change would affect only types or unreachable code, then no mutant is made."""
    assert names(source) == set()


def test_a_mutant_keeps_its_name_when_the_code_around_it_moves() -> None:
    """When lines are inserted before a mutant, then its name is the same, so that its explanation
    still applies."""
    source = "def f(a):\n a.b = 1\n a.b = 1"
    assert names(f"def g():\n pass\n\n\n{source}") == names(source)
    assert "m.f: a.b = 1 -> (removed) #2" in names(source)


def test_every_mutant_of_the_judgement_is_valid_python() -> None:
    """When each mutant of a real module is compiled, then none has a syntax error."""
    source = (ROOT / "tft/core/job/rank_state.py").read_text()
    every = mutants("rank_state", source, optional_names(source))
    assert len(every) > 20
    for mutant in every:
        compile(mutated(source, mutant), "rank_state.py", "exec")


JUDGEMENT = """
LIMIT = 3

def allowed(n):
    return n < LIMIT
"""
TESTS = """
import judgement

def test_limit():
    assert judgement.allowed(2) and not judgement.allowed(4)
"""
ENDLESS = """
def drained(n):
    while n > 0:
        n -= 1
"""
CALLED = """
def test_drained():
    judgement.drained(2)
"""
AT_IMPORT = """
def row(n):
    return [n]

ROWS = row(LIMIT)
"""
READ = """
def test_rows():
    assert judgement.ROWS == [3]
"""
SETTINGS = """
files = ["judgement.py"]
tests = ["test_judgement.py"]
least = 0.5
patience = 0.3
"""
SURVIVORS = """
[[survivors]]
why = "nobody is ever asked about exactly three"
mutants = [
  "judgement.LIMIT: LIMIT = 3 -> LIMIT = 4",
  "judgement.allowed: return n < LIMIT -> return n <= LIMIT",
]
"""


def mutate(
    where: Path, settings: str, *, source: str = JUDGEMENT, tests: str = TESTS
) -> subprocess.CompletedProcess[str]:
    """
    Run the command in a directory of its own.
    """
    (where / "judgement.py").write_text(source)
    (where / "test_judgement.py").write_text(tests)
    (where / "settings.toml").write_text(settings)
    return subprocess.run(
        [sys.executable, "-m", "tests.mutation", "--settings", "settings.toml"],
        cwd=where,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_survivor_without_an_explanation_fails_the_command(tmp_path: Path) -> None:
    """When no test detects a mutant and no explanation exists, then the command fails and names the
    mutant with its line."""
    done = mutate(tmp_path, SETTINGS)
    assert done.returncode == 1, done.stderr
    *_, first, second = done.stdout.splitlines()
    assert first == "judgement.py:2: survived 1 tests: judgement.LIMIT: LIMIT = 3 -> LIMIT = 4"
    assert second == (
        "judgement.py:5: survived 1 tests: judgement.allowed: return n < LIMIT -> return n <= LIMIT"
    )


def test_explained_survivors_are_accepted_as_long_as_they_survive(tmp_path: Path) -> None:
    """When each surviving mutant has an explanation, then the command succeeds. An explanation
    without a surviving mutant is an error."""
    (tmp_path / "survivors").mkdir()
    (tmp_path / "survivors" / "judgement.toml").write_text(SURVIVORS)
    done = mutate(tmp_path, SETTINGS)
    assert done.returncode == 0, done.stdout
    gone = SURVIVORS.replace("LIMIT = 4", "LIMIT = 2")
    (tmp_path / "survivors" / "other.toml").write_text(gone)
    done = mutate(tmp_path, SETTINGS)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("explained, but not among the survivors: ")


def test_a_mutant_with_an_endless_loop_counts_as_killed(tmp_path: Path) -> None:
    """When a mistake makes a loop endless, then the time limit detects the mutant."""
    done = mutate(tmp_path, SETTINGS, source=JUDGEMENT + ENDLESS, tests=TESTS + CALLED)
    *_, every = (line.split() for line in done.stdout.splitlines() if line.startswith("all "))
    assert int(every[3]) > 0


def test_mutants_of_code_that_runs_at_import_are_tried_with_all_tests(tmp_path: Path) -> None:
    """When a function is called at the import of its module, and never by a test, then its mutants
    are tried with all tests."""
    done = mutate(tmp_path, SETTINGS, source=JUDGEMENT + AT_IMPORT, tests=TESTS + READ)
    assert "judgement.row" not in done.stdout
    assert "judgement.allowed" in done.stdout


def test_no_mutant_is_tried_when_a_test_fails_without_mutants(tmp_path: Path) -> None:
    """When a test fails without any mutant, then the command names the test and tries no mutant."""
    done = mutate(tmp_path, SETTINGS, tests=TESTS.replace("(2)", "(3)"))
    assert done.returncode == 2
    assert "test_judgement.py::test_limit" in done.stdout
