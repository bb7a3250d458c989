"""Keys and certificates over the years: devices join, addresses change, certificates end. Judged by Python's TLS."""

import contextlib
import socket
import ssl
import sys
import threading

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'fedprior[flower]'")

from fedprior.core.errors import RunError
from fedprior.flower import certificates, expiry
from fedprior.flower.certificates import make_certificates


@contextlib.contextmanager
def serving(folder):
    """A TLS server with the folder's certificate, on a free port of 127.0.0.1."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    listener = socket.create_server(("127.0.0.1", 0))

    def answer():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                # A caller that does not trust the certificate hangs up.
                with contextlib.suppress(OSError), context.wrap_socket(connection, server_side=True) as secure:
                    secure.recv(1)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_folder_with_everything_stays_as_it_is(tmp_path):
    make_certificates(tmp_path, ["server.example"], 2)
    before = contents(tmp_path)
    assert make_certificates(tmp_path, ["server.example"], 2) == []
    assert contents(tmp_path) == before


def test_a_device_joins_without_a_change_for_the_others(tmp_path):
    make_certificates(tmp_path, ["server.example"], 2)
    before = contents(tmp_path)
    (line,) = make_certificates(tmp_path, [], 3)
    assert line.startswith("node-2 ")
    after = contents(tmp_path)
    assert after.keys() - before.keys() == {"node-2", "node-2.pub"}
    assert after.items() >= before.items()


@pytest.mark.parametrize("how", [{"renew": True}, {"addresses": ["127.0.0.2"]}])
def test_devices_trust_a_renewed_certificate_as_they_are(how, tmp_path):
    make_certificates(tmp_path, ["127.0.0.3"], 1)
    before = contents(tmp_path)
    (line,) = make_certificates(tmp_path, **{"addresses": [], **how})
    assert line.startswith("server.pem for 127.0.0.3, localhost, 127.0.0.1")
    after = contents(tmp_path)
    assert {name for name in after if after[name] != before[name]} == {"server.pem"}
    (tmp_path / "old.pem").write_bytes(before["ca.pem"])
    with serving(tmp_path) as port:
        assert expiry.days_left(expiry.served_until(f"127.0.0.1:{port}", tmp_path / "old.pem")) > 360
        context = ssl.create_default_context(cafile=str(tmp_path / "old.pem"))
        for name in ("localhost", "127.0.0.1", "127.0.0.3", *how.get("addresses", ())):
            with (
                socket.create_connection(("127.0.0.1", port)) as plain,
                context.wrap_socket(plain, server_hostname=name),
            ):
                pass
        with socket.create_connection(("127.0.0.1", port)) as plain, pytest.raises(ssl.SSLCertVerificationError):
            context.wrap_socket(plain, server_hostname="127.0.0.9")


def test_in_its_last_month_a_certificate_is_warned_of_and_renewed(tmp_path):
    make_certificates(tmp_path, ["server.example"], days=expiry.SOON)
    ca = tmp_path / "ca.pem"
    with serving(tmp_path) as port:
        flags = ["--runtime-api-address", f"127.0.0.1:{port}", "--root-certificates", str(ca), "--token", "secret"]
        (warning,) = expiry.warnings(flags)
        assert f"127.0.0.1:{port}: 30 days left" in warning
        assert "fedprior.flower.certificates --out" in warning
    make_certificates(tmp_path, [])
    with serving(tmp_path) as port:
        assert expiry.warnings([*flags[:1], f"127.0.0.1:{port}", *flags[2:]]) == []
    (nobody,) = expiry.warnings(["--runtime-api-address=127.0.0.1:1", f"--root-certificates={ca}"])
    assert "127.0.0.1:1 shows no valid certificate" in nobody
    assert expiry.warnings(["--insecure", "--runtime-api-address", "127.0.0.1:1"]) == []


def test_an_authority_that_ends_is_renewed_with_its_own_key(tmp_path, monkeypatch):
    """An old ca.pem and the new one both trust the same server: machines may be given the new one in any order."""
    monkeypatch.setattr(certificates, "AUTHORITY_DAYS", 20)
    make_certificates(tmp_path, ["server.example"], days=20)
    (tmp_path / "old.pem").write_bytes((tmp_path / "ca.pem").read_bytes())
    monkeypatch.undo()
    ca, server = make_certificates(tmp_path, [])
    assert "copy it to every machine" in ca
    assert server.startswith("server.pem")
    assert (tmp_path / "ca.pem").read_bytes() != (tmp_path / "old.pem").read_bytes()
    with serving(tmp_path) as port:
        for trusted in ("old.pem", "ca.pem"):
            assert expiry.days_left(expiry.served_until(f"localhost:{port}", tmp_path / trusted)) > 360
    assert expiry.remaining(str(tmp_path / "ca.pem"), tmp_path)[1] > 3600


def test_what_cannot_be_is_one_line(tmp_path, monkeypatch, capsys):
    make_certificates(tmp_path / "one", ["server.example"])
    make_certificates(tmp_path / "other", ["server.example"])
    (tmp_path / "one" / "ca.pem").write_bytes((tmp_path / "other" / "ca.pem").read_bytes())
    with pytest.raises(RunError, match=r"does not belong to ca\.key"):
        make_certificates(tmp_path / "one", [])
    with pytest.raises(RunError, match="say with --address"):
        make_certificates(tmp_path / "new", [], 1)
    with pytest.raises(RunError, match=r"not empty and has no ca\.key"):
        make_certificates(tmp_path, ["server.example"])
    with pytest.raises(RunError, match="neither a file nor HOST:PORT"):
        expiry.remaining("nothing", tmp_path)
    (tmp_path / "text").write_text("text")
    with pytest.raises(RunError, match="is not a certificate"):
        expiry.remaining(str(tmp_path / "text"), tmp_path)
    make_certificates(tmp_path / "third", ["server.example"])
    with serving(tmp_path / "other") as port, pytest.raises(RunError, match="shows no valid certificate"):
        expiry.served_until(f"127.0.0.1:{port}", tmp_path / "third" / "ca.pem")
    make_certificates(tmp_path / "short", ["server.example"], days=3)
    for folder, code in (("other", False), ("short", True)):
        monkeypatch.setattr(sys, "argv", ["certificates", "--check", str(tmp_path / folder / "server.pem")])
        with pytest.raises(SystemExit) as ended:
            certificates.main()
        assert bool(ended.value.code) is code
    assert "days left, until" in capsys.readouterr().out
