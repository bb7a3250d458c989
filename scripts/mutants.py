"""Mutation testing: put one deliberate mistake at a time into a copy of the sources and see whether tests notice.

    make mutants                        # all of them
    make mutants ONLY=priors            # those whose file or description matches a pattern

The mistakes are listed in tests/mutants/*.toml, by file under src/fedprior. Each entry says what it breaks, the old
text, the text to put in its place, and the tests that must notice. If a mistake has no observable effect, `equivalent`
says why; it is still run, and it is an error if a test notices it.

The tests first run without any mistake: a test that fails anyway would notice everything.
"""

import argparse
import compileall
import importlib.util
import multiprocessing
import os
import py_compile
import re
import shutil
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

ROOT = Path(__file__).parents[1]
LISTS = ROOT / "tests" / "mutants"
NOTICED, UNNOTICED, EQUIVALENT, STALE, SLOW = "noticed", "NOT noticed", "equivalent", "stale", "too slow"
WANTED = 0.95
PRELOADED = ("hypothesis.extra.numpy", "pytest", "rich.console", "safetensors.torch", "torch._dynamo", "typer")
"""Imported before any fork, because none of it knows fedprior. Optimisers pull in torch._dynamo."""
BROKEN = 70
"""The exit status if pytest itself failed, which does not count as a test that notices."""


@dataclass(frozen=True)
class Mistake:
    """One deliberate mistake."""

    file: str
    """The path under src/fedprior."""
    breaks: str
    old: str
    """The text to replace, which must occur exactly once."""
    new: str
    tests: tuple[str, ...]
    """Files or pytest node ids under tests/."""
    equivalent: str = ""
    """Why no test can notice, if none can."""

    def mutated(self, root: Path) -> str | None:
        """The file with the mistake in it, or None if the mistake no longer applies."""
        path = root / "src" / "fedprior" / self.file
        source = path.read_text(encoding="utf-8") if path.is_file() else ""
        return source.replace(self.old, self.new) if source.count(self.old) == 1 and self.new != self.old else None


def read_mistakes(folder: Path = LISTS) -> list[Mistake]:
    """Read all lists, in the order of their names."""
    return [
        Mistake(file, entry["breaks"], entry["old"], entry["new"], tuple(entry["tests"]), entry.get("equivalent", ""))
        for path in sorted(folder.glob("*.toml"))
        for file, entries in tomllib.loads(path.read_text(encoding="utf-8")).items()
        for entry in entries
    ]


@dataclass
class Task:
    """Some tests to run, with or without a mistake."""

    mistake: Mistake | None
    tests: tuple[str, ...]
    outcome: str = ""
    seconds: float = 0.0


class Copies:
    """Copies of the sources, one for each task that runs at the same time."""

    def __init__(self, folder: Path, count: int) -> None:
        first, *others = self.free = [folder / str(number) for number in range(count)]
        for name in ("src", "tests", "docs"):  # the tests take a prior from the documents
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, first / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        shutil.copy(ROOT / "pyproject.toml", first)
        # Two mistakes in a row may leave a file of the same length in the same second, so compiled files are matched
        # by the hash of their source.
        checked = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(first / "src", quiet=2, invalidation_mode=checked)
        for copy in others:
            shutil.copytree(first, copy)
        self.right: dict[Path, tuple[Path, bytes]] = {}
        """For each copy with a mistake, the file and its correct content."""

    def start(self, task: Task) -> tuple[BaseProcess, Path]:
        """Put the mistake in, and start its tests in a separate process."""
        copy = self.free.pop()
        if task.mistake is not None:
            path, changed = copy / "src" / "fedprior" / task.mistake.file, task.mistake.mutated(copy)
            assert changed is not None
            self.right[copy] = path, path.read_bytes()
            path.write_text(changed, encoding="utf-8")
        process = multiprocessing.get_context("fork").Process(target=_run_tests, args=(copy, task.tests))
        process.start()
        return process, copy

    def give_back(self, copy: Path) -> None:
        """Take the mistake out again."""
        if copy in self.right:
            path, source = self.right.pop(copy)
            path.write_bytes(source)
        for left in ("temporary", ".hypothesis"):
            shutil.rmtree(copy / left, ignore_errors=True)
        self.free.append(copy)


def _run_tests(copy: Path, tests: tuple[str, ...]) -> None:
    """Run pytest on a copy in this process, which then exits with pytest's status."""
    import pytest

    os.setsid()
    os.chdir(copy)
    output = os.open(copy / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.dont_write_bytecode = True
    sys.path[:0] = [str(copy / "src"), str(copy / "tests")]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(copy / "src"), str(copy / "tests")])
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    options = ["-x", "-q", "-n0", "-p", "no:cacheprovider", f"--basetemp={copy / 'temporary'}"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # for modules imported before the fork
    options.append("--hypothesis-seed=0")  # the same random examples every time, so that results do not vary
    try:
        status = int(pytest.main([*options, *(f"tests/{test}" for test in tests)]))
    except BaseException:
        traceback.print_exc()
        status = BROKEN
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run(tasks: Sequence[Task], jobs: int, limit: float) -> Iterator[Task]:
    """Run the tasks, `jobs` at a time, and yield each when it has ended."""
    with tempfile.TemporaryDirectory(prefix="fedprior-mutants-") as folder:
        copies = Copies(Path(folder), jobs)
        waiting, running = list(tasks), dict[BaseProcess, tuple[Task, Path, float]]()
        try:
            while waiting or running:
                while waiting and copies.free:
                    task = waiting.pop(0)
                    process, copy = copies.start(task)
                    running[process] = task, copy, time.monotonic()
                wait([process.sentinel for process in running], timeout=1)
                for process, (task, copy, began) in list(running.items()):
                    task.seconds = time.monotonic() - began
                    if process.is_alive() and task.seconds < limit:
                        continue
                    task.outcome = _outcome(process, task, copy)
                    copies.give_back(copy)
                    del running[process]
                    yield task
        finally:
            for process in running:
                _end(process)


def _outcome(process: BaseProcess, task: Task, copy: Path) -> str:
    if process.is_alive():
        _end(process)
        return SLOW
    process.join()
    if process.exitcode == 0:
        return EQUIVALENT if task.mistake is not None and task.mistake.equivalent else UNNOTICED
    if process.exitcode in (1, 2) and task.mistake is not None:  # a test failed, or could not even be imported
        return NOTICED
    said = (copy / "output.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"{STALE}: pytest ended with {process.exitcode}: {' | '.join(said[-3:])[:300]}"


def _end(process: BaseProcess) -> None:
    """End a process that we started, together with any that its tests started."""
    if process.pid is not None and process.is_alive():
        os.killpg(process.pid, 9)
    process.join()


def _baseline(mistakes: Sequence[Mistake]) -> list[Task]:
    """Every test that a mistake names, file by file, to run without any mistake."""
    named = sorted({test for mistake in mistakes for test in mistake.tests})
    files: dict[str, list[str]] = {}
    for test in named:
        files.setdefault(test.partition("::")[0], []).append(test)
    return [Task(None, (file,) if file in tests else tuple(tests)) for file, tests in files.items()]


def _interpreted() -> bool:
    """Whether kernels can run. Without a GPU they are interpreted, which Triton must know when it is imported."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    return importlib.util.find_spec("triton") is not None


def main() -> int:
    """Run the chosen mistakes and print a table; return 0 if at least 95% are noticed and none is stale."""
    parser = argparse.ArgumentParser(description="Put deliberate mistakes into the sources; see whether tests notice.")
    parser.add_argument("only", nargs="*", help="patterns of files or descriptions; all mistakes if none is given")
    parser.add_argument("--jobs", type=int, default=2, help="how many to run at the same time")
    parser.add_argument("--limit", type=float, default=300, help="the most seconds that one mistake's tests may take")
    parser.add_argument("--no-baseline", action="store_true", help="do not first run the tests without mistakes")
    given = parser.parse_args()
    every = read_mistakes()
    chosen = [m for m in every if all(re.search(p, f"{m.file}: {m.breaks}") for p in given.only)]
    stale = [m for m in chosen if m.mutated(ROOT) is None]
    for mistake in stale:
        print(f"{STALE:12} {mistake.file}: {mistake.breaks}: its old text does not occur exactly once")
    chosen = [m for m in chosen if m not in stale]
    if not _interpreted():
        print("Skipping the kernels: Triton is not installed.")
        chosen = [m for m in chosen if not m.file.startswith("kernels/")]
    # Import once: every task is a fork of this process.
    for name in PRELOADED:
        importlib.import_module(name)
    if not given.no_baseline:
        broken = [task for task in run(_baseline(chosen), given.jobs, given.limit * 2) if task.outcome != UNNOTICED]
        for task in broken:
            print(f"without any mistake {' '.join(task.tests)}: {task.outcome}")
        if broken:
            return 1
    outcomes = Counter({STALE: len(stale)})
    for task in run([Task(m, m.tests) for m in chosen], given.jobs, given.limit):
        assert task.mistake is not None
        outcomes[task.outcome.partition(":")[0]] += 1
        print(f"{task.outcome:12} {task.seconds:5.1f} s  {task.mistake.file}: {task.mistake.breaks}", flush=True)
    counted = sum(outcomes.values()) - outcomes[EQUIVALENT]
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common() if count))
    print(f"{outcomes[NOTICED] / max(counted, 1):.1%} of the {counted} that can be noticed were noticed")
    return int(bool(outcomes[STALE]) or outcomes[NOTICED] < WANTED * counted)


if __name__ == "__main__":
    raise SystemExit(main())
