"""Run the tests in all the ways in which machines differ, one after another, and print a table.

    make test-everywhere
    python scripts/test_everywhere.py --ways default,avx2 tests/priors tests/wire

Threads change the order of sums, the processor's instructions change their rounding, oneDNN changes which kernels
convolve, and a busy machine is slower. A test that passes in only some of these ways was lucky there.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
WAYS = {
    "1 thread": {"OMP_NUM_THREADS": "1"},
    "2 threads": {"OMP_NUM_THREADS": "2"},
    "4 threads": {"OMP_NUM_THREADS": "4"},
    "default": {"ATEN_CPU_CAPABILITY": "default"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "no oneDNN": {"FEDPRIOR_TEST_ONEDNN": "0"},
    "busy": {},
}
"""What each way sets; `default` is torch without the processor's wide instructions."""


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep this many processes spinning inside this block."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run(way: str, arguments: list[str], log: Path) -> tuple[int, str, list[str]]:
    """Run pytest; return its exit status, its last line, and the tests that failed."""
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", "-rfE", "--tb=short", *arguments]
    environment = {key: value for key, value in os.environ.items() if key not in {k for w in WAYS.values() for k in w}}
    with busy(2 if way == "busy" else 0), log.open("w", encoding="utf-8") as file:
        done = subprocess.run(command, cwd=ROOT, env=environment | WAYS[way], stdout=file, stderr=subprocess.STDOUT)
    text = log.read_text(encoding="utf-8", errors="replace")
    totals = re.findall(r"^=*\s*((?:\d+ (?:passed|failed|skipped|errors?)[, ]*)+.*?)=*$", text, re.MULTILINE)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    return done.returncode, totals[-1].strip() if totals else "no tests were run", failed


def main() -> int:
    """Run the command; return 0 if every way passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", default=",".join(WAYS), help=f"some of {', '.join(WAYS)}; all if not given")
    parser.add_argument("--logs", type=Path, default=ROOT / "runs" / "test-everywhere", help="where outputs are kept")
    given, arguments = parser.parse_known_args()
    ways = given.ways.split(",")
    if unknown := [way for way in ways if way not in WAYS]:
        parser.error(f"unknown way {unknown[0]!r}; choose from {', '.join(WAYS)}")
    given.logs.mkdir(parents=True, exist_ok=True)
    statuses = []
    print(f"{'way':<12}{'minutes':>9}  outcome", flush=True)
    for way in ways:
        began = time.monotonic()
        status, totals, failed = run(way, arguments or ["src", "tests"], given.logs / f"{way.replace(' ', '-')}.log")
        statuses.append(status)
        print(f"{way:<12}{(time.monotonic() - began) / 60:>9.1f}  {totals if status in (0, 1) else f'status {status}'}")
        for test in failed:
            print(f"{'':<23}{test}")
        sys.stdout.flush()
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(main())
