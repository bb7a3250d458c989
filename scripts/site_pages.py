"""Add to the site what is not in docs/*.md. This is a MkDocs hook (mkdocs.yml); do not call it by hand.

Documents link to other files of the repository: a source file, a picture in results/, a notebook. On the site each such
target becomes a page or a copied picture, so that every link works there too. A link to something that does not exist
stays as it is, and the strict build refuses it.
"""

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
"""Documents outside docs/ that become pages."""
PICTURES = {".png", ".svg", ".jpg"}
LINK = re.compile(r"\]\((?![a-z]+:|#|/)([^)\s#]+)(#[^)\s]*)?\)")
HIDDEN = "---\nsearch:\n  exclude: true\n---\n"


def address(path: str) -> str:
    """The place on the site of a file or folder of the repository."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return re.sub(r"\.ipynb$", ".md", path.removeprefix("docs/"))
    return f"repository/{path}" if Path(path).suffix in PICTURES else f"repository/{path}.md"


def origin(page: str) -> str:
    """The file of the repository that a page of the site shows."""
    shown = {to: path for path, to in PAGES.items()}.get(page, f"docs/{page}")
    notebook = re.sub(r"\.md$", ".ipynb", shown)
    return notebook if (ROOT / notebook).is_file() else shown


def targets(path: str, text: str) -> set[str]:
    """The existing files of the repository that a document links to."""
    found = (posixpath.normpath(posixpath.join(posixpath.dirname(path), link[1])) for link in LINK.finditer(text))
    return {target for target in found if not target.startswith("..") and (ROOT / target).exists()}


def relink(path: str, text: str) -> str:
    """Rewrite a document's links for the site."""
    here, folder = posixpath.dirname(address(path)), posixpath.dirname(path)

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[1]))
        if not targets(path, match[0]):
            return match[0]
        return f"]({posixpath.relpath(address(target), here or '.')}{match[2] or ''})"

    return LINK.sub(link, text)


def notebook(path: Path) -> str:
    """Convert a notebook to Markdown, including its stored output."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        output = "".join(line for one in cell["outputs"] for line in one.get("text", [])).rstrip()
        if output:
            parts.append(f"```text\n{output}\n```")
    return "\n\n".join([*parts, f"[Download this notebook](FILE:{path.name})"]) + "\n"


def shown(path: str) -> str:
    """Show a file of the repository, or a list of a folder's contents, as a page."""
    place = ROOT / path
    if place.is_dir():
        names = sorted(f"{one.name}/" if one.is_dir() else one.name for one in place.iterdir())
        lines = [f"- `{name}`" for name in names if not name.startswith(("__pycache__", "."))]
        return "\n".join([f"{HIDDEN}# {path}/", "", *lines, ""])
    text = place.read_text(encoding="utf-8")
    if place.suffix == ".md":
        return relink(path, text)
    language = {".py": "python", ".toml": "toml", ".json": "json"}.get(place.suffix, "text")
    return f"{HIDDEN}# {path}\n\n````{language}\n{text}````\n"


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and pictures that are not in docs/."""
    documents = {path: (ROOT / path).read_text(encoding="utf-8") for path in PAGES}
    for file in list(files.documentation_pages()):
        documents[f"docs/{file.src_uri}"] = file.content_string
    for path in sorted((ROOT / "docs").rglob("*.ipynb")):
        documents[path.relative_to(ROOT).as_posix()] = notebook(path)
    wanted = set(documents)
    for path, text in documents.items():
        wanted |= targets(path, text)
    for path in list(wanted):  # a README of another folder is a page with links of its own
        if path.endswith(".md") and path not in documents:
            wanted |= targets(path, (ROOT / path).read_text(encoding="utf-8"))
    for path in sorted(wanted):
        uri = address(path)
        if files.get_file_from_path(uri) is not None:
            continue
        if Path(path).suffix in PICTURES:
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
        else:
            files.append(File.generated(config, uri, content=documents.get(path) or shown(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links at the site."""
    uri = page.file.src_uri
    if uri.startswith("repository/"):
        return markdown
    return relink(origin(uri), markdown).replace("](FILE:", "](")
