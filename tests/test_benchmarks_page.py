"""docs/benchmarks.md shows every record under results/, as it is."""

import runpy
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
INDEX = tomllib.loads((RESULTS / "index.toml").read_text(encoding="utf-8"))


def test_the_page_is_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "fill_benchmarks.py"))
    shown = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert script["page"](RESULTS) == shown, "run python scripts/fill_benchmarks.py"


def test_every_record_is_indexed_exactly_once() -> None:
    folders = [entry["folder"] for entry in INDEX["runs"]]
    for config in RESULTS.rglob("config.toml"):
        path = config.relative_to(RESULTS).as_posix()
        assert sum(path.startswith(f"{folder}/") for folder in folders) == 1, f"{path}: add it to results/index.toml"
    timed = sorted(path.name for path in (RESULTS / "performance").glob("*.json"))
    assert timed == sorted(entry["file"] for entry in INDEX["timings"])
