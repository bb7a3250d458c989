"""What a monitor sees while a run goes on is what the records say in the end."""

import json
import re
import urllib.error
import urllib.request

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'fedprior[flower]'")

from local_grid import LocalGrid

from fedprior.core.errors import RunError, SettingError
from fedprior.flower import metrics
from fedprior.flower.apps import serve
from fedprior.flower.loopback import free_ports
from fedprior.report.reading import read_partition, round_seconds

LIMITS = {"round-seconds": 0.2, "start-seconds": 0.2, "poll-seconds": 0.001, "wait-for": 6}
LINE = re.compile(r'(fedprior_[a-z_]+)\{((?:[a-z]+="(?:[^"\\\n]|\\.)*",?)*)\} (\S+)')


def get(url):
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read().decode()


def values(page):
    """Read Prometheus' text: every sample is announced by a HELP and a TYPE."""
    found, lines = {}, page.splitlines()
    for about, kind, sample in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        name, _, value = LINE.fullmatch(sample).groups()
        assert about.startswith(f"# HELP {name} ")
        assert kind in (f"# TYPE {name} gauge", f"# TYPE {name} counter")
        assert name.endswith("_total") is kind.endswith("counter")
        found[name.removeprefix("fedprior_")] = float(value)
    return found


def test_a_monitor_sees_the_records(make_job, tmp_path):
    (port,) = free_ports(1)
    address, seen = f"127.0.0.1:{port}", []

    def look(order, reply):
        assert get(f"http://{address}/health") == "ok\n"
        seen.append(values(get(f"http://{address}/metrics")))
        return [] if len(seen) == 8 else [reply]  # one reply is lost on the way

    job, run = make_job("fedsparse", {"evaluate_every": 1}), tmp_path / "run"
    serve(job, LocalGrid(job, tmp_path, look), {**LIMITS, "out": str(run), "metrics": address})
    records = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    assert seen[0]["round"] == 0
    assert seen[0]["rounds"] == 3
    done = records[: int(seen[-1]["round"])]
    assert done
    assert seen[-1]["bytes_up_total"] == sum(record["bytes_up"] for record in done)
    assert seen[-1]["bytes_down_total"] == sum(record["bytes_down"] for record in done)
    assert seen[-1]["replies_total"] == sum(len(record["clients"]) for record in done)
    assert seen[-1]["faults_total"] == sum(len(record.get("faults", [])) for record in done)
    assert seen[-1]["global_accuracy"] == done[-1]["global_accuracy"]
    with pytest.raises(urllib.error.URLError):  # closed with the run
        get(f"http://{address}/health")
    # And the folder has what a simulated run's has.
    assert sorted(round_seconds(run)) == [1, 2, 3]
    assert all(seconds >= 0 for seconds in round_seconds(run).values())
    partition = read_partition(run)
    assert partition.train.sum(1).tolist() == [len(rows) for rows in job.data.train]


def test_a_label_may_hold_anything():
    page = metrics.text([], 3, {"run": 'a "b" \\ c\nd'})
    assert 'run="a \\"b\\" \\\\ c\\nd"' in page
    assert values(page)["replies_total"] == 0


@pytest.mark.parametrize(("address", "kind"), [("9464", SettingError), ("here:there", SettingError)])
def test_an_address_that_is_none_is_one_line(address, kind):
    with pytest.raises(kind, match="HOST:PORT"), metrics.serving(address, [], 1, {}):
        pass


def test_an_address_that_is_taken_is_one_line():
    (port,) = free_ports(1)
    with metrics.serving(f"127.0.0.1:{port}", [], 1, {}):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(f"http://127.0.0.1:{port}/else")
        with pytest.raises(RunError, match="cannot answer at"), metrics.serving(f"127.0.0.1:{port}", [], 1, {}):
            pass
