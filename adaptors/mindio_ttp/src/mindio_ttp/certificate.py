"""
Checks the TLS certificate of this process as the library MindIO does.

The certificate must be valid now, signed by a trusted certificate, and not revoked. The public key
in the certificate must be long enough, and must belong to the private key of this process.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from mindio_ttp import logs
from mindio_ttp.checks import Refused

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

log = logs.get_logger()

LEAST_BITS = 3072
"""The least number of bits that the RSA key of a certificate must have."""
LEAST_CURVE_BITS = 256
"""The least number of bits that the elliptic-curve key of a certificate must have. A key of this
length is as strong as an RSA key of `LEAST_BITS`. The library MindIO requires 3072 bits for RSA
keys and elliptic-curve keys alike, and so accepts no elliptic-curve key."""
LONGEST_CHAIN = 8
"""The largest number of certificates in a chain that leads from the certificate of this process to
a self-signed certificate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateKey:
    """
    A private key in DER form (the binary encoding of keys), with its public key.
    """

    content: bytes = field(repr=False)
    """The unencrypted private key in DER form. Equal private keys have equal bytes in this form."""
    public: bytes
    """The public key that belongs to the private key, in DER form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """
    The files with the TLS certificate of this process, with the certificates that the process
    trusts, and with lists of revoked certificates.
    """

    certificate: Path
    """The file with the certificate of this process."""
    trusted: tuple[Path, ...]
    """The files with the certificates that this process trusts to sign other certificates."""
    revoked: tuple[Path, ...] = ()
    """The files with lists of revoked certificates."""

    def check(self, key: PrivateKey) -> int:
        """
        Check the certificate of this process. Return the number of days for which the certificate
        is still valid. `key` is the private key of this process.

        Raises `Refused` if a check fails. The message names the file or the certificate.
        """
        mine = _certificates(self.certificate)[0]
        now = datetime.now(UTC)
        if now < mine.not_valid_before_utc:
            raise Refused(
                f"the certificate of this process, {self.certificate}, is not valid yet: check the "
                "clock of this machine, or use a certificate that is valid now; this one is valid "
                f"from {mine.not_valid_before_utc}"
            )
        if now > mine.not_valid_after_utc:
            raise Refused(
                f"the certificate of this process, {self.certificate}, has expired: replace the "
                f"file; the certificate was valid until {mine.not_valid_after_utc}"
            )
        _check_length(self.certificate, mine)
        if _public(mine) != key.public:
            raise Refused(
                "the private key in tlsPk of tls_info does not belong to the certificate "
                f"{self.certificate}: give the key with which the certificate was made"
            )
        trusted = [each for path in self.trusted for each in _certificates(path)]
        chain = _chain(self.certificate, mine, trusted, now)
        self._check_not_revoked(chain, now)
        return (mine.not_valid_after_utc - now).days

    def _check_not_revoked(self, chain: Sequence["Certificate"], now: datetime) -> None:
        from cryptography import x509

        for path in self.revoked:
            try:
                revoked = x509.load_pem_x509_crl(path.read_bytes())
            except ValueError as wrong:
                raise Refused(
                    f"the file {path} contains no list of revoked certificates (CRL) that can be "
                    f"read: {wrong}"
                ) from None
            if revoked.next_update_utc is not None and revoked.next_update_utc < now:
                log.warning(
                    "revocations_out_of_date", file=str(path), since=revoked.next_update_utc
                )
            for certificate, issuer in zip(chain, [*chain[1:], chain[-1]], strict=True):
                if revoked.issuer != issuer.subject:
                    continue
                if not revoked.is_signature_valid(issuer.public_key()):  # type: ignore[arg-type] # a key that can sign
                    raise Refused(
                        f"the list of revoked certificates {path} is not signed by "
                        f"{issuer.subject.rfc4514_string()}, which the list names as its issuer: "
                        "get the list from this issuer again"
                    )
                number = certificate.serial_number
                if revoked.get_revoked_certificate_by_serial_number(number) is not None:
                    raise Refused(
                        f"the list of revoked certificates {path} names the certificate of this "
                        f"process, {self.certificate}, or a certificate that has signed it: use a "
                        "certificate that is not revoked"
                    )


def private_key(text: str, password: str | None) -> PrivateKey:
    """
    Read a private key from `text`, which has the key in PEM form. Return the key.

    Raises `Refused` if the text is no key or cannot be read with the password. Also raises
    `Refused` if the Python package cryptography is not installed.
    """
    try:
        from cryptography.hazmat.primitives import serialization
    except ImportError:
        raise Refused(
            "enable_tls=True needs the package cryptography: pip install 'tft-mindio[tls]'"
        ) from None
    pem = text.encode()
    try:
        try:
            key = serialization.load_pem_private_key(
                pem, None if password is None else password.encode()
            )
        except TypeError:
            if password is None:
                raise
            # catch TypeError too, because the library cryptography raises it if a password was
            # given but the key is not encrypted
            key = serialization.load_pem_private_key(pem, None)
    except (ValueError, TypeError) as wrong:
        # the message may have the text of cryptography's error, because that text never contains
        # the key
        raise Refused(
            f"tlsPk of tls_info is not a private key, or its password is wrong: {wrong}"
        ) from None
    return PrivateKey(
        content=key.private_bytes(
            serialization.Encoding.DER,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
        public=key.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        ),
    )


def _certificates(path: Path) -> Sequence["Certificate"]:
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except ValueError as wrong:
        raise Refused(
            f"the file {path} contains no certificate that can be read: {wrong}"
        ) from None


def _public(certificate: "Certificate") -> bytes:
    from cryptography.hazmat.primitives import serialization

    return certificate.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def _check_length(path: Path, certificate: "Certificate") -> None:
    from cryptography.hazmat.primitives.asymmetric import ec, rsa

    match certificate.public_key():
        case rsa.RSAPublicKey(key_size=bits):
            least = LEAST_BITS
        case ec.EllipticCurvePublicKey(key_size=bits):
            least = LEAST_CURVE_BITS
        case _:
            return  # keys of all other kinds, such as Ed25519, have a fixed length
    if bits < least:
        raise Refused(f"the key of {path} has {bits} bits; it must have at least {least}")


def _chain(
    path: Path, mine: "Certificate", trusted: Sequence["Certificate"], now: datetime
) -> list["Certificate"]:
    """
    Return the chain of certificates that begins with `mine`, the certificate of this process.

    In the chain, each certificate is followed by the trusted certificate that has signed it. The
    last certificate is self-signed. `path` is the file of `mine`, for messages. `now` is the
    present time. Raises `Refused` if the chain is incomplete, or if a trusted certificate in it is
    not valid now.
    """
    chain = [mine]
    while len(chain) < LONGEST_CHAIN:
        issuer = next((each for each in trusted if _signed(chain[-1], each)), None)
        if issuer is None:
            break
        if not issuer.not_valid_before_utc <= now <= issuer.not_valid_after_utc:
            raise Refused(
                f"the certificate of {issuer.subject.rfc4514_string()} in tlsCaFile is not valid "
                "now"
            )
        if issuer == chain[-1]:
            return chain
        chain.append(issuer)
    raise Refused(
        f"{path} is not signed by a certificate in tlsCaFile, or an intermediate certificate is "
        "missing: name all certificates that lead to a self-signed certificate in tlsCaFile"
    )


def _signed(certificate: "Certificate", issuer: "Certificate") -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
