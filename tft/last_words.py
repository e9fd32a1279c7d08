"""
Sentences that a part of a job leaves for the operator when the report is written already. `tft run`
prints them at the end of the job, after the controller has ended.
"""

from pathlib import Path

WORDS = "logs/last-words.txt"
"""The file of the sentences in the run directory, one in each line."""


def leave_word(run_dir: Path, sentence: str) -> None:
    """
    Leave a sentence that `tft run` prints at the end of the job. Call this in the process of the
    controller, at its end.
    """
    with (run_dir / WORDS).open("a") as file:
        file.write(" ".join(sentence.split()) + "\n")


def last_words(run_dir: Path) -> list[str]:
    """
    Return the sentences of this run.
    """
    path = run_dir / WORDS
    return path.read_text().splitlines() if path.exists() else []


def forget_words(run_dir: Path) -> None:
    """
    Remove the sentences of an earlier run.
    """
    (run_dir / WORDS).unlink(missing_ok=True)
