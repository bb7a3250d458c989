"""The page in a real browser: it renders, is silent, asks for nothing, fits, and says what the records say."""

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

import fedprior
from fedprior.core.errors import RunError
from fedprior.report import find_runs, read_run
from fedprior.report.page import page
from fedprior.report.run_tables import numbers_of_runs, table_of_runs
from fedprior.report.write import gather, write_report

# Measures the page after it is drawn and leaves the result in it.
PROBE = """<script>
const meet = (r, s) => r.left < s.right - 1 && s.left < r.right - 1 && r.top < s.bottom - 2 && s.top < r.bottom - 2;
const pairs = (parts) => {
  const frames = [...parts].map((b) => [b.tagName + " " + b.textContent.slice(0, 30), b.getBoundingClientRect()]);
  return frames.flatMap(([a, r], i) => frames.slice(i + 1).filter(([, s]) => meet(r, s)).map(([b]) => [a, b]));
};
const boxes = [...document.querySelectorAll("h1, h2, p.soft, figure, .scroll, .bar, pre")];
const found = {
  width: innerWidth, wide: document.documentElement.scrollWidth,
  overlaps: pairs(boxes.filter((box) => box.offsetParent)),
  texts: [...document.querySelectorAll("svg")].flatMap((svg) => pairs(svg.querySelectorAll("text"))),
  requests: performance.getEntriesByType("resource").map((entry) => entry.name),
  charts: Object.fromEntries([...document.querySelectorAll("figure")].map((figure) =>
    [figure.dataset.chart, [...figure.querySelectorAll("path[data-series]")].map((path) => path.dataset.series)])),
};
const first = document.querySelector("figure"), chip = document.querySelector(".chip");
const drawn = () => [...first.querySelectorAll("path[data-series]")].map((path) => path.dataset.series);
chip.click();
found.without = drawn();
chip.click();
found.again = drawn();
first.querySelector(".tool").click();
found.log = first.querySelector("svg").textContent;
const frame = first.querySelector("svg").getBoundingClientRect();
const at = { clientX: frame.right - 15, clientY: frame.top + 50, bubbles: true };
first.querySelector("svg").dispatchEvent(new PointerEvent("pointermove", at));
found.tip = first.querySelector(".tip").hidden ? "" : first.querySelector(".tip").innerText;
const single = [...document.querySelectorAll("#bar .tool")].find((tool) => tool.textContent === "single runs");
if (single) single.click();
found.singles = drawn().length;
document.getElementById("bar").open = true;
found.bar = document.getElementById("bar").getBoundingClientRect().height;
const head = document.querySelectorAll("#runs thead th")[5];
const column = () => [...document.querySelectorAll("#runs tbody")].map((body) => body.rows[0].cells[5].textContent);
head.firstChild.click();
found.down = [head.getAttribute("aria-sort") === "descending" ? "" : "wrong", ...column()].filter((text) => text);
head.firstChild.click();
found.up = column();
const plot = document.querySelector(".plot");
plot.focus();
plot.dispatchEvent(new KeyboardEvent("keydown", { key: "End", bubbles: true }));
found.said = document.getElementById("said").textContent;
found.label = plot.getAttribute("aria-label");
found.ticks = [...document.querySelectorAll("#accuracy-rounds svg")].map((svg) =>
  [...svg.querySelectorAll("text[text-anchor=middle]")].map((text) => text.textContent));
found.ready = document.documentElement.dataset.ready;
found.trouble = (document.getElementById("trouble") || {}).innerText;
parent.postMessage(JSON.stringify(found), "*");
</script>"""
# A window cannot be as narrow as a phone; a frame can.
HOST = """<!doctype html><body><iframe src="probed.html" width="{width}" height="6000" style="border:0"></iframe>
<script>
window.onmessage = (event) => document.body.append(
  Object.assign(document.createElement("pre"), {{ id: "probe", textContent: event.data }}));
</script>"""


def browser() -> str:
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), "")


needs_browser = pytest.mark.skipif(not browser(), reason="no chromium on this machine")


def opened(path: Path, width: int, tmp_path: Path, *, dark: bool = False) -> tuple[dict, str]:
    """What the probe finds in the opened page, and what the console said.

    The console also hears of every request that the page's own security policy refuses.
    """
    text = path.read_text(encoding="utf-8").replace("</body>", PROBE + "</body>")
    (tmp_path / "probed.html").write_text(text, encoding="utf-8")
    (tmp_path / "host.html").write_text(HOST.format(width=width), encoding="utf-8")
    command = [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    command += ["--virtual-time-budget=4000", "--window-size=1400,6000", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--enable-logging=stderr", "--dump-dom"]
    command += ["--blink-settings=preferredColorScheme=0"] if dark else []
    address = (tmp_path / "host.html").as_uri()
    done = subprocess.run([*command, address], capture_output=True, text=True, timeout=1200, check=True)
    probe = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL).group(1)
    console = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return json.loads(html.unescape(probe)), console


class Cells(HTMLParser):
    """The rows of a table."""

    def __init__(self, text: str, name: str = "runs") -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.inside = False
        self.feed(text.split(f'id="{name}"')[1].split("</table>")[0].split(">", 1)[1])

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append([])
        if tag == "td" or (tag == "th" and dict(attrs)["scope"] == "row"):
            self.rows[-1].append("")
            self.inside = True

    def handle_endtag(self, tag):
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data):
        if self.inside:
            self.rows[-1][-1] += data


@pytest.fixture
def real(small_task, tmp_path) -> Path:
    """Two real runs of a small task, with layers, times and a partition."""
    for name, settings in {"fedavg": {}, "fedsparse": {"lambda0": 1e-3}}.items():
        task = small_task((12, 20, 9, 15, 30, 11))
        algorithm = fedprior.algorithm(name, task.network, **settings)
        fedprior.run(task, algorithm, rounds=8, out=tmp_path / "real" / name)
    return tmp_path / "real"


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_renders_without_errors_requests_or_overlaps(real, tmp_path, width):
    write_report([real], tmp_path / "report.html")
    probe, console = opened(tmp_path / "report.html", width, tmp_path, dark=width == 390)
    assert probe["ready"] == "true"
    assert (console, probe["requests"]) == ("", [])
    assert probe["width"] == width
    assert probe["wide"] <= probe["width"], "the page scrolls sideways"
    assert (probe["overlaps"], probe["texts"]) == ([], [])
    both = ["fedavg", "fedsparse"]
    assert {name: series for name, series in probe["charts"].items() if series != both} == {
        "Sparsity, layer by layer": ["conv", "fc1", "fc2"],
        "Units kept": ["conv", "fc1"],
        "Units closed until then, by cause": [
            f"{layer}, {by}" for by in ("votes", "the step") for layer in ("conv", "fc1")
        ],
        "Gate disagreement |π − θ|, mean": ["fedsparse"],
        "Gate disagreement |π − θ|, largest": ["fedsparse"],
        "Bytes a round, by direction": ["fedavg, up", "fedsparse, up", "fedavg, down", "fedsparse, down"],
        "Reliability": ["as sure as right", *both],
        "Distribution over clients": [f"{name}, {whose}" for name in both for whose in ("own model", "server's")],
        "own, seed 0": [],
    }
    assert {"Global accuracy against bytes", "Local accuracy against rounds", "Seconds a round"} <= set(probe["charts"])
    assert (tmp_path / "report.html").stat().st_size < 100_000
    # A run can be hidden and shown again, and the pointer at the end of the lines reads the final accuracies.
    assert (probe["without"], probe["again"]) == (["fedsparse"], both)
    summaries = [json.loads((real / name / "summary.json").read_text()) for name in both]
    finals = [f"{100 * s['global_accuracy']:.1f}%" for s in summaries]
    assert any(final in probe["tip"] for final in finals), probe["tip"]
    assert "kB" in probe["log"]


@needs_browser
def test_ticks_are_whole_rounds_and_keys_read_values(write_run, tmp_path):
    folder = write_run(tmp_path / "runs" / "short", rounds=3, every=1)
    write_report([tmp_path / "runs"], tmp_path / "report.html")
    probe, console = opened(tmp_path / "report.html", 1280, tmp_path)
    assert (console, probe["ticks"][0]) == ("", ["0", "1", "2", "3", "round"])
    last = f"{100 * read_run(folder).final('global_accuracy'):.1f}%"
    assert "fedavg" in probe["said"]
    assert last in probe["said"]
    assert f"to {last} at after" in probe["label"]


def paperlike_names(root: Path) -> list[str]:
    """As `write_report` names them beside a run of another length called fedavg."""
    names = dict.fromkeys(run.label for run in find_runs(root).runs)
    return [f"{name} rounds=200" if name == "fedavg" else name for name in names]


@needs_browser
def test_a_page_of_many_runs_and_broken_ones(paperlike, write_run, tmp_path):
    write_run(tmp_path / "odd" / "unfinished", finished=False, rounds=40)
    (write_run(tmp_path / "odd" / "damaged") / "rounds.jsonl").write_text('{"round": 1\n')
    (tmp_path / "odd" / "script").mkdir()
    write_run(tmp_path / "odd" / "label", label="</script><script>alert(1)</script>")
    write_report([paperlike, tmp_path / "odd", tmp_path / "nowhere"], tmp_path / "report.html")
    probe, console = opened(tmp_path / "report.html", 1280, tmp_path)
    assert (console, probe["requests"], probe["texts"]) == ("", [], [])
    groups = [f"{name}, 3 seeds" for name in paperlike_names(paperlike)]
    assert probe["charts"]["Global accuracy against bytes"][:6] == groups
    assert len(probe["charts"]["Global accuracy against bytes"]) == 8
    # On demand, run by run; and the bar of names leaves room for the page, whatever it holds.
    assert probe["singles"] == 20
    assert probe["bar"] < 450
    # Most megabytes first, then least first; what is missing stays last.
    down, up = (
        [float(text.split()[0].replace(",", "")) for text in probe[way] if text != "–"] for way in ("down", "up")
    )
    assert len(down) == 8
    assert (down, up) == (sorted(down, reverse=True), sorted(up))
    trouble = probe["trouble"]
    assert "damaged: rounds.jsonl is damaged in line 1" in trouble
    assert "nowhere: does not exist" in trouble
    assert "unfinished: round 40 of 40: still running, or stopped" in trouble


def test_the_tables_numbers_are_the_records(real, tmp_path):
    text = page(find_runs(real).runs)
    shown = {row[0]: row for row in Cells(text).rows if row}
    for name in ("fedavg", "fedsparse"):
        s = json.loads((real / name / "summary.json").read_text())
        accuracies = [f"{100 * s[key]:.1f}%" for key in ("global_accuracy", "local_accuracy")]
        megabytes = [f"{s[key] / 1e6:,.1f}" for key in ("bytes_up", "bytes_down")]
        sizes = [f"{100 * s['sparsity']:.1f}%", f"{s['effective_parameters']:,}", f"{s['seconds']:,.1f}"]
        assert shown[name] == [name, "0", "8", *accuracies, *megabytes, *sizes]


def test_the_page_says_what_closed_how_many_units(real):
    text = page(find_runs(real).runs)
    last = json.loads((real / "fedsparse" / "rounds.jsonl").read_text().splitlines()[-1])
    rows = [row for row in Cells(text, "closed").rows if row]
    names = ("units", "closed_by_votes", "closed_by_step")
    assert rows == [
        ["fedsparse", "0", layer, *(str(last[f"{name}/{layer}"]) for name in names)] for layer in ("conv", "fc1")
    ]
    assert sum(last[f"closed_by_{by}/{layer}"] for by in ("votes", "step") for layer in ("conv", "fc1")) > 0


def test_devices_with_faults_have_a_row_each(write_run, tmp_path):
    folder = write_run(tmp_path / "run", rounds=3)
    noted = [
        {"faults": [{"node": "7", "client": 2, "what": "no reply"}], "clipped": [1]},
        {"faults": [{"client": 2, "what": "late"}, {"node": "9", "client": None, "what": "<b>"}], "clipped": [1, 3]},
        {"quarantined": [{"node": "9", "client": None}], "stragglers": [4]},
    ]
    records = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    lines = (json.dumps(record | more) + "\n" for record, more in zip(records, noted, strict=True))
    (folder / "rounds.jsonl").write_text("".join(lines))
    text = page([read_run(folder)])
    assert [row[2:] for row in Cells(text, "faults").rows if row] == [
        ["client 2", "2", "–", "0", "0", "2", "late"],
        ["node 9", "1", "3", "0", "0", "2", "<b>"],
        ["client 4", "0", "–", "1", "0", "3", "–"],
        ["client 1", "0", "–", "0", "2", "2", "–"],
        ["client 3", "0", "–", "0", "1", "2", "–"],
    ]
    assert next(row for row in Cells(text).rows if row)[-1] == "3"


def test_the_scripts_numbers_are_the_records(real):
    text = page(find_runs(real).runs)
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL).group(1))
    records = [json.loads(line) for line in (real / "fedsparse" / "rounds.jsonl").read_text().splitlines()]
    found = next(run for run in data["runs"] if run["name"] == "fedsparse")
    for name in ("round", "bytes_up", "bytes_down", "train_loss"):
        assert found[name] == [record[name] for record in records]
    evaluated = [record for record in records if "global_accuracy" in record]
    for name in ("round", "global_accuracy", "local_accuracy", "sparsity", "tv_mean", "tv_max"):
        assert found["evaluated"][name] == [record[name] for record in evaluated]
    totals = [sum(r["bytes_up"] + r["bytes_down"] for r in records[: record["round"]]) for record in evaluated]
    assert found["evaluated"]["bytes"] == totals
    assert found["layers"] == {
        layer: [record.get(f"sparsity/{layer}", 0.0) for record in evaluated] for layer in ("conv", "fc1", "fc2")
    }
    for name in ("units", "closed_by_votes", "closed_by_step"):
        assert found[name] == {layer: [r[f"{name}/{layer}"] for r in evaluated] for layer in ("conv", "fc1")}
    assert found["reliability"] == [
        [value for key, value in evaluated[-1].items() if key.startswith(name)] for name in ("confidence/", "accuracy/")
    ]
    assert found["evaluated"]["global_ece"] == [record["global_ece"] for record in evaluated]
    counts = json.loads((real / "fedsparse" / "partition.json").read_text())["train"]
    (part,) = data["partitions"]
    assert sorted(part["order"]) == list(range(6))
    assert part["counts"] == [counts[client] for client in part["order"]]


def test_long_runs_are_thinned_by_means(write_run, tmp_path):
    run = read_run(write_run(tmp_path / "long", rounds=5000, sparsity=0.5))
    data = json.loads(re.search(r'id="data">(.*?)</script>', page([run]), re.DOTALL).group(1))
    (found,) = data["runs"]
    assert len(found["round"]) <= 800
    assert found["round"][-1] == 5000
    assert found["bytes_up"][0] == pytest.approx(sum(r["bytes_up"] for r in run.rounds[:7]) / 7)
    assert found["evaluated"]["round"][-1] == 5000


def test_means_over_seeds_have_their_error(paperlike):
    found = find_runs(paperlike)
    rows = {row[0]: row for row in Cells(page(found.runs)).rows if row}
    values = [100 * run.final("global_accuracy") for run in found.runs if run.label == "fedl1"]
    mean = sum(values) / 3
    error = (sum((v - mean) ** 2 for v in values) / 2 / 3) ** 0.5
    assert rows["fedl1, mean ± s.e."][3] == f"{mean:.1f} ± {error:.1f}%"


def test_folders_are_gathered_once_and_no_runs_are_an_error(paperlike, write_run, tmp_path):
    one = paperlike / "fedavg" / "seed-0"
    found = gather([paperlike, one, tmp_path])
    assert len(found.runs) == 18
    assert [(broken.path, broken.reason) for broken in found.broken] == [(tmp_path, "holds no runs")]
    with pytest.raises(RunError, match=r"config.toml: is a file; give the run's folder, such as .*one$"):
        write_report([write_run(tmp_path / "one") / "config.toml"], tmp_path / "report.html")
    with pytest.raises(RunError, match=r"nothing to report: .*nowhere: does not exist"):
        write_report([tmp_path / "nowhere"], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_tables_for_readers_papers_and_programs(write_run, tmp_path):
    runs = [read_run(write_run(tmp_path / "a", label="50%_a|b")), read_run(write_run(tmp_path / "b", finished=False))]
    assert r"| 50%_a\|b | 0 | 200 |" in table_of_runs(runs).markdown()
    assert r"50\%\_a|b & 0 & 200 &" in table_of_runs(runs).latex()
    header, first, second = (line.split(",") for line in numbers_of_runs(runs).csv().splitlines())
    one = dict(zip(header, first, strict=True))
    assert float(one["global_accuracy"]) == runs[0].summary["global_accuracy"]
    assert (one["finished"], dict(zip(header, second, strict=True))["finished"]) == ("true", "false")
