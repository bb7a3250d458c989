"""docker/: its files agree with the guide, the programs and each other; where an engine answers, they train."""

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'fedprior[flower]'")
pytest.importorskip("yaml", reason="needs the extra docs: pip install 'fedprior[docs]'")

import yaml

from fedprior.flower import device
from fedprior.flower.certificates import _parser, make_certificates
from fedprior.flower.loopback import free_ports, program

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, Any] = COMPOSE["services"]
DEVICES = [name for name in SERVICES if name.startswith("device-")]
GUIDE = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
SECRETS = "/etc/fedprior/"


def stages() -> dict[str, list[tuple[str, str]]]:
    """Each stage's instructions in order, those of its base first."""
    text = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    found: dict[str, list[tuple[str, str]]] = {}
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        word, rest = line.split(maxsplit=1)
        if word == "FROM":
            base, _, name = rest.split()
            found[name] = [*found.get(base, [])]
        found[name].append((word, rest))
    return found


def started(service: str) -> list[str]:
    """The words of the process that a service runs."""
    target = SERVICES[service]["image"].removeprefix("fedprior-")
    (entry,) = [rest for word, rest in stages()[target] if word == "ENTRYPOINT"]
    return [*json.loads(entry), *SERVICES[service].get("command", [])]


def value(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


def mounts(service: str) -> dict[str, str]:
    """What is mounted where."""
    return {target: source for source, target, *_ in (one.split(":") for one in SERVICES[service]["volumes"])}


def nginx(text: str) -> list[str]:
    """The lines of a file for nginx without comments."""
    return [line for line in (" ".join(line.split("#")[0].split()) for line in text.splitlines()) if line]


def commands() -> str:
    """The commands of the section, as they are typed."""
    (section,) = re.findall(r"^## In containers\n(.*?)^## ", GUIDE, re.DOTALL | re.MULTILINE)
    (block,) = re.findall(r"^```sh\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    return str(block)


@pytest.mark.parametrize("program_name", ["flower-superlink", "flower-supernode"])
def test_the_programs_have_every_option(program_name):
    says = subprocess.run([program(program_name), "--help"], capture_output=True, text=True, check=True).stdout
    for service in ["server"] if program_name == "flower-superlink" else DEVICES:
        given = [word for word in started(service) if word.startswith("--")]
        assert given
        assert {option for option in given if not re.search(rf"{option}\b", says)} == set()
        assert service == "server" or not {*given} & {*device.OWN}
    assert started("server")[0] == "flower-superlink"
    assert started("device-0")[:3] == ["python", "-m", device.__name__]


def test_each_process_finds_its_files_and_no_other_secret(tmp_path):
    shell = SERVICES["certificates"]["command"][0]
    words = shlex.split(shell.split(";")[0])
    assert words[:3] == ["python", "-m", "fedprior.flower.certificates"]
    given = _parser().parse_args(words[3:])
    assert mounts("certificates") == {str(given.out): "./certificates"}
    make_certificates(tmp_path / "certificates", given.address, given.nodes)
    for service in ["server", "proxy", *DEVICES]:
        for target, source in mounts(service).items():
            here = tmp_path if source.startswith("./certificates/") else DOCKER
            assert (here / source).is_file() if source.startswith("./") else source in COMPOSE["volumes"], target
        wanted = {word for word in started(service) if word.startswith(SECRETS)} if service != "proxy" else set()
        assert wanted <= mounts(service).keys()
    private = {path.name for path in (tmp_path / "certificates").iterdir() if path.stat().st_mode & 0o077 == 0}
    assert {"ca.key", "server.key", "node-0", "node-1", "node-2"} == private
    seen = {name: private & {Path(source).name for source in mounts(name).values()} for name in SERVICES}
    assert seen.pop("certificates") == seen["server"] - {"server.key"} == set()
    assert seen == {
        "server": {"server.key"},
        "proxy": {"server.key"},
        **{name: {f"node-{name[-1]}"} for name in DEVICES},
    }
    assert [value(started(name), "--node-config") for name in DEVICES] == [
        f"partition-id={n}" for n in range(given.nodes)
    ]


def test_addresses_and_ports_are_one():
    (address,) = _parser().parse_args(shlex.split(SERVICES["certificates"]["command"][0].split(";")[0])[3:]).address
    config = " ".join(nginx((DOCKER / "nginx.conf").read_text(encoding="utf-8")))
    (listens,), (passed,) = re.findall(r"listen (\d+) ssl;", config), re.findall(r"proxy_pass https://(\S+);", config)
    port = value(started("server"), "--port")
    assert passed == f"server:{port}"
    assert value(started("server"), "--host") == "0.0.0.0"
    assert {value(started(name), "--superlink") for name in DEVICES} == {f"{address}:{listens}"}
    assert SERVICES["proxy"]["networks"]["outside"]["aliases"] == [address]
    assert SERVICES["proxy"]["ports"][0].endswith(f":{listens}")
    (health,) = [rest for word, rest in stages()["server"] if word == "HEALTHCHECK"]
    assert f"https://127.0.0.1:{port}/health" in health
    assert f'address = "127.0.0.1:{port}"' in (DOCKER / "flwr.toml").read_text(encoding="utf-8")
    metrics = re.findall(r'metrics="0\.0\.0\.0:(\d+)"', commands())
    assert [one.rsplit(":", 1)[1] for one in SERVICES["server"]["ports"]] == metrics
    assert all(one.startswith("127.0.0.1:") for one in SERVICES["server"]["ports"])


def test_the_proxy_is_the_guides():
    (block,) = re.findall(r"^        server \{\n.*?^        \}\n", GUIDE, re.DOTALL | re.MULTILINE)
    there = "\n".join(nginx(block)).replace("listen 443 ", "listen 8443 ").replace("127.0.0.1:8000", "server:8000")
    assert nginx((DOCKER / "nginx.conf").read_text(encoding="utf-8")) == there.splitlines()


def test_devices_reach_the_proxy_only_and_nobody_is_root():
    for name in DEVICES:
        assert not {*SERVICES[name]["networks"]} & {*SERVICES["server"]["networks"]}
        assert {*SERVICES[name]["networks"]} <= {*SERVICES["proxy"]["networks"]} <= {*COMPOSE["networks"]}
        assert "ports" not in SERVICES[name]
    for name, service in SERVICES.items():
        assert ("user" in service) == (name in ("certificates", "proxy"))
        assert name == "certificates" or service["cap_drop"] == ["ALL"]
    assert SERVICES["proxy"]["user"] == "1000"
    assert SERVICES["certificates"]["network_mode"] == "none"
    for target in ("server", "device"):
        assert [rest for word, rest in stages()[target] if word == "USER"] == ["fedprior"]


def test_what_is_copied_exists_and_is_not_ignored():
    kept = [line[1:] for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [rest.split() for name in ("server", "device") for word, rest in stages()[name] if word == "COPY"]
    sources = {source for words in copied for source in words[:-1] if not source.startswith("--")}
    assert sources == {*kept}
    assert all((ROOT / source).exists() for source in sources)
    # No key lies in what is sent to the engine.
    assert not [path for source in kept for path in (ROOT / source).rglob("*") if fnmatch.fnmatch(path.name, "*.key")]


def test_the_images_do_what_the_guide_says_about_flower():
    (exports,) = re.findall(r"^    export (FLWR_TELEMETRY.*)$", GUIDE, re.MULTILINE)
    for target in ("server", "device"):
        said = " ".join(rest for word, rest in stages()[target] if word == "ENV")
        assert {*exports.split()} <= {*said.split()}


def test_the_commands_name_what_is_there():
    typed = commands()
    named = re.findall(r"docker compose (?:run --rm|exec -T|up --detach --wait|cp) ([a-z]+)", typed)
    assert named == ["certificates", "proxy", "server", "server", "server"]
    assert {*named} <= {*SERVICES}
    registered = re.findall(r"register (\S+)\$n\.pub", typed)
    assert [f"{registered[0]}{n}.pub" in mounts("server") for n in range(3)] == [True] * 3
    (copied,) = [rest.split() for word, rest in stages()["server"] if word == "COPY" and "flower-app" in rest]
    assert f"flwr run {copied[-1]} " in typed


def _engine() -> bool:
    if shutil.which("docker") is None:
        return False
    # Compose is a plugin, and the client is of no use without a daemon that answers.
    asked = (["docker", "compose", "version"], ["docker", "info"])
    return all(subprocess.run(words, capture_output=True, check=False).returncode == 0 for words in asked)


@pytest.mark.skipif("FEDPRIOR_GUIDE" not in os.environ, reason="minutes, and a package index: `make deploy` runs it")
@pytest.mark.skipif(sys.platform == "win32", reason="the guide is for a Unix shell")
def test_the_commands_train_three_rounds(tmp_path):
    if not _engine():
        pytest.skip("no container engine answers here")
    for name in ("docker", "src", "examples", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    port, metrics = free_ports(2)
    own = {"COMPOSE_PROJECT_NAME": f"fedprior-test-{os.getpid()}"}
    own |= {"FEDPRIOR_PORT": str(port), "FEDPRIOR_METRICS_PORT": str(metrics)}
    shell = {"cwd": tmp_path, "env": {**os.environ, **own}, "capture_output": True, "text": True}
    # The files of the certificates' container are root's: they would be left behind.
    clear = "cd docker; docker compose run --rm --entrypoint rm certificates -r /certificates -f"
    try:
        done = subprocess.run(["bash", "-ec", commands()], timeout=3000, check=False, **shell)
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        subprocess.run(["bash", "-c", f"{clear}; docker compose down --volumes"], timeout=600, check=False, **shell)
    lines = (tmp_path / "docker" / "first" / "rounds.jsonl").read_text().splitlines()
    assert [sorted(json.loads(line)["clients"]) for line in lines] == [[0, 1, 2]] * 3
