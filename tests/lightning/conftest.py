"""
Settings for the tests of the adaptor for Lightning, which `make test-lightning` runs in an environment of
their own. Where Lightning is not installed, pytest does not collect these tests.
"""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("lightning") else ["test_*.py"]
