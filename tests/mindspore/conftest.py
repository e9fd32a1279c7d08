"""
Tests with real MindSpore. `make test-mindspore` runs them, in an environment of their own: elsewhere there
is no MindSpore, and they are not collected.
"""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("mindspore") else ["test_*.py"]
