"""Certificates for the server and keys for the devices: an authority of your own, in a few files.

    python -m fedprior.flower.certificates --out certificates --address server.example --address 192.0.2.7 --nodes 3

| file | goes to |
| --- | --- |
| `ca.key` | nobody: keep it offline, it signs servers |
| `ca.pem` | the server, every device, and whoever calls `flwr` |
| `server.pem`, `server.key` | the server |
| `node-0`, `node-1`, … | one device each: its private key |
| `node-0.pub`, … | the server's operator, to register the device |

The same command on the same folder makes what is missing: keys of more devices, a certificate for one more address, a
new certificate in the last thirty days of the old one. It never overwrites a key.
"""

import argparse
import datetime
import ipaddress
import os
import sys
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedprior.core.errors import RunError
from fedprior.core.files import write_atomically
from fedprior.flower.expiry import SOON, days_left, load_certificate, remaining

DAYS, AUTHORITY_DAYS = 365, 3650
LOCAL = ("localhost", "127.0.0.1")
"""Every certificate has these too: `flwr` and the health check call the server on its own machine."""


class Authority(NamedTuple):
    """Who signs servers: `ca.key` and `ca.pem`."""

    key: ec.EllipticCurvePrivateKey
    root: x509.Certificate


def make_certificates(
    folder: Path, addresses: list[str], nodes: int = 0, days: int = DAYS, renew: bool = False
) -> list[str]:
    """Make what the folder lacks, and return a line about each. Only their owner can read the private files."""
    if folder.exists() and any(folder.iterdir()) and not (folder / "ca.key").is_file():
        raise RunError(f"{folder} is not empty and has no ca.key: choose a new folder, or the one with your authority")
    if not addresses and not (folder / "server.pem").is_file():
        raise RunError(f"{folder} has no server.pem yet: say with --address how devices will call the server")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    authority, done = _authority(folder, days, renew)
    done += _server(folder, authority, addresses, days, renew)
    for number in range(nodes):
        if not (folder / f"node-{number}").exists() and not (folder / f"node-{number}.pub").exists():
            make_node_key(folder / f"node-{number}")
            done.append(f"node-{number} and node-{number}.pub: register the one, copy the other to its device")
    return done


def make_node_key(path: Path) -> None:
    """Write a device's private key, and its public key to `path`.pub, in the formats that Flower expects."""
    key = ec.generate_private_key(ec.SECP384R1())
    no_password = serialization.NoEncryption()
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, no_password)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _write_key(path, private)
    path.with_name(path.name + ".pub").write_bytes(public + b"\n")


def _authority(folder: Path, days: int, renew: bool) -> tuple[Authority, list[str]]:
    """Return the folder's authority. If its certificate ends before a server's would, sign it anew with its own key."""
    made, path = _key(folder / "ca.key"), folder / "ca.pem"
    if path.is_file():
        root = load_certificate(path)
        if root.public_key() != made.public_key():
            raise RunError(f"{path} does not belong to ca.key beside it")
        if days_left(root.not_valid_after_utc) > (days if renew else SOON):
            return Authority(made, root), []
    name = _name("fedprior federation")
    root = (
        _builder(name, name, made.public_key(), max(days, AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(made, hashes.SHA384())
    )
    again = path.is_file()
    write_atomically(path, root.public_bytes(serialization.Encoding.PEM))
    what = "with the same key: copy it to every machine before the old one ends" if again else "for every machine"
    return Authority(made, root), [f"ca.pem {what}"]


def _server(folder: Path, authority: Authority, addresses: list[str], days: int, renew: bool) -> list[str]:
    """Sign a certificate for the server's key, if there is none for these addresses or it ends soon."""
    path, wanted = folder / "server.pem", [*dict.fromkeys([*addresses, *LOCAL])]
    if path.is_file():
        found = load_certificate(path)
        known = _addresses(found)
        if (
            not renew
            and days_left(found.not_valid_after_utc) > SOON
            and {_address(one) for one in wanted} <= set(known)
        ):
            return []
        # An address that is not asked for again stays: devices may still call it.
        wanted = [*dict.fromkeys([*(str(one.value) for one in known), *wanted])]
    key = _key(folder / "server.key")
    server = (
        _builder(_name(wanted[0]), authority.root.subject, key.public_key(), days)
        # Clients check the address they call against these, not against the name above.
        .add_extension(x509.SubjectAlternativeName([_address(address) for address in wanted]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()), critical=False)
        .sign(authority.key, hashes.SHA384())
    )
    write_atomically(path, server.public_bytes(serialization.Encoding.PEM))
    return [f"server.pem for {', '.join(wanted)}: copy it to the server and start the SuperLink again"]


def _key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return the private key in a file, which is made if it is missing."""
    if path.is_file():
        try:
            found = serialization.load_pem_private_key(path.read_bytes(), None)
        except ValueError as error:
            raise RunError(f"{path} is not a private key: {error}") from error
        if not isinstance(found, ec.EllipticCurvePrivateKey):
            raise RunError(f"{path} is not a key of the kind that this command makes")
        return found
    key = ec.generate_private_key(ec.SECP384R1())
    no_password = serialization.NoEncryption()
    _write_key(path, key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, no_password))
    return key


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


def _addresses(certificate: x509.Certificate) -> list[x509.IPAddress | x509.DNSName]:
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [one for one in found if isinstance(one, (x509.IPAddress, x509.DNSName))]


def _address(text: str) -> x509.IPAddress | x509.DNSName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _write_key(path: Path, data: bytes) -> None:
    # Create the file with its final permissions, so that others cannot read a private key even for a moment.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fedprior.flower.certificates", description=__doc__.split("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="the folder: a new one, or one whose missing files are made")
    what.add_argument("--check", metavar="WHAT", help="say how long a file or HOST:PORT is valid; fail if not 30 days")
    parser.add_argument("--address", action="append", default=[], help="the server's name or IP; repeatable")
    parser.add_argument("--nodes", type=int, default=0, help="how many devices there are in all")
    parser.add_argument("--days", type=int, default=DAYS, help="how long the server's certificate is valid")
    parser.add_argument("--renew", action="store_true", help="sign the server's certificate anew, whatever it has left")
    parser.add_argument("--ca", type=Path, default=Path("ca.pem"), help="the authority that --check HOST:PORT trusts")
    return parser


def main() -> None:
    """Run the command."""
    parser = _parser()
    given = parser.parse_args()
    try:
        if given.check:
            line, left = remaining(given.check, given.ca)
            print(line)  # noqa: T201
            sys.exit(left <= SOON)
        if given.days < 1 or given.nodes < 0:
            parser.error("--days must be at least 1 and --nodes at least 0")
        done = make_certificates(given.out, given.address, given.nodes, given.days, given.renew)
    except (RunError, OSError, ValueError) as error:
        parser.error(str(error))
    print("\n".join(done) or f"{given.out} has all of it, and nothing ends soon")  # noqa: T201


if __name__ == "__main__":
    main()
