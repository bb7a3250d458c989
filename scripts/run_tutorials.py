"""Run the notebooks in docs/tutorials and store what each cell prints, so that notebook viewers and the site show it.

python scripts/run_tutorials.py [NAME ...]
"""

import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

TUTORIALS = Path(__file__).parents[1] / "docs" / "tutorials"


def execute(notebook: dict[str, Any], namespace: dict[str, Any]) -> list[str]:
    """Run the code cells one after another in a namespace; return what each printed."""
    printed = []
    for number, cell in enumerate(one for one in notebook["cells"] if one["cell_type"] == "code"):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile("".join(cell["source"]), f"<cell {number}>", "exec"), namespace)
        printed.append(out.getvalue())
    return printed


def store(notebook: dict[str, Any], printed: list[str]) -> None:
    """Put the printed text below its cell."""
    cells = [one for one in notebook["cells"] if one["cell_type"] == "code"]
    for cell, text in zip(cells, printed, strict=True):
        stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
        cell["outputs"] = [stream] if text else []


def main(names: list[str]) -> None:
    """Run all notebooks, or those with the given names."""
    for path in sorted(TUTORIALS.glob("*.ipynb")):
        if names and path.stem not in names:
            continue
        notebook = json.loads(path.read_text(encoding="utf-8"))
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            store(notebook, execute(notebook, {"__name__": "tutorial"}))
            os.chdir(TUTORIALS)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(path.name)


if __name__ == "__main__":
    main(sys.argv[1:])
