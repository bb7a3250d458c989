"""The page for keyboards, screen readers and every kind of eye: its structure as text, and its colours as computed."""

import itertools
import re
from html.parser import HTMLParser
from importlib import resources

import numpy as np
import pytest

from fedprior.report import find_runs, group_runs, read_run
from fedprior.report.page import SCRIPTS, page
from fedprior.report.page_data import COLOURS, looks, page_data

ASSETS = resources.files("fedprior.report").joinpath("assets")
CSS = ASSETS.joinpath("page.css").read_text(encoding="utf-8")
VOID = {"meta", "link", "input", "wbr", "br"}


class Structure(HTMLParser):
    """Every element with its attributes, and the text inside; elements that do not nest are an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def all(self, *tags):
        return [attributes for tag, attributes in self.found if tag in tags]


@pytest.fixture(scope="module")
def text(paperlike):
    return page(find_runs(paperlike).runs)


def test_elements_nest_ids_are_unique_and_what_is_referred_to_exists(text):
    structure = Structure(text)
    ids = [attributes["id"] for _, attributes in structure.found if "id" in attributes]
    assert len(set(ids)) == len(ids)
    named = [attributes["aria-labelledby"] for _, attributes in structure.found if "aria-labelledby" in attributes]
    assert named
    assert set(named) <= set(ids)
    used = re.findall(r'getElementById\("([\w-]+)"\)|grid\("([\w-]+)"\)', "".join(map(script, SCRIPTS)))
    assert {one or other for one, other in used} <= set(ids)


def script(name):
    return ASSETS.joinpath(name).read_text(encoding="utf-8")


def test_tables_say_what_they_are_and_scroll_by_keyboard(text):
    structure = Structure(text)
    assert structure.all("html") == [{"lang": "en"}]
    assert len(structure.all("main")) == len(structure.all("h1")) == 1
    assert all(attributes["scope"] in ("row", "col") for attributes in structure.all("th"))
    assert len(structure.all("caption")) == len(structure.all("table")) == 2
    frames = [attributes for attributes in structure.all("div") if attributes.get("class") == "scroll"]
    assert len(frames) == 2
    assert all(f["tabindex"] == "0" and f["role"] == "region" and f["aria-label"] for f in frames)
    assert all(attributes.get("aria-label") for attributes in structure.all("input", "select"))
    assert any(attributes.get("role") == "status" for attributes in structure.all("p"))
    levels = [int(tag[1]) for tag, _ in structure.found if re.fullmatch("h[1-6]", tag)]
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


def themes():
    """The colours of the light theme, and those of the dark one."""
    light, dark = (dict(re.findall(r"--(\w+): (#\w{6})", part)) for part in CSS.split("@media (prefers", 1))
    return {"light": light, "dark": dark}


def linear(colour):
    values = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    """WCAG 2's ratio of luminances."""
    bright, dim = sorted((float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (one, other)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def oklab(colour):
    """Coordinates in which distances are about what an eye sees (Ottosson 2020)."""
    cones = linear(colour) @ np.array(
        [
            [0.41222147, 0.21190350, 0.08830246],
            [0.53633254, 0.68069955, 0.28171884],
            [0.05144599, 0.10739696, 0.62997870],
        ]
    )
    return np.cbrt(cones) @ np.array(
        [
            [0.21045426, 1.97799850, 0.02590404],
            [0.79361779, -2.42859221, 0.78277177],
            [-0.00407205, 0.45059371, -0.80867577],
        ]
    )


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_lines_can_be_seen_and_told_apart(theme):
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert np.allclose(oklab("#ffffff"), [1, 0, 0], atol=1e-4)
    known = themes()[theme]
    for ink, ground in itertools.product(("ink", "soft", "warn"), ("page", "panel")):
        assert contrast(known[ink], known[ground]) >= 4.5, (ink, ground)
    lines = [known[f"c{i}"] for i in range(COLOURS)]
    assert all(contrast(colour, known["page"]) >= 3 for colour in lines)
    near, *_ = min((float(np.linalg.norm(oklab(a) - oklab(b))), a, b) for a, b in itertools.combinations(lines, 2))
    assert near > 0.08


def test_a_hundred_lines_look_different():
    seen = [(look["colour"], look["dash"], look["mark"]) for look in looks(240)]
    assert len(set(seen)) == 240
    assert {look["mark"] for look in looks(COLOURS)} == {"circle"}
    assert all(f"{mark}:" in script("base.js") for _, _, mark in seen)


def test_a_label_of_several_seeds_is_a_mean_with_its_error(paperlike, write_run, tmp_path):
    groups = group_runs(find_runs(paperlike).runs)
    data = page_data(groups)
    assert [mean["group"] for mean in data["means"]] == [group.label for group in groups]
    for mean, group in zip(data["means"], groups, strict=True):
        for place, name in ((mean["evaluated"], "local_accuracy"), (mean, "train_loss"), (mean, "bytes_up")):
            curve = group.curve(name)
            assert place["round"] == list(curve.x)
            assert place[name] == pytest.approx(curve.mean, rel=1e-6)
            assert place["error"][name] == pytest.approx(curve.error, rel=1e-5, abs=1e-12)
        sent = 2**30 * group.curve("local_accuracy", "gib").x
        assert mean["evaluated"]["bytes"] == pytest.approx(sent, rel=1e-6)
    # A mean would end where the shortest does: seeds of other lengths stay single.
    folders = [write_run(tmp_path / str(n), seed=n, rounds=r, finished=False) for n, r in enumerate((20, 40))]
    assert page_data(group_runs([read_run(folder) for folder in folders]))["means"] == []


def test_a_page_of_many_long_runs_has_fewer_points_each(write_run, tmp_path, monkeypatch):
    monkeypatch.setattr("fedprior.report.page_data.ALL_POINTS", 2000)
    runs = [read_run(write_run(tmp_path / str(n), label=f"l{n}", rounds=1000, clients=3)) for n in range(5)]
    found = page_data(group_runs(runs))["runs"]
    assert all(300 < len(run["round"]) <= 400 and run["round"][-1] == 1000 for run in found)
    assert all(run["evaluated"]["round"][-1] == 1000 for run in found)
