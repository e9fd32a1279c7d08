"""
Settings for the tests of the adaptor for Transformers, which `make test-transformers` runs in an environment of
their own. Where Transformers is not installed, pytest does not collect these tests.
"""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("transformers") else ["test_*.py"]
