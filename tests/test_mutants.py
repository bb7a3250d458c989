"""The list of deliberate mistakes still fits the sources; `make mutants` puts them in and sees whether tests notice."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def tool():
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "scripts" / "mutants.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


MISTAKES = tool().read_mistakes() if (ROOT / "scripts").is_dir() else []


def test_every_mistake_fits_the_sources_and_is_valid_python():
    for mistake in MISTAKES:
        changed = mistake.mutated(ROOT)
        assert changed is not None, f"{mistake.file}: {mistake.breaks}: its old text is not there exactly once"
        compile(changed, mistake.file, "exec")


def test_every_named_test_exists():
    for mistake in MISTAKES:
        assert mistake.tests, mistake.breaks
        for test in mistake.tests:
            file, _, name = test.partition("::")
            text = (ROOT / "tests" / file).read_text(encoding="utf-8")
            function = name.partition("[")[0]
            assert not name or re.search(rf"^def {function}\(", text, re.MULTILINE), test


def test_no_mistake_is_listed_twice_and_few_are_excused():
    assert len({(m.file, m.old, m.new) for m in MISTAKES}) == len(MISTAKES)
    assert len({(m.file, m.breaks) for m in MISTAKES}) == len(MISTAKES)
    assert sum(bool(m.equivalent) for m in MISTAKES) <= 0.05 * len(MISTAKES)


def test_a_mistake_that_does_not_apply_is_stale(tmp_path):
    mutants = tool()
    (tmp_path / "src" / "fedprior").mkdir(parents=True)
    (tmp_path / "src" / "fedprior" / "a.py").write_text("x = 1\ny = 1\n")

    def mistake(old, new, file="a.py"):
        return mutants.Mistake(file, "", old, new, ()).mutated(tmp_path)

    assert mistake("x = 1", "x = 2") == "x = 2\ny = 1\n"
    assert mistake("= 1", "= 2") is None, "twice"
    assert mistake("z", "x") is None, "never"
    assert mistake("x = 1", "x = 1") is None, "no mistake"
    assert mistake("x", "y", "b.py") is None, "no file"


def test_caught_and_missed_mistakes_are_told_apart(tmp_path):
    """The tool on a repository of its own: one mistake that a test notices, one that none does, one without tests."""
    mutants = tool()
    package, tests = tmp_path / "src" / "fedprior", tmp_path / "tests"
    package.mkdir(parents=True)
    tests.mkdir()
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (package / "__init__.py").write_text("")
    (package / "twice.py").write_text("def twice(x):\n    return 2 * x\n")
    (tests / "test_twice.py").write_text(
        "from fedprior.twice import twice\n\n\ndef test_twice():\n    assert twice(2) == 4\n"
    )
    cases = [("3 * x", "test_twice.py"), ("x + x", "test_twice.py"), ("x * x", "test_twice.py"), ("3 * x", "none.py")]
    # In a process of its own that has not imported fedprior yet: every task is a fork of it.
    program = tmp_path / "program.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r})\nimport pathlib, mutants\n"
        f"mutants.ROOT = pathlib.Path({str(tmp_path)!r})\n"
        f"tasks = [mutants.Task(mutants.Mistake('twice.py', n, '2 * x', n, (t,)), (t,)) for n, t in {cases!r}]\n"
        "done = {(t.mistake.new, t.tests): t.outcome for t in mutants.run(tasks, 2, 120)}\n"
        "print([done[t.mistake.new, t.tests].partition(':')[0] for t in tasks])\n"
    )
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == str([mutants.NOTICED, mutants.UNNOTICED, mutants.UNNOTICED, mutants.STALE])
