"""
Settings for the tests of the adaptor for TorchTitan, which `make test-torchtitan` runs in an environment of
their own. Where TorchTitan is not installed, pytest does not collect these tests.
"""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torchtitan") else ["test_*.py"]
