"""
A certificate authority for the TLS tests. It makes real certificates like those of a cluster.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

PEM = serialization.Encoding.PEM
Key = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey
NOW = datetime.now(UTC)
DAY = timedelta(days=1)


def curve_key() -> Key:
    """
    Return a new elliptic-curve key; making such a key is fast.
    """
    return ec.generate_private_key(ec.SECP256R1())


@dataclass(frozen=True, slots=True)
class Signed:
    """
    A certificate and its private key.
    """

    key: Key
    certificate: x509.Certificate

    @property
    def pem(self) -> bytes:
        """
        The certificate in PEM form, as a file contains it.
        """
        return self.certificate.public_bytes(PEM)

    def secret(self, password: str = "") -> str:
        """
        Return the private key as text for the field `tlsPk`, encrypted if a password is given.
        """
        hidden: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if password:
            hidden = serialization.BestAvailableEncryption(password.encode())
        return self.key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, hidden).decode()


def sign(
    name: str,
    by: Signed | None = None,
    *,
    key: Key | None = None,
    begins: datetime = NOW - DAY,
    ends: datetime = NOW + 365 * DAY,
    authority: bool = False,
) -> Signed:
    """
    Return a certificate for `name`, signed by `by`, or by itself without `by`.
    """
    key = key or curve_key()
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    made = x509.CertificateBuilder(
        by.certificate.subject if by else subject,
        subject,
        key.public_key(),
        x509.random_serial_number(),
        begins,
        ends,
    ).add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
    return Signed(key, made.sign(by.key if by else key, hashes.SHA256()))


def revoke(by: Signed, *numbers: int, ends: datetime = NOW + 30 * DAY) -> bytes:
    """
    Return a revocation list, signed by `by`, of the certificates with these serial numbers.
    """
    made = x509.CertificateRevocationListBuilder(by.certificate.subject, NOW - 40 * DAY, ends)
    for number in numbers:
        made = made.add_revoked_certificate(
            x509.RevokedCertificateBuilder(number, NOW - 35 * DAY).build()
        )
    return made.sign(by.key, hashes.SHA256()).public_bytes(PEM)


def told(
    folder: Path,
    mine: Signed,
    *trusted: Signed,
    password: str = "",
    said: str = "",
    revoked: Sequence[bytes] = (),
) -> str:
    """
    Write the certificate files into `folder` and return the text of a `tls_info` that names them.

    `password` encrypts the key. `said` is the password that the text states, if it differs from
    `password`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cert.pem").write_bytes(mine.pem)
    words = [f"tlsCert: {folder}/cert.pem", f"tlsCaPath: {folder}", f"packagePath: {folder}"]
    for number, each in enumerate(trusted):
        (folder / f"ca{number}.pem").write_bytes(each.pem)
    words.append("tlsCaFile: " + ",".join(f"ca{n}.pem" for n in range(len(trusted))))
    for number, content in enumerate(revoked):
        (folder / f"crl{number}.pem").write_bytes(content)
    if revoked:
        names = ",".join(f"crl{n}.pem" for n in range(len(revoked)))
        words += [f"tlsCrlPath: {folder}", f"tlsCrlFile: {names}"]
    words.append(f"tlsPk: {mine.secret(password)}")
    if password:
        words.append(f"tlsPkPwd: {said or password}")
    return "; ".join(words) + ";"
