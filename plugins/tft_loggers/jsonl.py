"""
The logger `jsonl`: nothing but the file `values.jsonl`, which is written in any case.
"""

from collections.abc import Mapping

from tft.spi import LoggerJob


class FileOnly:
    """
    Sends nothing anywhere.
    """

    def log(self, step: int, values: Mapping[str, float], at: float, *, again: bool) -> None:
        pass

    def last_step(self) -> int | None:
        return None

    def flush(self) -> bool:
        return True

    def close(self, result: str) -> None:
        pass


def open_logger(job: LoggerJob) -> FileOnly:
    """
    Return the logger.
    """
    return FileOnly()
