"""
Faults that the programs of tests make once, although a step is computed again.
"""

from pathlib import Path


def once(mark: Path) -> bool:
    """
    Return True the first time that a process of the job asks for this mark, which is a file.
    """
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
