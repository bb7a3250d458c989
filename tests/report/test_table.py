"""A table is data, and every form of it says the same; what has a meaning in a form is escaped there."""

import csv
import io
import math
import re

from rich.console import Console

from fedprior.report import Table, read_run
from fedprior.runs.folder import RunFolder

TABLE = Table(
    ["method", "global %", "GiB"],
    [["FedNarrow, 47%", "88.3 ± 0.2", "0.138"], ["a|b_c", "–", "2 ± ?"]],
    "title",
    "Means of 5% of rounds.",
    ["a note"],
)


def test_markdown_has_title_cells_caption_and_notes():
    assert TABLE.markdown() == (
        "title\n\n| method | global % | GiB |\n| --- | ---: | ---: |\n"
        "| FedNarrow, 47% | 88.3 ± 0.2 | 0.138 |\n| a\\|b_c | – | 2 ± ? |\n\nMeans of 5% of rounds.\n\n- a note\n"
    )


def test_latex_is_escaped_and_has_errors_as_subscripts():
    lines = TABLE.latex().splitlines()
    assert lines[:4] == [
        "% Means of 5 percent of rounds.",
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r"method & global \% & GiB \\",
    ]
    assert lines[5:7] == [r"FedNarrow, 47\% & $88.3_{\pm 0.2}$ & 0.138 \\", r"a|b\_c & -- & 2 ± ? \\"]
    assert not [line for line in lines[1:] if re.search(r"(?<!\\)%", line)], "the rest of a row would be a comment"


def test_csv_has_full_numbers_and_empty_cells():
    text = Table(["label", "a", "b", "c"], [["x, y", 0.1 + 0.2, None, math.nan]]).csv()
    assert list(csv.reader(io.StringIO(text))) == [["label", "a", "b", "c"], ["x, y", "0.30000000000000004", "", ""]]


def test_a_terminal_and_a_notebook_show_every_cell():
    console = Console(file=io.StringIO(), width=80)
    console.print(TABLE.terminal())
    shown = [console.file.getvalue(), TABLE.text(), TABLE.html()]
    assert all(cell in text for text in shown for row in TABLE.rows for cell in row)
    assert "<td>&lt;b&gt;</td>" in Table(["x"], [["<b>"]]).html()


def test_all_readers_of_a_run_read_the_same(write_run, tmp_path):
    """Also one of the time when `wire` said how messages are made."""
    path = write_run(tmp_path / "run", rounds=3, every=1)
    text = (path / "config.toml").read_text()
    (path / "config.toml").write_text(text.replace("[run]\n", '[run]\nwire = "encode"\n'))
    folder, run = RunFolder(path), read_run(path)
    assert (run.config, run.rounds, run.summary) == (folder.read_config(), folder.records(), folder.read_summary())
    assert (run.config["run"]["wire"], run.config["run"]["messages"]) == ("float32", "encode")
