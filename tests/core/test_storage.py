"""What is on disk: trees that come back as they were, a layout that does not change, and damage that is told."""

import json
import zlib
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedprior import RunError
from fedprior.core import storage, trees
from fedprior.core.storage import Saved
from fedprior.runs import checkpoint
from test_contract import simulate

KIND = "fedprior-test-1"

names = st.text(st.characters(exclude_characters="/", exclude_categories=["Cs"]), min_size=1, max_size=5)
tensors = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool]).flatmap(
    lambda dtype: st.lists(st.integers(0, 3), max_size=3).map(lambda shape: (torch.randn(shape) * 9).to(dtype))
)
leaves = tensors | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.booleans()
forest = st.recursive(
    st.dictionaries(names, leaves, max_size=3), lambda child: st.dictionaries(names, child, max_size=3)
)


@given(forest, st.integers(0, 9999), st.floats(0, 1e9), st.text(max_size=9))
def test_any_tree_of_tensors_and_numbers_survives(tmp_path_factory, tree, number, seconds, records):
    path = tmp_path_factory.mktemp("storage") / "file"
    storage.save(path, KIND, Saved("run", number, seconds, records, tree, {"extra": "[1]"}))
    found = storage.load(path, KIND, "run")
    assert (found.round, found.seconds, found.records, found.more) == (number, seconds, records, {"extra": "[1]"})
    expected, restored = dict(trees.leaves(tree)), dict(trees.leaves(found.tree))
    assert {k for k, v in expected.items() if not isinstance(v, dict)} == restored.keys()
    for name, value in restored.items():
        assert type(value) is type(expected[name])
        if isinstance(value, torch.Tensor):
            assert value.dtype == expected[name].dtype
            assert torch.equal(value, expected[name])
        else:
            assert value == expected[name]


def test_shared_and_strided_tensors_are_written_by_value(tmp_path):
    whole = torch.arange(12.0, requires_grad=True)
    askew = {"a": whole.view(3, 4).T, "b": whole[2:5], "c": whole, "d": torch.ones(()).expand(2, 2)}
    assert storage.from_bytes(storage.to_bytes(askew)).keys() == askew.keys()
    storage.save(tmp_path / "file", KIND, Saved("", 0, 0.0, "", askew))
    for found in (storage.from_bytes(storage.to_bytes(askew)), storage.load(tmp_path / "file", KIND, "").tree):
        assert all(torch.equal(found[name], value) for name, value in askew.items())


def test_a_loaded_tree_has_the_models_order_with_additions_last():
    model = {"w": {"b": torch.zeros(2), "a": torch.zeros(3)}}
    found = {"closed": {"l": torch.ones(1)}, "w": {"a": torch.ones(3), "b": torch.ones(2), "z": torch.ones(1)}}
    placed = storage.like(model, found, "meta")
    assert [name for name, _ in trees.leaves(placed)] == ["w/b", "w/a", "w/z", "closed/l"]
    assert {name: leaf.device.type for name, leaf in trees.leaves(placed)} == {
        **{"w/b": "cpu", "w/a": "cpu"},
        **{"w/z": "meta", "closed/l": "meta"},
    }
    for other in (torch.ones(3, dtype=torch.float64), torch.ones(4), 3.0, {"a": torch.ones(3)}):
        with pytest.raises(RunError, match="file does not match the model"), storage.fitting(Path("file")):
            storage.like(model, {"w": {**found["w"], "a": other}})


# ---------------------------------------------------------------------- the layout that all versions share


def rewrite(path, change):
    """The file again with another head."""
    with safetensors.safe_open(str(path), framework="pt") as file:
        head, held = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(head)
    path.write_bytes(safetensors.torch.save(held, head))


@pytest.mark.parametrize("name", ["fedadam", "fedsparse+scaffold"])
def test_a_simulations_checkpoint_has_the_layout_of_its_format(name, tmp_path):
    """Written here by hand: a run begun with an older version of the same format continues."""
    first, second = simulate(name), simulate(name)
    for _ in range(2):
        first.step(evaluate=False)
    flat = {f"server/{section}/{k}": v for section, part in first.server.items() for k, v in part.items()}
    for section, part in first.optimiser.state().items():
        flat |= {f"optimiser/{section}/{k}": v for k, v in part.items()}
    for client, remembered in first.memory.items():
        flat |= {f"memory/{client}/{s}/{k}": v for s, part in remembered.items() for k, v in part.items()}
    flat["clients/accuracy"] = first.accuracy
    held = {k: v.detach().clone() for k, v in flat.items() if isinstance(v, torch.Tensor)}
    total = 0
    for key in sorted(held):
        total = zlib.crc32(held[key].numpy().tobytes(), zlib.crc32(key.encode(), total))
    optimisers = {section: one.name for section, one in first.algorithm.server.items()}
    head = {
        "format": "fedprior-checkpoint-2",
        "run": json.dumps({"algorithm": first.algorithm.name, "server": optimisers, "key": int(first.root)}),
        "round": "2",
        "seconds": repr(first.seconds),
        "numbers": json.dumps({k: v for k, v in flat.items() if k not in held}),
        "checksum": str(total),
        "records": "123",
    }
    path = tmp_path / "checkpoint.safetensors"
    path.write_bytes(safetensors.torch.save(held, head))
    assert checkpoint.load(path, second) == "123"
    # That version kept of the clients' scores their accuracies alone: the others are new.
    found, expected = second.step(evaluate=True), first.step(evaluate=True)
    new = {"local_loss", "local_nll", "local_ece", "local_brier", "local_loss_worst", "local_loss_spread"}
    assert new <= found.keys() == expected.keys()
    assert {k: v for k, v in found.items() if k not in new} == {k: v for k, v in expected.items() if k not in new}

    checkpoint.save(path, first, "123")
    now = {}
    rewrite(path, now.update)
    assert now.keys() == head.keys()
    assert [now[key] for key in ("format", "run", "round", "records")] == [head["format"], head["run"], "3", "123"]
    assert set(safetensors.torch.load_file(path)) >= set(held)


@pytest.mark.parametrize("key", ["format", "run", "round", "seconds", "numbers", "checksum", "records"])
def test_a_header_with_a_missing_entry_is_refused(tmp_path, key):
    path, sim = tmp_path / "file", simulate("fedadam")
    checkpoint.save(path, sim)
    rewrite(path, lambda head: head.pop(key))
    with pytest.raises(RunError, match=r"file (is damaged|is not a fedprior checkpoint)"):
        checkpoint.load(path, sim)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("format", "fedprior-flower-checkpoint-1", "not a fedprior checkpoint of kind fedprior-checkpoint-2"),
        ("round", "many", "damaged"),
        ("seconds", "", "damaged"),
        ("checksum", "1", "checksum does not match"),
        ("numbers", "[1, 2]", "damaged"),
        ("numbers", "null", "damaged"),
        ("numbers", "{", "damaged"),
        ("numbers", '{"clients/accuracy/0": 1}', "damaged"),
        ("numbers", '{"clients/accuracy": 1}', "does not match the model"),
        ("numbers", '{"server": 1}', "does not match the model"),
        ("numbers", '{"memory/x/y": 1}', "does not match the model"),
        ("numbers", '{"optimiser/weights": 1}', "does not match the model"),
        ("run", "{}", r"does not belong to the run in its config.toml, but to \{\}"),
    ],
)
def test_a_header_with_a_wrong_entry_is_refused(tmp_path, key, value, words):
    path, sim = tmp_path / "file", simulate("fedadam")
    sim.step(evaluate=False)
    checkpoint.save(path, sim)
    rewrite(path, lambda head: head.update({key: value}))
    other = simulate("fedadam")
    before = {name: leaf.clone() for name, leaf in trees.leaves(other.server)}
    with pytest.raises(RunError, match=words) as refusal:
        checkpoint.load(path, other)
    assert "\n" not in str(refusal.value)
    assert other.round == 0
    assert all(torch.equal(leaf, before[name]) for name, leaf in trees.leaves(other.server))
