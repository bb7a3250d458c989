"""What the benchmarks report."""

import json
import multiprocessing
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="memory is read where Linux keeps it")
def test_an_instant_round_has_a_memory_measurement(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    peers = __import__("peers")
    try:
        mine, theirs = multiprocessing.Pipe()
        theirs.send({"seconds": 1e-3, "cpu_seconds": 1e-3})  # the answer is there before the question
        contestant = peers.Contestant("quick", SimpleNamespace(pid=os.getpid()), mine)
        contestant.turn(timed=True, watched=True)
        assert contestant.result()["host_mib"] > 20  # an interpreter with torch has many times that
    finally:
        for name in [name for name in sys.modules if name == "peers" or name.split(".")[0] == "contestants"]:
            del sys.modules[name]


def test_the_page_has_the_recorded_growth(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    growth = __import__("growth")
    page = (BENCHMARKS.parent / "docs" / "performance.md").read_text(encoding="utf-8")
    record = json.loads((BENCHMARKS.parent / "results" / "growth" / "cpu.json").read_text(encoding="utf-8"))
    assert record["axes"].keys() == growth.AXES.keys()
    for axis, found in record["axes"].items():
        assert growth.table(axis, found) in page, axis
