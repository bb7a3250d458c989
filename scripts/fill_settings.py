"""Write the tables of a run's settings in docs/runs.md from the settings themselves (`core/settings.py`).

python scripts/fill_settings.py
"""

import re
from pathlib import Path

from fedprior.core.options import Option, as_text
from fedprior.core.settings import RUN_OPTIONS

PAGE = Path(__file__).parents[1] / "docs" / "runs.md"


def row(option: Option) -> str:
    """Format one line of a table."""
    what = option.about.what + (" (simulator only)" if option.about.simulated and not option.about.machine else "")
    return f"| `{option.name}` | {as_text(option.default)} | {what} |"


def tables() -> dict[str, str]:
    """The tables by the name of their place in the page: settings of the run, and of the machine."""
    head = ["| setting | default | what |", "| --- | --- | --- |"]
    kinds = {"run": False, "machine": True}
    return {
        kind: "\n".join([*head, *(row(one) for one in RUN_OPTIONS.values() if one.about.machine is machine)])
        for kind, machine in kinds.items()
    }


def filled(page: str) -> str:
    """Put the current tables into the page."""
    for kind, table in tables().items():
        start, end = f"<!-- settings of the {kind} -->\n\n", "\n\n<!-- end -->"
        page = re.sub(f"{re.escape(start)}.*?{end}", lambda _, new=start + table + end: new, page, flags=re.DOTALL)
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
