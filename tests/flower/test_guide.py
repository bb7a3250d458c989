"""The guide's commands, as they stand in docs/deployment.md, in a fresh home: three rounds over TLS."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'fedprior[flower]'")

from fedprior.flower.loopback import free_ports, groups_of

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="the guide is for a Unix shell"),
    pytest.mark.skipif(not (BIN / "flower-superlink").exists(), reason="flower's programs are not beside python"),
    pytest.mark.skipif(shutil.which("curl") is None, reason="the guide calls curl"),
    pytest.mark.skipif("FEDPRIOR_GUIDE" not in os.environ, reason="minutes on a busy machine: `make deploy` runs it"),
]


def guide() -> str:
    """Every command of the section, in order."""
    text = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"^## On one machine.*?\n(.*?)^## ", text, re.DOTALL | re.MULTILINE)
    blocks = re.findall(r"^( *)```sh\n(.*?)^\1```", section, re.DOTALL | re.MULTILINE)
    return "\n".join(textwrap.dedent(block) for _, block in blocks)


def test_the_guides_commands_train_three_rounds(tmp_path):
    commands, (port,) = guide(), free_ports(1)
    # Another process of this machine may have the guide's port: the test takes a free one in its place.
    assert "--port 8000" in commands
    commands = commands.replace("8000", str(port))
    # With -e the first command that fails ends the script; wait, so that no process outlives it.
    script = f"set -e\n{commands}\nwait || true\n"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")}
    environment |= {"HOME": str(tmp_path), "PATH": f"{BIN}:{environment['PATH']}", "OMP_NUM_THREADS": "1"}
    environment |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    with (tmp_path / "out.txt").open("w") as out:
        process = subprocess.Popen(
            ["bash", "-c", script], cwd=ROOT, env=environment, stdout=out, stderr=out, start_new_session=True
        )
        try:
            code = process.wait(timeout=1200)
        finally:
            for group in groups_of(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
    said = (tmp_path / "out.txt").read_text()
    assert code == 0, said
    run = tmp_path / "federation" / "first"
    records = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    assert [sorted(record["clients"]) for record in records] == [[0, 1, 2]] * 3
    assert not any("faults" in record for record in records)
    assert json.loads((run / "summary.json").read_text())["rounds"] == 3
