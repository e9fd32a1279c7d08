"""
Checks that a framework is installed in a version for which its adaptor was written.
"""

import re
from dataclasses import dataclass
from importlib import metadata

from tft.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownVersions:
    """
    The versions of a package for which an adaptor was written: `oldest` and all later versions
    before `unknown`.
    """

    adaptor: str
    """The name of the adaptor, and of the extra of `tft-bus` that installs the package."""
    package: str
    """The name of the package in the package index."""
    oldest: str
    unknown: str
    differs: str
    """A clause that says what may be different in other versions. It ends the error message."""

    def check(self, found: str | None = None) -> None:
        """
        Raise `UsageError` if the package is not installed, or has another version. `found` is the
        installed version. If `found` is None, the version is read from the package's metadata.
        """
        if found is None:
            try:
                found = metadata.version(self.package)
            except metadata.PackageNotFoundError:
                raise self.missing("which is not installed") from None
        if not _release(self.oldest) <= _release(found) < _release(self.unknown):
            raise UsageError(
                f"the adaptor {self.adaptor} was written for {self.package} from {self.oldest} on "
                f"and before {self.unknown}, but {found} is installed, {self.differs}. Install "
                f"'{self.package}>={self.oldest},<{self.unknown}'"
            )

    def missing(self, why: str) -> UsageError:
        """
        Return an error that says that the adaptor needs the package, and how to install it. `why`
        says why the package cannot be used.
        """
        return UsageError(
            f"the adaptor {self.adaptor} needs {self.package}, {why}: "
            f"pip install 'tft-bus[{self.adaptor}]'"
        )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
