"""The site builds without a warning, its links lead somewhere, and it asks no other host for anything."""

import os
import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

import fedprior

ROOT = Path(__file__).parents[1]
for name in ("mkdocs", "material", "mkdocstrings_handlers.python"):
    pytest.importorskip(name, reason="the site needs the extra docs: pip install '.[docs]'")


class Page(HTMLParser):
    """What a page links to, and what it loads by itself."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]))
        elif tag in ("script", "img", "iframe") and found.get("src"):
            self.loads.append(str(found["src"]))
        elif tag == "link" and found.get("href"):
            self.loads.append(str(found["href"]))


def build(out: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_site_builds_strictly_and_is_complete(tmp_path: Path) -> None:
    """One test, because tests of one file may run in two processes, and each would build the site."""
    build(tmp_path)
    every_link_leads_somewhere_and_nothing_comes_from_elsewhere(tmp_path)
    the_reference_has_every_public_name(tmp_path)


def every_link_leads_somewhere_and_nothing_comes_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    for path in pages:
        page = Page(path)
        assert not [load for load in page.loads if "//" in load], path
        for target in page.links + page.loads:
            if re.match(r"[a-z]+:|#|data:", target) or path.name == "404.html":
                continue
            assert (path.parent / unquote(target.split("#")[0].split("?")[0])).exists(), f"{path.name}: {target}"


def the_reference_has_every_public_name(site: Path) -> None:
    text = (site / "api.html").read_text(encoding="utf-8")
    for name in fedprior.__all__:
        if name != "__version__":
            assert re.search(rf'id="fedprior\.(\w+\.)*{name}"', text), name


def test_the_gallery_has_every_picture_of_the_records() -> None:
    text = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    for picture in sorted((ROOT / "results").rglob("*.png")):
        assert f"(../{picture.relative_to(ROOT).as_posix()})" in text


def test_links_of_the_repository_become_links_of_the_site() -> None:
    pages = runpy.run_path(str(ROOT / "scripts" / "site_pages.py"))
    relink = pages["relink"]
    assert relink("README.md", "[a](docs/runs.md#settings)") == "[a](runs.md#settings)"
    assert relink("docs/runs.md", "[a](../README.md), ![b](../results/frontier/frontier.png)") == (
        "[a](index.md), ![b](repository/results/frontier/frontier.png)"
    )
    assert (
        relink("docs/tutorials/compare.ipynb", "[a](../runs.md) [b](compare.ipynb)")
        == "[a](../runs.md) [b](compare.md)"
    )
    # What is not there stays as it is, for the strict build to refuse.
    assert relink("docs/runs.md", "[a](../src/nowhere.py)") == "[a](../src/nowhere.py)"
