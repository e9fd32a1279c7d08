"""
Tests of `enable_tls=True`: tft checks real certificates as MindIO does and encrypts the job with
keys that follow from them.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from mindio_ttp import tls
from mindio_ttp.checks import Refused

from tests.mindio.authority import DAY, NOW, Signed, revoke, sign, told
from tests.mindio.jobs import job
from tests.mindio.test_jobs import assert_same
from tft.keys import read_keys

AUTHORITY = sign("authority", authority=True)
BETWEEN = sign("between", AUTHORITY, authority=True)
MINE = sign("rank", AUTHORITY)
AHEAD = 30
WORDS = "a password, as it is kept"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """
    Return a temporary home directory, under which tft keeps its keys.
    """
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    return home


def directory(info: str, decrypt: tls.Decrypt | None = None) -> Path:
    """
    Return the directory of the keys that follow from a `tls_info`.
    """
    option, where = tls.options(info, decrypt, AHEAD)
    assert option == "--curve"
    return Path(where)


def refusal(info: str, decrypt: tls.Decrypt | None = None) -> str:
    """
    Return the message with which a `tls_info` is refused.
    """
    with pytest.raises(Refused) as refused:
        tls.options(info, decrypt, AHEAD)
    return str(refused.value)


# ---------------------------------------------------------------- job keys


def test_processes_with_one_private_key_derive_the_same_job_keys(
    tmp_path: Path, home: Path
) -> None:
    """When processes name the same private key, with a password or without, then they derive the
    same job keys, which only their owner can read. No file contains the private key."""
    plain = directory(told(tmp_path / "a", MINE, AUTHORITY))
    hidden = directory(told(tmp_path / "b", MINE, AUTHORITY, password="secret"))

    assert plain == hidden
    assert plain.is_relative_to(home)
    read_keys(plain, broker=True)
    for path in plain.iterdir():
        assert path.read_bytes() not in MINE.secret().encode()
        assert MINE.secret().encode() not in path.read_bytes()


def test_different_private_keys_give_different_job_keys(tmp_path: Path) -> None:
    """When two certificates of one authority have keys of their own, then the keys of the job
    differ."""
    other = directory(told(tmp_path / "b", sign("rank", AUTHORITY), AUTHORITY))

    assert directory(told(tmp_path / "a", MINE, AUTHORITY)) != other


def test_changed_job_keys_are_refused(tmp_path: Path) -> None:
    """When the directory of the job keys has other keys than the derived ones, then they are
    refused."""
    info = told(tmp_path / "a", MINE, AUTHORITY)
    where = directory(info)
    (where / "job.key").write_bytes(b"0" * 40)

    assert "does not match the secret of the job" in refusal(info)


# ---------------------------------------------------------------- accepted certificates and keys


TAKEN: dict[str, Callable[[Path], str]] = {
    "between": lambda at: told(at, sign("rank", BETWEEN), BETWEEN, AUTHORITY),
    "of itself": lambda at: told(at, AUTHORITY, AUTHORITY),
    "rsa": lambda at: told(
        at, sign("rank", AUTHORITY, key=rsa.generate_private_key(65537, 3072)), AUTHORITY
    ),
    "others revoked": lambda at: told(at, MINE, AUTHORITY, revoked=[revoke(AUTHORITY, 1, 2)]),
    "an old list": lambda at: told(
        at, MINE, AUTHORITY, revoked=[revoke(AUTHORITY, 1, ends=NOW - DAY)]
    ),
    "a password too many": lambda at: told(at, MINE, AUTHORITY) + "tlsPkPwd: none is needed;",
}


@pytest.mark.parametrize("what", TAKEN)
def test_a_valid_certificate_is_accepted(tmp_path: Path, what: str) -> None:
    """When a certificate is within its dates, signed by a trusted authority and its key is long
    enough, then it is accepted."""
    read_keys(directory(TAKEN[what](tmp_path / "a")))


def test_a_certificate_that_expires_soon_is_accepted_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """When a certificate has fewer days left than the limit for a warning, then it is used and a
    warning is logged."""
    directory(told(tmp_path / "a", sign("rank", AUTHORITY, ends=NOW + 10 * DAY), AUTHORITY))

    written = capsys.readouterr()
    assert "certificate_expires" in written.out + written.err


# ---------------------------------------------------------------- refused certificates and keys


def _linked(at: Path) -> str:
    info = told(at, MINE, AUTHORITY)
    (at / "cert.pem").rename(at / "there.pem")
    (at / "cert.pem").symlink_to(at / "there.pem")
    return info


def _large(at: Path) -> str:
    info = told(at, MINE, AUTHORITY)
    with (at / "ca0.pem").open("ab") as file:
        file.truncate(10 * 1024 * 1024 + 1)
    return info


def _cut(at: Path) -> str:
    info = told(at, MINE, AUTHORITY)
    (at / "cert.pem").write_bytes(MINE.pem[:100])
    return info


def _without(at: Path) -> str:
    info = told(at, MINE, AUTHORITY, revoked=[revoke(AUTHORITY)])
    (at / "crl0.pem").unlink()
    return info


NOT_TAKEN: dict[str, tuple[Callable[[Path], str], str]] = {
    "expired": (
        lambda at: told(at, sign("r", AUTHORITY, begins=NOW - 9 * DAY, ends=NOW - DAY), AUTHORITY),
        "has expired: replace the file; the certificate was valid until",
    ),
    "not yet": (
        lambda at: told(at, sign("r", AUTHORITY, begins=NOW + DAY), AUTHORITY),
        "is valid from",
    ),
    "an expired authority": (
        lambda at: _by(at, sign("old", ends=NOW - DAY, begins=NOW - 9 * DAY, authority=True)),
        "in tlsCaFile is not valid now",
    ),
    "a short key": (
        lambda at: told(
            at, sign("r", AUTHORITY, key=rsa.generate_private_key(65537, 2048)), AUTHORITY
        ),
        "has 2048 bits; it must have at least 3072",
    ),
    "a short curve": (
        lambda at: told(
            at, sign("r", AUTHORITY, key=ec.generate_private_key(ec.SECP224R1())), AUTHORITY
        ),
        "has 224 bits; it must have at least 256",
    ),
    "another authority": (
        lambda at: told(at, MINE, sign("authority", authority=True)),
        "is not signed by a certificate in tlsCaFile",
    ),
    "a link of the chain is missing": (
        lambda at: told(at, sign("r", BETWEEN), AUTHORITY),
        "is not signed by a certificate in tlsCaFile",
    ),
    "another's key": (
        lambda at: told(at, Signed(sign("x").key, MINE.certificate), AUTHORITY),
        "tlsPk of tls_info does not belong to the certificate",
    ),
    "revoked": (
        lambda at: told(
            at, MINE, AUTHORITY, revoked=[revoke(AUTHORITY, MINE.certificate.serial_number)]
        ),
        "or a certificate that has signed it",
    ),
    "revoked between": (
        lambda at: told(
            at,
            sign("r", BETWEEN),
            BETWEEN,
            AUTHORITY,
            revoked=[revoke(BETWEEN), revoke(AUTHORITY, BETWEEN.certificate.serial_number)],
        ),
        "or a certificate that has signed it",
    ),
    "a false list": (
        lambda at: told(
            at, MINE, AUTHORITY, revoked=[revoke(Signed(sign("x").key, AUTHORITY.certificate))]
        ),
        "is not signed by CN=authority",
    ),
    "no list": (
        lambda at: told(at, MINE, AUTHORITY, revoked=[b"none"]),
        "contains no list of revoked certificates",
    ),
    "a missing list": (_without, "tlsCrlFile of tls_info: "),
    "a wrong password": (
        lambda at: told(at, MINE, AUTHORITY, password="one", said="another"),
        "tlsPk of tls_info is not a private key, or its password is wrong",
    ),
    "no key": (
        lambda at: told(at, MINE, AUTHORITY).replace("BEGIN PRIVATE", "BEGIN NO"),
        "tlsPk of tls_info is not a private key",
    ),
    "a link": (_linked, "cert.pem must be a file, and not a symbolic link"),
    "too large": (_large, "ca0.pem has more than 10485760 bytes"),
    "cut": (_cut, "cert.pem contains no certificate"),
}


def _by(at: Path, authority: Signed) -> str:
    return told(at, sign("r", authority), authority)


@pytest.mark.parametrize("what", NOT_TAKEN)
def test_an_invalid_certificate_key_or_file_is_refused_with_its_name(
    tmp_path: Path, home: Path, what: str
) -> None:
    """When the certificate, its key or its files are invalid, then the message names the defect
    without the key, and no job keys are made."""
    make, sentence = NOT_TAKEN[what]

    said = refusal(make(tmp_path / "a"))

    assert sentence in said
    assert not re.search(r"[A-Za-z0-9+]{40}", said)  # no text looks like a key in base64
    assert list(home.iterdir()) == []


# ---------------------------------------------------------------- the password of the private key


def test_the_programs_function_decrypts_the_password(tmp_path: Path) -> None:
    """When a program has a function that decrypts, then the private key is opened with its
    result."""
    info = told(tmp_path / "a", MINE, AUTHORITY, password="secret", said=WORDS)

    read_keys(directory(info, {WORDS: "secret"}.__getitem__))


@pytest.mark.parametrize(
    ("decrypt", "sentence"),
    [
        (lambda cipher: cipher[100], "has failed: IndexError"),
        (
            lambda cipher: b"secret",
            "must return the password as a string that is shorter than twice the length",
        ),
        (
            lambda cipher: cipher * 2,
            "must return the password as a string that is shorter than twice the length",
        ),
        (lambda cipher: "wrong", "or its password is wrong"),
    ],
    ids=["it fails", "no text", "too long", "wrong"],
)
def test_a_decrypt_function_with_a_wrong_password_is_named(
    tmp_path: Path, decrypt: tls.Decrypt, sentence: str
) -> None:
    """When the function does not return the password, then the message names the function as the
    reason."""
    info = told(tmp_path / "a", MINE, AUTHORITY, password="secret", said=WORDS)

    assert sentence in refusal(info, decrypt)


# ---------------------------------------------------------------- whole jobs


@pytest.mark.soak
def test_a_job_with_tls_survives_a_killed_rank(tmp_path: Path, home: Path) -> None:
    """When the processes of a job name one private key, then the job is encrypted with the derived
    keys, and a killed rank is replaced bit for bit."""
    info = told(tmp_path / "certificates", MINE, AUTHORITY)
    faults = [[1, 4, "loop", "kill"]]
    with job(tmp_path / "job", launched=True, faults=faults, tls=info) as running:
        outcome = running.end()

    assert_same(outcome)
    assert outcome.strategies == ["recover"]
    [made] = (home / ".tft").iterdir()
    assert str(made) in (tmp_path / "job" / "run" / "job.json").read_text()


def test_a_program_with_tls_is_refused_in_a_job_without_keys(tmp_path: Path) -> None:
    """When `tft run` was started without --curve, then a program that asks for TLS does not train
    in it."""
    info = told(tmp_path / "certificates", MINE, AUTHORITY)
    with job(tmp_path / "job", world=1, tls=info) as running:
        outcome = running.end()

    assert outcome.codes != [0]
    assert "the job was started without --curve" in outcome.output
