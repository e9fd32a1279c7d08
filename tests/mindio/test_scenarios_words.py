"""
MindIO's own tests that need no job: parsing of TLS descriptions and replica groups, and the source
of the time.
"""

import ast
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mindio_ttp import replicas, tls
from mindio_ttp.checks import Refused

ROOT = Path(__file__).parents[2]
TLS = {
    "tlsCert": "certificates/cert.pem",
    "tlsCaPath": "certificates",
    "tlsCaFile": "ca_1.pem,ca_2.pem",
    "tlsCrlPath": "lists",
    "tlsCrlFile": "crl.pem",
    "tlsPk": "a key",
    "tlsPkPwd": "a password",
    "packagePath": "libraries",
}
NUMBERS = st.integers(-2, 9)


def test_all_keys_of_tls_info_are_read() -> None:
    """When a text has all eight keys, with spaces, an unknown key and a malformed pair, then the
    eight keys are read."""
    pairs = " ; ".join(f"{name} : {value}" for name, value in TLS.items())
    assert tls.read(f"{pairs}; colour: blue; ;nothing") == TLS


@pytest.mark.parametrize("named", ["tlsCert", "tlsCaPath", "packagePath"])
def test_a_symbolic_link_is_refused_as_a_tls_file(tmp_path: Path, named: str) -> None:
    """When a path is a symbolic link, then it is refused, also when its target is valid."""
    (tmp_path / "real").mkdir()
    (tmp_path / "certificates").mkdir()
    for name in ("cert.pem", "ca_1.pem", "ca_2.pem"):
        (tmp_path / "certificates" / name).touch()
    (tmp_path / "link").symlink_to(
        tmp_path / ("certificates/cert.pem" if named == "tlsCert" else "certificates")
    )
    paths = {
        "tlsCert": str(tmp_path / "certificates" / "cert.pem"),
        "tlsCaPath": str(tmp_path / "certificates"),
        "packagePath": str(tmp_path / "real"),
    }
    given_paths = {name: value for name, value in TLS.items() if "Crl" not in name} | paths
    tls.check_files(given_paths)
    with pytest.raises(Refused, match=named):
        tls.check_files(given_paths | {named: str(tmp_path / "link")})


@given(
    st.recursive(
        st.none() | NUMBERS | st.booleans() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.sampled_from(["rank_list", "replica_cnt", "other"]), inner)
            | st.fixed_dictionaries(
                {"rank_list": st.lists(NUMBERS), "replica_cnt": inner, "replica_shift": inner}
            )
        ),
        max_leaves=12,
    ),
    st.booleans(),
)
def test_any_group_input_is_refused_or_gives_each_part_its_copies(info: Any, whole: bool) -> None:
    """When any groups are given, then either they are refused with a message, or each part of the
    state has as many holders as the group has copies, and every rank of the group holds a part."""
    try:
        groups = replicas.read(0, 8, info, whole=whole)
    except Refused:
        return
    for group in groups:
        for rank in group.ranks:
            assert rank in group.holders(group.part_of(rank))
            assert len(group.holders(group.part_of(rank))) == group.copies


RECORDS = {
    "report/facts",
    "worker/records",
    "controller/progress",
    "controller/report_file",
    "dashboard/run",
    "launcher/records",
}
"""The modules that write the time of day into records, or show it to people. They decide nothing about a job."""


def test_no_deadline_uses_the_wall_clock() -> None:
    """When the clock of a machine is set, then no time limit changes, because no code that decides
    reads the time of day. Only one function reads it, for records."""
    callers = set()
    for path in [*ROOT.glob("tft/**/*.py"), *ROOT.glob("adaptors/mindio_ttp/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("time", "time_ns"):
                asked = isinstance(node.value, ast.Name) and node.value.id == "time"
                assert not asked or path == ROOT / "tft/clock.py", f"{path}:{node.lineno}"
            if isinstance(node, ast.Name) and node.id == "unix_time":
                callers.add(str(path.relative_to(ROOT / "tft").with_suffix("")))
    assert callers == RECORDS
