"""Certificates for the server and keys for the devices: an authority of your own, in a few files.

    python -m fedprior.flower.certificates --out certificates --address server.example --address 192.0.2.7 --nodes 3

| file | goes to |
| --- | --- |
| `ca.key` | nobody: keep it offline, it signs servers |
| `ca.pem` | the server, every device, and whoever calls `flwr` |
| `server.pem`, `server.key` | the server |
| `node-0`, `node-1`, … | one device each: its private key |
| `node-0.pub`, … | the server's operator, to register the device |
"""

import argparse
import datetime
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedprior.core.errors import RunError

DAYS = 365


def make_certificates(folder: Path, addresses: list[str], nodes: int, days: int = DAYS) -> None:
    """Write all files to a folder that has none of them yet. Only their owner can read the private ones."""
    if folder.exists() and any(folder.iterdir()):
        raise RunError(f"{folder} is not empty; keys are never overwritten")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    authority = ec.generate_private_key(ec.SECP384R1())
    name = _name("fedprior federation")
    root = (
        _builder(name, name, authority.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(authority, hashes.SHA384())
    )
    key = ec.generate_private_key(ec.SECP384R1())
    server = (
        _builder(_name(addresses[0]), name, key.public_key(), days)
        # Clients check the address they call against these, not against the name above.
        .add_extension(x509.SubjectAlternativeName([_address(address) for address in addresses]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA384())
    )
    _write(folder / "ca.key", _pem(authority), private=True)
    _write(folder / "ca.pem", root.public_bytes(serialization.Encoding.PEM))
    _write(folder / "server.key", _pem(key), private=True)
    _write(folder / "server.pem", server.public_bytes(serialization.Encoding.PEM))
    for number in range(nodes):
        make_node_key(folder / f"node-{number}")


def make_node_key(path: Path) -> None:
    """Write a device's private key, and its public key to `path`.pub, in the formats that Flower expects."""
    key = ec.generate_private_key(ec.SECP384R1())
    no_password = serialization.NoEncryption()
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, no_password)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _write(path, private, private=True)
    _write(path.with_name(path.name + ".pub"), public + b"\n")


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # The clocks of devices are not always accurate to the minute.
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _address(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    no_password = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, no_password)


def _write(path: Path, data: bytes, private: bool = False) -> None:
    # Create the file with its final permissions, so that others cannot read a private key even for a moment.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o644), "wb") as file:
        file.write(data)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m fedprior.flower.certificates", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--address", action="append", required=True, help="the server's name or IP; repeatable")
    parser.add_argument("--nodes", type=int, default=3, help="how many device keys")
    parser.add_argument("--days", type=int, default=DAYS, help="how long the certificates are valid")
    given = parser.parse_args()
    try:
        make_certificates(given.out, given.address, given.nodes, given.days)
    except (RunError, OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
