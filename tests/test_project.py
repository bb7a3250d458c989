"""What a stranger meets first: metadata, citation and files that other tools read."""

import tomllib
from pathlib import Path

import pytest

import fedprior

ROOT = Path(__file__).parents[1]


def test_the_citation_names_this_version_and_the_paper() -> None:
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == fedprior.__version__
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    (paper,) = citation["references"]
    assert [author["family-names"] for author in paper["authors"]] == ["Louizos", "Reisser", "Soriaga", "Welling"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert citation["license"] == project["license"]
    assert paper["url"] == project["urls"]["Paper"]


def test_type_checkers_may_use_the_annotations() -> None:
    assert (Path(fedprior.__file__).parent / "py.typed").is_file()


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.md")), ids=lambda p: p.stem)
def test_issue_templates_have_the_header_that_hosts_read(path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    header = path.read_text(encoding="utf-8").split("---\n")[1]
    assert {"name", "about"} <= yaml.safe_load(header).keys()


def test_the_readme_is_short_and_its_first_screen_has_a_picture_a_table_and_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) < 1200
    first = text.split("\n## ")[0]
    assert len(first.split()) < 450
    assert [line.split()[1] for line in first.splitlines() if line.startswith("    make ")] == ["run", "test"]
    assert first.count("![") == 1
    assert first.count("| --- |") == 1
