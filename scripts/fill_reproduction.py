"""Put the measured tables, results/NAME/table.md, between the marks of docs/reproduction.md.

python scripts/fill_reproduction.py
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def fill(document: str, results: Path) -> str:
    """Insert every table that exists; leave the other places as they are."""

    def table(place: re.Match[str]) -> str:
        path = results / place[1] / "table.md"
        if not path.is_file():
            return place[0]
        return f"<!-- measured: {place[1]} -->\n{path.read_text(encoding='utf-8')}<!-- end -->"

    return re.sub(r"<!-- measured: ([\w-]+) -->\n.*?<!-- end -->", table, document, flags=re.DOTALL)


if __name__ == "__main__":
    path = ROOT / "docs" / "reproduction.md"
    path.write_text(fill(path.read_text(encoding="utf-8"), ROOT / "results"), encoding="utf-8")
