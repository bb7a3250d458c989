"""How long certificates are valid: of a file, or of the one that a server shows to its callers."""

import argparse
import datetime
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509

from fedprior.core.errors import FedpriorError, RunError

SOON = 30
"""Days before its end from which a certificate is renewed and warned of."""
PATIENCE = 10.0
"""Seconds to wait for a server that should show its certificate."""


def load_certificate(path: Path) -> x509.Certificate:
    """Read a certificate from a file."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise RunError(f"{path} is not a certificate") from error


def days_left(end: datetime.datetime) -> float:
    """Return the days until then; negative afterwards."""
    return (end - datetime.datetime.now(datetime.UTC)) / datetime.timedelta(days=1)


def served_until(address: str, authority: Path) -> datetime.datetime:
    """Return when the certificate ends that the server at HOST:PORT shows. It must be the authority's and be valid."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise RunError(f"{address} is neither a file nor HOST:PORT")
    name = host.strip("[]")
    try:
        context = ssl.create_default_context(cafile=str(authority))
        with (
            socket.create_connection((name, int(port)), PATIENCE) as plain,
            context.wrap_socket(plain, server_hostname=name) as secure,
        ):
            shown = secure.getpeercert() or {}
    except (OSError, ValueError) as error:
        why = getattr(error, "verify_message", "") or error
        raise RunError(f"{address} shows no valid certificate of {authority}: {why}") from error
    return datetime.datetime.fromtimestamp(ssl.cert_time_to_seconds(str(shown["notAfter"])), datetime.UTC)


def remaining(source: str, authority: Path) -> tuple[str, float]:
    """Return a line about the certificate of a file or a server, and the days that it has left."""
    path = Path(source)
    end = load_certificate(path).not_valid_after_utc if path.is_file() else served_until(source, authority)
    left = days_left(end)
    rest = f"{left:.0f} days left" if left > 0 else f"ended {-left:.0f} days ago"
    return f"{source}: {rest}, until {end:%Y-%m-%d}", left


def warnings(arguments: Sequence[str]) -> list[str]:
    """Return a line for each certificate that ends soon, given the arguments with which Flower started a server app.

    These name the SuperLink and its authority. Where there is no TLS, there is nothing to warn of.
    """
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--runtime-api-address", default="")
    parser.add_argument("--root-certificates", type=Path)
    given, _ = parser.parse_known_args(list(arguments))
    if given.root_certificates is None or not given.runtime_api_address:
        return []
    advice = "renew it: python -m fedprior.flower.certificates --out YOUR-CERTIFICATES"
    found = []
    for source in (str(given.root_certificates), given.runtime_api_address):
        try:
            line, left = remaining(source, given.root_certificates)
        except FedpriorError as error:
            found.append(str(error))
            continue
        if left <= SOON:
            found.append(f"the certificate of {line}; {advice}")
    return found
