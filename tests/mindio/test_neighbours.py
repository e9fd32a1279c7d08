"""
Tests that importing tft's `mindio_ttp` reports another installed `mindio_ttp`.

The package recognises the other one by the metadata of the installed distributions.
"""

import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
from mindio_ttp.package_conflicts import refuse_another


def installed(place: Path, name: str, files: dict[str, str], *, egg: bool = False) -> None:
    """
    Create the metadata of an installed distribution: a wheel's with RECORD, or with `egg` the older
    form.
    """
    described = place / f"{name.replace('-', '_')}-7.3.0.{'egg' if egg else 'dist'}-info"
    described.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 7.3.0\n"
    (described / ("PKG-INFO" if egg else "METADATA")).write_text(metadata)
    for file, text in files.items():
        (described / file).write_text(text)


RECORD = {"RECORD": "mindio_ttp/__init__.py,sha256=x,10\nmindio_ttp/framework_ttp/__init__.py,,\n"}


@pytest.mark.parametrize(
    ("name", "files", "egg"),
    [
        ("mindio-ttp", RECORD, False),
        ("mindio_ttp", {"RECORD": "a/b.py,,\nmindio_ttp/utils.py,,\n"}, False),
        ("something", {"top_level.txt": "other\nmindio_ttp\n"}, False),
        ("mindio", {"SOURCES.txt": "setup.py\nmindio_ttp/__init__.py\n"}, True),
    ],
    ids=["wheel", "later line", "top level", "egg"],
)
def test_another_distribution_of_mindio_ttp_is_refused(
    name: str, files: dict[str, str], egg: bool, tmp_path: Path
) -> None:
    """When another distribution has files of the package, then the error names it and says how to
    remove the conflict."""
    installed(tmp_path, name, files, egg=egg)
    with pytest.raises(ImportError, match=f"{name} 7.3.0 also has a package mindio_ttp") as raised:
        refuse_another("mindio_ttp", distributions(path=[str(tmp_path)]))
    assert f"pip uninstall {name}" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("tft-mindio", RECORD),
        ("tft_mindio", RECORD),
        ("mindio-ttp-docs", {"RECORD": "docs/mindio_ttp/index.html,,\nmindio_ttp_docs/x.py,,\n"}),
        ("nothing-said", {}),
    ],
    ids=["ours", "ours, spelled otherwise", "another name", "no list"],
)
def test_unrelated_distributions_are_accepted(
    name: str, files: dict[str, str], tmp_path: Path
) -> None:
    """When a distribution has no file of the package, or is this one, then it is accepted."""
    installed(tmp_path, name, files)
    refuse_another("mindio_ttp", distributions(path=[str(tmp_path)]))


def test_the_import_refuses_another_distribution(tmp_path: Path) -> None:
    """When another distribution is on the path of a process, then the import raises the error."""
    installed(tmp_path, "mindio-ttp", RECORD)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", "import mindio_ttp.framework_ttp"],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "ImportError: mindio-ttp 7.3.0 also has a package"
    )
