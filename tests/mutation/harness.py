"""
Tries mutants. Each runs in a process forked from one in which pytest is ready to collect and all
modules without mutants are imported. A mutated module exists in memory only.

The harness is a pytest plugin. In the parent the collection never begins; each child continues from
there with other arguments.
"""

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, ModuleType

import pytest

from tests.mutation.operators import Mutant, mutated

ARGUMENTS = (
    "-o", "addopts=", "--import-mode=importlib", "--assert=plain", "-m", "not soak",
    "-p", "no:terminal", "-p", "no:cacheprovider", "-p", "no:hypothesispytest",
)  # fmt: skip
"""Nothing is printed but what `__main__` prints; asserts are only to fail, not to explain."""
PRELOADED = (
    "asyncio", "hypothesis.internal.conjecture.engine", "hypothesis.strategies", "msgspec",
    "tft.errors", "tft.protocol.messages", "xxhash",
)  # fmt: skip
"""Imported once for all mutants. None of them may import what is mutated."""
SLOWER = 10.0
"""So many times its CPU time may a test take with a mutant before it counts as running for ever;
plus `patience`, for what is too short to be measured."""
EXAMPLES = 40
"""For a property that does not say itself how many it needs: what survives so many seldom dies
later, and every survivor runs them all."""
STARTING = 10.0
"""Seconds of CPU time for imports and collection."""
TOLD_EVERY = 200
MEMORY = 4 << 30
"""Bytes; a mutant that collects for ever is ended before the machine is full."""


_Tracer = Callable[[FrameType, str, object], "_Tracer | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """
    The results of a test in the undisturbed run: its CPU time, and the lines that it runs.
    """

    id: str
    seconds: float
    runs: dict[str, frozenset[int]]
    """Module to the lines of it that are run in the test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """
    The result for one mutant.
    """

    mutant: Mutant
    killer: str
    """The test that failed, `timeout`, or `import`; empty: it survived."""
    tests: int
    """How many tests could have killed it."""


class Harness:
    """
    The plugin. After `pytest.main` has returned, `verdicts` holds the result.
    """

    def __init__(
        self,
        files: dict[str, Path],
        tests: Sequence[str],
        mutants: Sequence[Mutant],
        patience: float,
    ) -> None:
        self.verdicts: list[Verdict] = []
        self.refused = ""
        self._files = files
        self._tests = list(tests)
        self._mutants = mutants
        self._patience = patience

    def run(self) -> None:
        """
        Judge all mutants.
        """
        with tempfile.TemporaryDirectory(prefix="mutation-") as compiled:
            # the children share compiled files here, even if the environment switches off bytecode
            sys.pycache_prefix, sys.dont_write_bytecode = compiled, False
            # only the children get the paths of the tests: their conftest may import the mutated
            # module
            nothing = next(iter(self._files.values())).parent
            pytest.main([*ARGUMENTS, str(nothing)], plugins=[self])

    def pytest_configure(self) -> None:
        for name in PRELOADED:
            importlib.import_module(name)
        _quick_hypothesis()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> object:
        loaded = [name for name in self._files if name in sys.modules]
        if loaded:
            self.refused = f"imported before they could be mutated: {loaded}"
            return True
        server = _Server(session, self._files, self._patience)
        child = server.baseline(self._tests) or self._serve(server)
        if child is None:
            session.items = []
            return True
        session.config.pluginmanager.register(child)
        return None  # None: pytest continues the collection in the child

    def _serve(self, server: "_Server") -> "_Child | None":
        if server.failed:
            self.refused = f"without any mutant, this fails: {server.failed}"
            return None
        for outcome in server.judge(self._mutants):
            if not isinstance(outcome, Verdict):
                return outcome
            self.verdicts.append(outcome)
            if not outcome.killer:
                print(_alive(outcome), file=sys.stderr, flush=True)
            if len(self.verdicts) % TOLD_EVERY == 0:
                alive = sum(not verdict.killer for verdict in self.verdicts)
                said = f"{len(self.verdicts)} of {len(self._mutants)}, {alive} alive"
                print(said, file=sys.stderr, flush=True)
        return None


class _Server:
    """
    Forks the children, and receives their results.
    """

    def __init__(self, session: pytest.Session, files: dict[str, Path], patience: float) -> None:
        self._files = files
        self._sources = {name: path.read_text() for name, path in files.items()}
        self._session = session
        self._patience = patience
        self._known: list[Test] = []
        self._imported: dict[str, frozenset[int]] = {}
        self._kills: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.failed = ""

    def baseline(self, tests: list[str]) -> "_Baseline | None":
        """
        Run all tests without a mutant, and record the lines that each of them runs.
        """
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._session.config.args = tests
            return _Baseline(theirs, self._files)
        os.close(theirs)
        with os.fdopen(ours, "rb") as told:
            text = told.read()
        os.waitpid(pid, 0)
        answer = json.loads(text or '{"failed": "the tests were not even collected"}')
        self.failed = answer.get("failed", "")
        self._imported = {
            module: frozenset(numbers) for module, numbers in answer.get("imported", {}).items()
        }
        for id_, seconds, runs in answer.get("tests", ()):
            lines = {module: frozenset(numbers) for module, numbers in runs.items()}
            self._known.append(Test(id=id_, seconds=seconds, runs=lines))
        return None

    def judge(self, mutants: Sequence[Mutant]) -> "Iterator[Verdict | _Child]":
        """
        Yield the verdicts in the order in which they are reached. In a forked child, return the
        child.
        """
        running: dict[int, tuple[Mutant, int, int]] = {}
        waiting = list(reversed(mutants))
        while waiting or running:
            while waiting and len(running) < (os.cpu_count() or 1):
                mutant = waiting.pop()
                tests = self._suited(mutant)
                if not tests:
                    yield Verdict(mutant=mutant, killer="", tests=0)
                    continue
                ours, theirs = os.pipe()
                pid = os.fork()
                if pid == 0:
                    self._session.config.args = list(dict.fromkeys(_file(t) for t in tests))
                    yield _Child(theirs, self._finder(mutant), tests, self._patience)
                os.close(theirs)
                running[pid] = (mutant, ours, len(tests))
            if running:
                pid, status = os.wait()
                mutant, ours, tried = running.pop(pid)
                killer = _killer(ours, status)
                self._kills[_scope(mutant)][killer] += 1
                yield Verdict(mutant=mutant, killer=killer, tests=tried)

    def _suited(self, mutant: Mutant) -> list[Test]:
        """
        Return the tests that run the mutated lines: first those that have killed neighbouring
        mutants, then the fastest ones. Every test runs the code that runs at import.
        """
        imported = self._imported.get(mutant.module, frozenset())
        always = mutant.always or mutant.lines & imported
        fit = [
            test
            for test in self._known
            if always or mutant.lines & test.runs.get(mutant.module, frozenset())
        ]
        kills = self._kills[_scope(mutant)]
        return sorted(fit, key=lambda test: (-kills[test.id], test.seconds))

    def _finder(self, mutant: Mutant) -> "_Finder":
        tree = mutated(self._sources[mutant.module], mutant)
        return _Finder(mutant.module, self._files[mutant.module], tree)


def _alive(verdict: Verdict) -> str:
    mutant = verdict.mutant
    return f"line {mutant.line} survived {verdict.tests} tests: {mutant.name}"


def _file(test: Test) -> str:
    return test.id.partition("::")[0]


def _scope(mutant: Mutant) -> str:
    return mutant.name.partition(":")[0]


def _killer(told: int, status: int) -> str:
    with os.fdopen(told, "rb") as pipe:
        said = pipe.read().decode()
    if os.WIFSIGNALED(status):
        late = os.WTERMSIG(status) == signal.SIGPROF
        return "timeout" if late else f"signal {os.WTERMSIG(status)}"
    return said if os.WEXITSTATUS(status) else ""


def _quick_hypothesis() -> None:
    """
    Make hypothesis use the same examples each time, without shrinking: only the failure counts.
    """
    from hypothesis import Phase, settings

    settings.register_profile(
        "mutation",
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        report_multiple_bugs=False,
        print_blob=False,
    )
    settings.load_profile("mutation")


# ------------------------------------------------------------ pytest plugins of the child processes


class _Child:
    """
    Runs tests against one mutant until one fails.
    """

    def __init__(
        self, told: int, finder: "_Finder", tests: Sequence[Test], patience: float
    ) -> None:
        self._told = told
        self._order = {test.id: place for place, test in enumerate(tests)}
        self._limits = {test.id: patience + SLOWER * test.seconds for test in tests}
        _hush()
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        _limit(STARTING)
        sys.meta_path.insert(0, finder)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self._order]
        items.sort(key=lambda item: self._order[item.nodeid])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._leave("import")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        _limit(self._limits[nodeid])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """
        Record a failure before pytest makes its report, because the report takes longer than most
        tests.
        """
        if call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception):
            self._leave(item.nodeid)

    def pytest_internalerror(self) -> None:
        self._leave("error")

    def pytest_sessionfinish(self) -> None:
        self._leave("")

    def _leave(self, killer: str) -> None:
        os.write(self._told, killer.encode())
        os._exit(1 if killer else 0)  # skip all cleanup


class _Baseline:
    """
    Runs all tests, and records for each its CPU time and the lines that it runs.
    """

    def __init__(self, told: int, files: dict[str, Path]) -> None:
        self._told = told
        self._modules = {str(path): name for name, path in files.items()}
        self._lines: defaultdict[str, set[int]] = defaultdict(set)
        self._imported: dict[str, list[int]] = {}
        self._tests: list[tuple[str, float, dict[str, list[int]]]] = []
        _hush()
        sys.settrace(self._enter)

    def pytest_collection_finish(self) -> None:
        sys.settrace(None)
        self._imported = {module: sorted(lines) for module, lines in self._lines.items()}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._lines.clear()
        began = time.process_time()
        sys.settrace(self._enter)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            seconds = time.process_time() - began
            runs = {module: sorted(lines) for module, lines in self._lines.items()}
            self._tests.append((item.nodeid, seconds, runs))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._leave({"failed": f"{report.nodeid}: {report.longreprtext}"})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._leave({"failed": f"{report.nodeid}: {report.longreprtext}"})

    def pytest_sessionfinish(self) -> None:
        self._leave({"tests": self._tests, "imported": self._imported})

    def _leave(self, answer: dict[str, object]) -> None:
        with os.fdopen(self._told, "wb") as pipe:
            pipe.write(json.dumps(answer).encode())
        os._exit(0)

    def _enter(self, frame: FrameType, event: str, argument: object) -> _Tracer | None:
        module = self._modules.get(frame.f_code.co_filename)
        if module is None:
            return None
        lines = self._lines[module]
        lines.add(frame.f_lineno)

        def step(frame: FrameType, event: str, argument: object) -> _Tracer:
            if event == "line":
                lines.add(frame.f_lineno)
            return step

        return step


class _Finder(importlib.abc.MetaPathFinder):
    """
    Finds the mutated module, and no other.
    """

    def __init__(self, module: str, file: Path, tree: ast.Module) -> None:
        self._module = module
        self._file = file
        self._tree = tree

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._module:
            return None
        loader = _Loader(fullname, str(self._file), self._tree)
        return importlib.util.spec_from_file_location(fullname, self._file, loader=loader)


class _Loader(importlib.machinery.SourceFileLoader):
    """
    Loads a module from a mutated syntax tree instead of its file.
    """

    def __init__(self, name: str, path: str, tree: ast.Module) -> None:
        super().__init__(name, path)
        self._tree = tree

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._tree, self.path, "exec")


def _limit(seconds: float) -> None:
    """
    Limit the CPU time of this process, so that other load on the machine kills no mutant.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _hush() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        with suppress(OSError):
            os.dup2(nowhere, descriptor)
