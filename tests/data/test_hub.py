"""Image sets in the Hub's layout: small ones made here, and the real ones where FEDPRIOR_DATA names their folder."""

import os
from pathlib import Path

import numpy as np
import pytest

import fedprior
from fedprior.data import hub
from fedprior.errors import DataError

datasets = pytest.importorskip("datasets", reason="the extra fedprior[hub] is not installed")
REAL = os.environ.get("FEDPRIOR_DATA", "")
needs_data = pytest.mark.skipif(not REAL, reason="FEDPRIOR_DATA does not name a folder with the real data sets")


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDPRIOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    datasets.disable_progress_bars()


def write(root: Path, source: hub.Source, split: str, images: np.ndarray, columns: dict[str, list[object]]) -> None:
    """A parquet file as the Hub has it."""
    features = {source.image: datasets.Image()}
    table = datasets.Dataset.from_dict({source.image: list(images)}, features=datasets.Features(features))
    for name, values in columns.items():
        table = table.add_column(name, values)
    folder = root / source.repository / "data"
    folder.mkdir(parents=True, exist_ok=True)
    table.to_parquet(folder / f"{split}-00000-of-00001.parquet")


def small_cifar(root: Path, source: hub.Source = hub.CIFAR10, classes: int = 10) -> dict[str, np.ndarray]:
    random = np.random.RandomState(0)
    made = {}
    for split, count in (("train", 200), ("test", 100)):
        images = random.randint(0, 256, (count, 32, 32, 3)).astype(np.uint8)
        labels = np.arange(count) % classes
        columns = {theirs: labels // (5 if ours == "coarse" else 1) for ours, theirs in source.columns.items()}
        write(root, source, split, images, {name: values.tolist() for name, values in columns.items()})
        made |= {f"{split}_image": images, f"{split}_label": labels}
    return made


def test_images_come_back_as_they_were_and_are_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = small_cifar(tmp_path / "hub")
    first = hub.load(hub.CIFAR10, str(tmp_path / "hub"))
    for name, values in made.items():
        np.testing.assert_array_equal(first[name], values)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: pytest.fail("decoded again"))
    second = hub.load(hub.CIFAR10, str(tmp_path / "hub"))
    np.testing.assert_array_equal(second["train_image"], made["train_image"])


def test_changed_files_are_decoded_again(tmp_path: Path) -> None:
    small_cifar(tmp_path / "hub")
    hub.load(hub.CIFAR10, str(tmp_path / "hub"))
    images = np.full((200, 32, 32, 3), 7, np.uint8)
    write(tmp_path / "hub", hub.CIFAR10, "train", images, {"label": [0] * 200})
    assert (hub.load(hub.CIFAR10, str(tmp_path / "hub"))["train_image"] == 7).all()


def test_a_plain_npz_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = small_cifar(tmp_path / "hub")
    (tmp_path / "plain").mkdir()
    np.savez(tmp_path / "plain" / "uoft-cs--cifar10.npz", **made)  # type: ignore[arg-type]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: pytest.fail("not needed"))
    task = fedprior.task("cifar10", data_dir=str(tmp_path / "plain"), clients=10)
    assert task.data.x.shape == (200, 3, 32, 32)
    assert sum(task.data.train.size(s) for s in range(10)) == 200


def test_normalised_by_channel(tmp_path: Path) -> None:
    small_cifar(tmp_path / "hub")
    task = fedprior.task("cifar10", data_dir=str(tmp_path / "hub"), clients=10)
    assert task.data.x.mean((0, 2, 3)).abs().max() < 1e-5
    assert (task.data.x.std((0, 2, 3)) - 1).abs().max() < 1e-5


def test_validation_never_touches_the_test_images(tmp_path: Path) -> None:
    made = small_cifar(tmp_path / "hub")
    plain = fedprior.task("cifar10", data_dir=str(tmp_path / "hub"), clients=10)
    held = fedprior.task("cifar10", data_dir=str(tmp_path / "hub"), clients=10, validation=True)
    assert len(held.data.x) == 180
    assert len(held.data.test_x) == 20
    # Every image as raw bytes again: what is held out and what is kept make up the training set, and no test image.
    mean, deviation = held.data.x.mean(), held.data.x.std()
    assert np.isfinite([float(mean), float(deviation)]).all()
    counts = np.bincount(made["train_label"], minlength=10)
    both = np.concatenate([held.data.y.numpy(), held.data.test_y.numpy()])
    np.testing.assert_array_equal(np.bincount(both, minlength=10), counts)
    assert len(plain.data.x) == 200


def test_cifar100_has_fine_labels_and_pachinko_clients(tmp_path: Path) -> None:
    small_cifar(tmp_path / "hub", hub.CIFAR100, classes=100)
    task = fedprior.task("cifar100", data_dir=str(tmp_path / "hub"), clients=20)
    assert task.data.classes == 100
    assert task.data.clients == 20
    assert [task.data.train.size(s) for s in range(20)] == [10] * 20


def test_femnist_has_a_client_a_writer(tmp_path: Path) -> None:
    images = np.random.RandomState(0).randint(0, 256, (60, 28, 28)).astype(np.uint8)
    writers = [f"w{i % 3}" for i in range(60)]
    labels = [i % 62 for i in range(60)]
    write(tmp_path / "hub", hub.FEMNIST, "train", images, {"writer_id": writers, "character": labels})
    task = fedprior.task("femnist", data_dir=str(tmp_path / "hub"), test_fraction=0.2)
    assert task.data.clients == 3
    for client in range(3):
        rows = [*task.data.train[client].tolist(), *task.data.test[client].tolist()]
        assert sorted(rows) == [i for i in range(60) if i % 3 == client]
        assert task.data.test.size(client) == 4


def test_missing_data_is_one_line_that_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        fedprior.task("cifar10", data_dir=str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"--data-dir must hold uoft-cs/cifar10"):
        fedprior.task("cifar10", data_dir=str(tmp_path))


def test_a_folder_with_other_columns_is_refused(tmp_path: Path) -> None:
    images = np.zeros((4, 32, 32, 3), np.uint8)
    for split in ("train", "test"):
        write(tmp_path, hub.CIFAR10, split, images, {"target": [0, 1, 2, 3]})
    with pytest.raises(DataError, match="no column label"):
        hub.load(hub.CIFAR10, str(tmp_path))


def test_a_broken_cache_says_what_to_delete(tmp_path: Path) -> None:
    (tmp_path / "uoft-cs--cifar10.npz").write_bytes(b"not a zip")
    with pytest.raises(DataError, match="delete it"):
        hub.load(hub.CIFAR10, str(tmp_path))


@needs_data
@pytest.mark.parametrize(
    ("name", "clients", "examples"),
    [("cifar10", 100, 50_000), ("cifar100", 500, 50_000), ("mnist-scaffold", 100, 60_000)],
)
def test_the_real_sets_have_the_papers_shape(name: str, clients: int, examples: int) -> None:
    task = fedprior.task(name, data_dir=REAL)
    assert task.data.clients == clients
    assert sum(task.data.train.size(s) for s in range(clients)) == examples
