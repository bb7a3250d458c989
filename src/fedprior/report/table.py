"""A table as plain data, and the one place that writes it: for a document, paper, program, terminal or notebook."""

import csv
import html
import io
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table as RichTable

from fedprior.core.files import write_atomically, writing

LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--"}
LATEX |= {letter: f"\\{letter}" for letter in "&%$#_{}"}


@dataclass(frozen=True)
class Table:
    """Rows of cells under a header: `words` columns of text, then numbers. Cells are text, or anything for a CSV."""

    header: Sequence[str]
    rows: Sequence[Sequence[Any]]
    title: str = ""
    caption: str = ""
    notes: Sequence[str] = ()
    """A note below the table, in documents only."""
    words: int = 1
    strong: Collection[int] = ()
    """The rows that a terminal shows in bold."""
    soft: Collection[str] = ()
    """The columns that a terminal shows dimmed."""

    def markdown(self) -> str:
        """Markdown, for a document."""
        rule = ["---"] * self.words + ["---:"] * (len(self.header) - self.words)
        cells = [[cell.replace("|", "\\|") for cell in row] for row in self.rows]
        lines = "\n".join(f"| {' | '.join(line)} |" for line in (self.header, rule, *cells))
        notes = "\n".join(f"- {note}" for note in self.notes)
        return "\n\n".join(part for part in (self.title, lines, self.caption, notes) if part) + "\n"

    def latex(self) -> str:
        """LaTeX, for a paper; needs the package booktabs."""
        form = "l" * self.words + "r" * (len(self.header) - self.words)
        header, *rows = (" & ".join(map(_latex_cell, row)) + r" \\" for row in (self.header, *self.rows))
        body = [r"\toprule", header, r"\midrule", *rows, r"\bottomrule"]
        comment = f"% {self.caption.replace('%', ' percent')}"
        return "\n".join([comment, rf"\begin{{tabular}}{{{form}}}", *body, r"\end{tabular}", ""])

    def csv(self) -> str:
        """CSV, for a program: unformatted numbers, and an empty cell where there is none."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.header)
        writer.writerows([["" if cell is None or cell != cell else cell for cell in row] for row in self.rows])
        return text.getvalue()

    def terminal(self, *, whole: bool = False, **looks: Any) -> RichTable:
        """A table for a terminal. `whole` keeps words from breaking across lines; `looks` go to rich."""
        left: dict[str, Any] = {"title_justify": "left", "caption_justify": "left", "box": box.SIMPLE_HEAD}
        made = RichTable(title=self.title or None, caption=self.caption or None, **{**left, **looks})
        for number, name in enumerate(self.header):
            word, style = number < self.words, "dim" if name in self.soft else None
            justify: Any = "left" if word else "right"
            made.add_column(name, justify=justify, style=style, no_wrap=whole and word, overflow="fold")
        for number, row in enumerate(self.rows):
            made.add_row(*row, style="bold" if number in self.strong else None)
        return made

    def text(self) -> str:
        """Plain text in columns, for an interpreter."""
        lines = [self.header, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
        )

    def html(self) -> str:
        """HTML, for a notebook."""
        header = "".join(f"<th>{html.escape(cell)}</th>" for cell in self.header)
        rows = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in self.rows)
        lines = "".join(f"<tr>{line}</tr>" for line in (header, *rows))
        return f"<table><caption>{html.escape(self.title)}</caption>{lines}</table>"


def write_tables(folder: Path, shown: Table, numbers: Table) -> list[Path]:
    """Write table.md and table.tex, and the numbers as table.csv."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    texts = {"table.md": shown.markdown(), "table.tex": shown.latex(), "table.csv": numbers.csv()}
    for name, text in texts.items():
        write_atomically(folder / name, text)
    return [folder / name for name in texts]


def _latex_cell(text: str) -> str:
    """A cell, escaped; the error of a mean is small and below it."""
    if both := re.fullmatch(r"([\d.]+) ± ([\d.]+)", text):
        return rf"${both[1]}_{{\pm {both[2]}}}$"
    return "".join(LATEX.get(letter, letter) for letter in text)
