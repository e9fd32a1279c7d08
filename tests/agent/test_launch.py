"""
The process of a rank before its script starts, and its end when its parent process ends.
"""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.agent.stage import ADAPTOR, ROOT, package
from tft.page import Page

Launch = Callable[..., "subprocess.CompletedProcess[str]"]

LINGERING = """
import os, threading
def linger():
    threading.main_thread().join()
    os._exit(0)
threading.Thread(target=linger).start()
"""

CHILD = "from tft.parent_death import die_with_parent; die_with_parent(); "

PARENT = f"""
import os, subprocess, sys
from tft.parent_death import parent_death_tie
child = subprocess.Popen(
    [sys.executable, "-c", {CHILD + "print(flush=True); import signal; signal.pause()"!r}],
    env=os.environ | parent_death_tie(),
    stdout=subprocess.PIPE,
)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def launch(tmp_path: Path, page: Page) -> Launch:
    """
    Return a function that runs a script in the way an agent does, and waits for its end.
    """
    (tmp_path / "packages").mkdir()
    package(tmp_path / "packages", "staged", ADAPTOR, "tft.adaptors")
    package(tmp_path / "packages", "unfit", "import nowhere", "tft.adaptors")

    def run(
        script: str, *arguments: str, module: bool = False, **environment: str
    ) -> "subprocess.CompletedProcess[str]":
        (tmp_path / "script.py").write_text(script)
        started = ["-m", "script"] if module else [str(tmp_path / "script.py")]
        given = {"RANK": "0", "TFT_INCARNATION": "0", "TFT_ADAPTOR": "staged", "TFT_WORDS": "2"}
        return subprocess.run(
            [sys.executable, "-P", "-m", "tft.worker.launch", *started, *arguments],
            cwd=tmp_path,
            env=os.environ
            | {"PYTHONPATH": f"{ROOT}:{tmp_path / 'packages'}"}
            | given
            | {"TFT_PAGE": str(page.fd)}
            | environment,
            pass_fds=[page.fd],
            capture_output=True,
            text=True,
        )

    return run


@pytest.fixture
def page() -> Iterator[Page]:
    """
    Return the page of the rank that is launched.
    """
    page = Page.create()
    yield page
    page.close()


@pytest.mark.parametrize(
    ("script", "ended"),
    [
        ("", True),
        ("import sys; sys.exit()", True),
        ("import sys; sys.exit(0)", True),
        ("import sys; sys.exit(3)", False),
        ("import sys; sys.exit('')", False),
        ("1 / 0", False),
        ("import os; os._exit(0)", False),
        ("import atexit, os; atexit.register(os._exit, 0)", False),
        (LINGERING, False),
    ],
    ids=["end", "exit", "exit 0", "exit 3", "text", "error", "_exit", "atexit", "thread"],
)
def test_end_of_the_script_is_on_the_page(
    launch: Launch, page: Page, script: str, ended: bool
) -> None:
    """When the script has ended without an error, and so has what it had registered for its end and
    its threads, then the page says so, for this incarnation alone."""
    launch(script, TFT_INCARNATION="2")
    assert page.script_ended(2) is ended
    assert not page.script_ended(1)
    assert not page.script_ended(3)


def test_module_runs_as_with_python_m(launch: Launch, tmp_path: Path) -> None:
    """When a module is started instead of a script, then it is found on the same path, and has the
    same name and arguments, as with `python -m`."""
    done = launch(
        "import sys; print(__name__, __spec__.name, sys.argv, sys.path[0], sep='|')",
        "-c",
        module=True,
    )
    expected = ["__main__", "script", str([str(tmp_path / "script.py"), "-c"]), str(tmp_path)]

    assert done.stdout.strip().split("|") == expected, done.stderr


def test_script_runs_as_with_python(launch: Launch, tmp_path: Path) -> None:
    """When a script is launched, then it is `__main__`, has its arguments, and can import modules
    from its directory."""
    (tmp_path / "neighbour.py").write_text("word = 'here'")
    done = launch(
        "import sys, pickle, neighbour\n"
        "class Thing: pass\n"
        "pickle.loads(pickle.dumps(Thing()))\n"
        "print(__name__, sys.argv[1:], neighbour.word)\n"
        "sys.exit(5)",
        "--lr",
        "1",
    )

    assert (done.returncode, done.stderr) == (5, "")
    assert done.stdout == "__main__ ['--lr', '1'] here\n"


def test_traceback_of_a_script_that_raises_is_shown(launch: Launch) -> None:
    """When a script raises, then its traceback is on stderr and the exit status is 1."""
    done = launch("def train():\n    raise ValueError('a bug')\ntrain()")

    assert done.returncode == 1
    assert 'script.py", line 2, in train' in done.stderr
    assert done.stderr.endswith("ValueError: a bug\n")


def test_script_gets_the_preloaded_adaptor(launch: Launch) -> None:
    """When the script asks for its adaptor, then it gets the adaptor that was preloaded. The
    adaptor is loaded only once."""
    done = launch(
        "from tft.plugins import load_adaptor\n"
        "print(load_adaptor('staged').get_plugin('staged').preloaded)"
    )

    assert (done.stdout, done.stderr) == ("1\n", "")


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"TFT_ADAPTOR": "lost"}, "no installed package provides an adaptor named 'lost'"),
        ({"TFT_ADAPTOR": "unfit"}, "No module named 'nowhere'"),
        ({"TFT_WORDS": "none"}, "start your script with `tft run SCRIPT`"),
    ],
)
def test_script_does_not_run_with_missing_or_wrong_settings(
    launch: Launch, environment: Mapping[str, str], sentence: str
) -> None:
    """When a required setting is missing or wrong, then the process prints an error, exits with 2
    and does not run the script."""
    done = launch("print('begun')", **environment)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tft: ")
    assert sentence in done.stderr


def test_tied_child_ends_with_its_parent() -> None:
    """When the parent is killed, then the child that is tied to it ends too."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        ended = select.poll()
        ended.register(child, select.POLLIN)
        assert ended.poll(0) == []
        parent.kill()
        assert ended.poll(2000) != []
        os.close(child)


def test_child_ends_at_once_when_its_parent_has_ended_already() -> None:
    """When the parent named in `TFT_PARENT` is no longer the parent, then the child kills itself."""
    late = {"TFT_PARENT": str(os.getppid())}
    done = _run(CHILD + "print('lives')", late)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


def test_process_without_tft_parent_is_not_tied() -> None:
    """When a process is started without `TFT_PARENT`, then it is tied to no parent. A tied process
    does not pass `TFT_PARENT` to its children."""
    assert _run(CHILD + "print('lives')", {}).stdout == "lives\n"
    tied = {"TFT_PARENT": str(os.getpid())}
    done = _run(CHILD + "import os; print(os.environ.get('TFT_PARENT'))", tied)
    assert done.stdout == "None\n"


def _run(code: str, environment: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
