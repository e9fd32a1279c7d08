"""
Sentences for the operator that the controller has to say at its very end, when it is too late for
the report of the job. The controller writes them to a file. `tft run` prints them at the end of the
job, after the controller has ended.
"""

from pathlib import Path

WORDS = "logs/last-words.txt"
"""The path, in the run directory, of the file with the sentences that `tft run` prints at the end
of the job. Each line has one sentence."""


def leave_word(run_dir: Path, sentence: str) -> None:
    """
    Write down a sentence that `tft run` will print at the end of the job. Call this in the process
    of the controller, when the controller is about to end.
    """
    with (run_dir / WORDS).open("a") as file:
        file.write(" ".join(sentence.split()) + "\n")


def last_words(run_dir: Path) -> list[str]:
    """
    Return the sentences that `leave_word` has written in this run.
    """
    path = run_dir / WORDS
    return path.read_text().splitlines() if path.exists() else []


def forget_words(run_dir: Path) -> None:
    """
    Remove the sentences of an earlier run.
    """
    (run_dir / WORDS).unlink(missing_ok=True)
