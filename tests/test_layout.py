"""The folders of src: who may import whom, what stands at the root, and that nothing is written twice."""

import ast
from collections.abc import Iterator
from pathlib import Path

SRC = Path(__file__).parents[1] / "src"
ORDER = [
    *("core", "report", "units", "wire", "priors", "kernels", "corrections", "em", "engines", "catalogue", "runs"),
    *("trained", "flower", "fedprior_experiments", "cli"),
]
"""A folder imports itself and those before it. `version` stands below all of them, the package itself above."""
ROOT = ("__init__.py", "__main__.py", "version.py")
KERNELS = "fedprior.engines.devices"
"""The only module that imports `fedprior.kernels`, when it is given a GPU: they are registered from outside."""


def modules() -> dict[str, Path]:
    """Every module of src by its dotted name."""
    paths = {path.relative_to(SRC).with_suffix(""): path for path in SRC.rglob("*.py")}
    return {".".join(name.parts).removesuffix(".__init__"): path for name, path in paths.items()}


def imports(source: str) -> Iterator[str]:
    """What a source imports, at its top or inside functions, as dotted names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def folder(module: str) -> str:
    """The top-level folder of a dotted name; empty for the root of the package."""
    first, _, rest = module.partition(".")
    return first if first == "fedprior_experiments" else rest.partition(".")[0]


def upward(importer: str, source: str) -> list[str]:
    """What a module imports that stands above it."""
    place = {name: number for number, name in enumerate(["version", *ORDER])}
    ours = [name for name in imports(source) if name.partition(".")[0] in ("fedprior", "fedprior_experiments")]
    return [name for name in ours if place.get(folder(name), len(place)) > place[folder(importer)]]


def test_no_folder_imports_one_above_it():
    for name, path in modules().items():
        if folder(name) not in ("", "__main__"):
            assert upward(name, path.read_text(encoding="utf-8")) == [], name


def test_kernels_are_registered_from_outside():
    known = modules()
    sources = {name: path.read_text(encoding="utf-8") for name, path in known.items() if folder(name) != "kernels"}
    importers = {
        name for name, source in sources.items() if any(folder(found) == "kernels" for found in imports(source))
    }
    assert importers == {KERNELS}


def test_an_upward_import_is_noticed_anywhere_in_a_module():
    assert upward("fedprior.wire.codec", "def f():\n    from fedprior.em import estep") == ["fedprior.em.estep"]
    assert upward("fedprior.runs.start", "import fedprior_experiments.frontier") == ["fedprior_experiments.frontier"]
    assert upward("fedprior.core.keys", "from fedprior import run") == ["fedprior.run"]
    assert upward("fedprior.em.estep", "from fedprior import wire\nimport torch") == []


def test_no_module_imports_itself_through_others():
    known = modules()
    found = {name: _known(imports(path.read_text(encoding="utf-8")), known) for name, path in known.items()}
    del found["fedprior"]  # names its modules for type checkers; imports them when asked for
    while leaves := [name for name, names in found.items() if not names & found.keys() - {name}]:
        for name in leaves:
            del found[name]
    assert not found, f"a cycle among {sorted(found)}"


def _known(names: Iterator[str], known: dict[str, Path]) -> set[str]:
    """The modules among dotted names: a name's own, or that which has it."""
    return {name if name in known else name.rpartition(".")[0] for name in names} & known.keys()


def test_the_root_is_small_and_every_folder_is_in_the_order():
    root = SRC / "fedprior"
    assert sorted(path.name for path in root.glob("*.py")) == sorted(ROOT)
    folders = {path.parent.name for path in root.glob("*/__init__.py")}
    assert folders == {*ORDER} - {"fedprior_experiments"}


WINDOW = 10


def written_twice(sources: dict[str, str]) -> list[tuple[str, str]]:
    """Places with the same ten lines that say something."""
    seen: dict[tuple[str, ...], str] = {}
    found = []
    for name, source in sources.items():
        lines = ((number, " ".join(line.split())) for number, line in enumerate(source.splitlines(), 1))
        numbered = [(number, line) for number, line in lines if any(letter.isalnum() for letter in line)]
        for first in range(len(numbered) - WINDOW + 1):
            window, place = numbered[first : first + WINDOW], f"{name}:{numbered[first][0]}"
            other = seen.setdefault(tuple(line for _, line in window), place)
            if other != place:
                found.append((other, place))
    return found


def test_no_ten_lines_are_repeated():
    assert written_twice({name: path.read_text(encoding="utf-8") for name, path in modules().items()}) == []


def test_ten_repeated_lines_are_noticed_whatever_their_layout():
    body = [f"x{number} = work({number})" for number in range(WINDOW)]
    one = "import torch\n" + "\n".join(body)
    two = "def f(a,\n      b):\n    " + "\n\n    ".join(body)
    assert written_twice({"one": one, "two": two}) == [("one:2", "two:3")]
    assert written_twice({"one": one + "\n" + one}) == [("one:1", "one:12"), ("one:2", "one:13")]
    assert written_twice({"one": one, "two": two.replace("work(3)", "work(33)")}) == []
