"""Image sets in the Hub's layout: small ones made here, and the real ones where FEDPRIOR_DATA names their folder."""

import os
from pathlib import Path

import numpy as np
import pytest

import fedprior
from fedprior.catalogue.data import hub
from fedprior.core.errors import DataError

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


def test_images_survive_the_cache_and_are_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert task.defaults["weighting"] == "equal"  # the paper's
    assert sum(task.data.train.size(s) for s in range(10)) == 200


def test_normalised_by_channel(tmp_path: Path) -> None:
    small_cifar(tmp_path / "hub")
    task = fedprior.task("cifar10", data_dir=str(tmp_path / "hub"), clients=10)
    assert task.data.x.mean((0, 2, 3)).abs().max() < 1e-5
    assert (task.data.x.std((0, 2, 3)) - 1).abs().max() < 1e-5


def test_symmetric_pixels_go_from_minus_one_to_one_and_the_task_keeps_the_scale(tmp_path: Path) -> None:
    """The same from a plain .npz, on the test images too, and what is predicted later is scaled alike."""
    made = small_cifar(tmp_path / "hub")
    (tmp_path / "plain").mkdir()
    np.savez(tmp_path / "plain" / "uoft-cs--cifar10.npz", **made)  # type: ignore[arg-type]
    for folder in ("hub", "plain"):
        task = fedprior.task("cifar10", data_dir=str(tmp_path / folder), clients=10, pixels="symmetric")
        for part, x in (("train", task.data.x), ("test", task.data.test_x)):
            expected = made[f"{part}_image"].transpose(0, 3, 1, 2) / 127.5 - 1
            np.testing.assert_allclose(x.numpy(), expected, atol=1e-6)
            np.testing.assert_allclose(task.scale(made[f"{part}_image"]).numpy(), expected, atol=1e-6)
        assert task.options["pixels"] == "symmetric"
    with pytest.raises(fedprior.SettingError, match="pixels must be standard or symmetric, got 'raw'"):
        fedprior.task("cifar10", data_dir=str(tmp_path / "nowhere"), pixels="raw")


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


@pytest.mark.parametrize("name", ["cifar10-resnet20", "cifar10-resnet18"])
def test_residual_tasks_have_a_concentration_a_class(tmp_path: Path, name: str) -> None:
    """0.1 a class is α = 1 of the same partition, and everything else is an option by name."""
    small_cifar(tmp_path)
    task = fedprior.task(name, data_dir=str(tmp_path), clients=2, concentration=0.1, seed=3)
    same = fedprior.task("cifar10", data_dir=str(tmp_path), clients=2, alpha=1.0, seed=3)
    assert task.data.fingerprint() == same.data.fingerprint()
    assert len(task.network.norms) == {"cifar10-resnet20": 21, "cifar10-resnet18": 20}[name]
    assert set(task.options) == {
        *("clients", "concentration", "init", "data_dir", "validation", "pixels", "partition_seed")
    }
    assert fedprior.catalogue.tasks.recorded_task(name, 3, task.options).data.fingerprint() == task.data.fingerprint()


def test_cifar100_has_fine_labels_and_pachinko_clients(tmp_path: Path) -> None:
    small_cifar(tmp_path / "hub", hub.CIFAR100, classes=100)
    task = fedprior.task("cifar100", data_dir=str(tmp_path / "hub"), clients=20)
    assert task.data.classes == 100
    assert task.data.clients == 20
    assert [task.data.train.size(s) for s in range(20)] == [10] * 20
    assert task.defaults["weighting"] == "equal"  # the paper's


def test_femnist_has_one_client_per_writer(tmp_path: Path) -> None:
    images = np.random.RandomState(0).randint(0, 256, (60, 28, 28)).astype(np.uint8)
    writers = [f"w{i % 3}" for i in range(60)]
    labels = [i % 62 for i in range(60)]
    write(tmp_path / "hub", hub.FEMNIST, "train", images, {"writer_id": writers, "character": labels})
    task = fedprior.task("femnist", data_dir=str(tmp_path / "hub"), test_fraction=0.2)
    assert task.data.clients == 3
    assert task.defaults["weighting"] == "equal"  # the paper's
    for client in range(3):
        rows = [*task.data.train[client].tolist(), *task.data.test[client].tolist()]
        assert sorted(rows) == [i for i in range(60) if i % 3 == client]
        assert task.data.test.size(client) == 4


def test_missing_data_is_one_line_that_says_where_to_get_it(tmp_path: Path) -> None:
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


def arrays(**changes: np.ndarray) -> dict[str, np.ndarray]:
    """Eight training and four test images as the .npz of cifar10 has them."""
    pixels = np.random.RandomState(0).randint(0, 256, (8, 32, 32, 3)).astype(np.uint8)
    labels = np.arange(8) % 10
    whole = {"train_image": pixels, "train_label": labels, "test_image": pixels[:4], "test_label": labels[:4]}
    return {**whole, **changes}


def test_half_an_npz_says_what_to_delete(tmp_path: Path) -> None:
    path = tmp_path / "uoft-cs--cifar10.npz"
    np.savez(path, **arrays())  # type: ignore[arg-type]
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(DataError, match=r"cannot be read .* delete it"):
        hub.load(hub.CIFAR10, str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"train_image": np.zeros((8, 3, 32, 32), np.uint8)}, "train_image must be 8-bit images"),
        ({"train_image": np.zeros((8, 32, 32, 3), np.float32)}, "train_image must be 8-bit images .* got float32"),
        ({"test_image": np.zeros((4, 32, 32), np.uint8)}, r"test_image must have images of shape \(32, 32, 3\)"),
        ({"test_image": np.zeros((4, 16, 16, 3), np.uint8)}, "test_image must have images of shape"),
        ({"train_label": np.arange(7)}, r"train_label must have one entry per image, got shape \(7,\) for 8"),
        ({"train_label": np.zeros((8, 1), int)}, "train_label must have one entry per image"),
        ({"test_label": np.full(4, 0.5)}, "test_label must be whole numbers of at least 0, got float64"),
        ({"test_label": np.full(4, -1)}, "test_label must be whole numbers of at least 0"),
        ({"test_label": np.full(4, 10)}, "test label 10, but labels must lie between 0 and 9"),
        ({"test_image": np.zeros((0, 32, 32, 3), np.uint8), "test_label": np.zeros(0, int)}, "must have one entry"),
    ],
)
def test_wrong_arrays_are_a_one_line_error(tmp_path: Path, changes: dict[str, np.ndarray], match: str) -> None:
    np.savez(tmp_path / "uoft-cs--cifar10.npz", **arrays(**changes))  # type: ignore[arg-type]
    with pytest.raises(DataError, match=match):
        fedprior.task("cifar10", data_dir=str(tmp_path), clients=2)


def test_grey_images_may_have_a_channel(tmp_path: Path) -> None:
    pixels, labels = np.random.RandomState(0).randint(0, 256, (20, 28, 28, 1)).astype(np.uint8), np.arange(20) % 10
    whole = {"train_image": pixels, "train_label": labels, "test_image": pixels, "test_label": labels}
    np.savez(tmp_path / "ylecun--mnist.npz", **whole)  # type: ignore[arg-type]
    assert fedprior.task("mnist-scaffold", data_dir=str(tmp_path), clients=10).data.x.shape == (20, 1, 28, 28)


def test_a_data_folder_without_the_set_is_refused_although_the_hubs_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDPRIOR_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "empty").mkdir()
    np.savez(tmp_path / "cache" / "uoft-cs--cifar10.npz", **arrays())  # type: ignore[arg-type]
    assert len(hub.load(hub.CIFAR10)["train_label"]) == 8
    with pytest.raises(DataError, match="--data-dir must hold uoft-cs/cifar10"):
        hub.load(hub.CIFAR10, str(tmp_path / "empty"))


# ---------------------------------------------------------------------- any other set of the Hub


def garments(root: Path, sides: tuple[int, ...] = (28,), colour: tuple[str, ...] = (), **columns: list[object]) -> Path:
    """A small data set with columns of its own, in a split without a test set's usual name."""
    random = np.random.RandomState(1)
    folder = root / "shop" / "garments" / "data"
    folder.mkdir(parents=True)
    for split, count in (("train", 60), ("validation", 20)):
        shape = [(sides[i % len(sides)],) * 2 + ((3,) if split in colour else ()) for i in range(count)]
        pictures = [random.randint(0, 256, one).astype(np.uint8) for one in shape]
        words = [("coat", "shoe", "bag")[i % 3] for i in range(count)]
        table = datasets.Dataset.from_dict(
            {"picture": pictures, "kind": words, **{name: values[:count] for name, values in columns.items()}},
            features=datasets.Features(
                {
                    "picture": datasets.Image(),
                    "kind": datasets.Value("string"),
                    **{name: datasets.Value("int64") for name in columns},
                }
            ),
        )
        table.to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return root


OPTIONS = {"dataset": "shop/garments", "image": "picture", "label": "kind", "test": "validation", "clients": 4}


def test_any_data_set_is_loaded_by_name_and_columns(tmp_path: Path) -> None:
    task = fedprior.task("hub", data_dir=str(garments(tmp_path)), **OPTIONS)
    assert task.data.classes == 3
    assert task.data.x.shape == (60, 1, 28, 28)
    assert task.data.test_x.shape == (20, 1, 28, 28)
    # Words become numbers in the order of the alphabet: bag, coat, shoe.
    assert task.data.y[:4].tolist() == [1, 2, 0, 1]
    assert [task.data.train.size(s) for s in range(4)] == [15] * 4
    result = fedprior.run(task, "fedsparse", rounds=1, clients_per_round=2)
    assert result.summary["task"] == "hub"


def test_a_run_on_any_set_can_be_resumed_from_its_config(tmp_path: Path) -> None:
    task = fedprior.task("hub", data_dir=str(garments(tmp_path)), model="logistic", **OPTIONS)
    whole = fedprior.run(task, "fedavg", rounds=3, out=tmp_path / "run")
    for name in ("summary.json", "checkpoint.safetensors"):
        (tmp_path / "run" / name).unlink()
    assert fedprior.resume(tmp_path / "run").records == whole.records


def test_without_a_test_split_a_tenth_is_held_out_for_good(tmp_path: Path) -> None:
    root = str(garments(tmp_path))
    tasks = [fedprior.task("hub", seed, data_dir=root, **{**OPTIONS, "test": "none"}) for seed in (0, 1)]
    for task in tasks:
        assert (len(task.data.x), len(task.data.test_x)) == (54, 6)
        assert np.array_equal(task.data.test_x, tasks[0].data.test_x), "whatever the seed"
    raw = {np.asarray(x * 2).round(3).tobytes() for x in tasks[0].data.x}
    assert not raw & {np.asarray(x * 2).round(3).tobytes() for x in tasks[0].data.test_x}


def test_columns_do_not_share_a_cache(tmp_path: Path) -> None:
    root = str(garments(tmp_path, size=[i % 2 for i in range(60)]))
    kinds = fedprior.task("hub", data_dir=root, **OPTIONS)
    sizes = fedprior.task("hub", data_dir=root, **{**OPTIONS, "label": "size"})
    assert (kinds.data.classes, sizes.data.classes) == (3, 2)
    assert sizes.data.y.tolist() == [i % 2 for i in range(60)]


@pytest.mark.parametrize("name", ["iid", "shards", "classes", "quantity", "column"])
def test_any_data_set_is_divided_as_asked(tmp_path: Path, name: str) -> None:
    root = str(garments(tmp_path, shop=[i % 5 for i in range(60)]))
    more: dict[str, object] = {"alpha": 0.3} if name in ("classes", "quantity") else {}
    options = {**OPTIONS, "partition": name, **more}
    if name == "column":
        options = {key: value for key, value in options.items() if key != "clients"} | {"column": "shop"}
    task = fedprior.task("hub", data_dir=root, **options)
    assert task.data.clients == (5 if name == "column" else 4)
    assert sum(task.data.train.sizes) == 60
    if name == "column":
        assert [rows % 5 for rows in task.data.train[2].tolist()] == [2] * 12
        assert [rows % 5 for rows in task.data.test[2].tolist()] == [2] * 4
    assert task.options["partition"] == name


def test_images_are_resized_and_get_the_channels_of_the_others(tmp_path: Path) -> None:
    root = str(garments(tmp_path, sides=(28, 40), colour=("train",)))
    with pytest.raises(DataError, match=r"differ in size \(28×28 to 40×40\); scale them: --set side="):
        fedprior.task("hub", data_dir=root, **OPTIONS)
    task = fedprior.task("hub", data_dir=root, side=20, model="resnet20", **OPTIONS)
    assert task.data.x.shape == (60, 3, 20, 20)
    assert task.data.test_x.shape == (20, 3, 20, 20)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"dataset": ""}, "--set dataset=zalando-datasets/fashion_mnist"),
        ({"dataset": "../../etc"}, "name a data set of the Hub"),
        ({"dataset": "shop/hats"}, "--data-dir must hold shop/hats in the Hub's layout"),
        ({"image": "img"}, "no column img in its split 'train'; it has picture, kind"),
        ({"label": "class"}, "no column class in its split 'train'; it has picture, kind"),
        ({"image": "kind"}, "the column 'kind' of shop/garments does not hold images"),
        ({"test": "test"}, "has no split 'test'; it has train, validation"),
        ({"label": "size"}, r"has train examples without a label \(-1\)"),
        ({"model": "lenet"}, "unknown model 'lenet'; did you mean 'lenet5'"),
        ({"side": 12}, "lenet5 needs square images of at least 16×16 pixels, got 12×12"),
        ({"side": -1}, "side must be at least 0"),
        ({"clients": 70}, "70 clients cannot share 60"),
        ({"partition": "dirichlets"}, "unknown partition 'dirichlets'; did you mean 'dirichlet'"),
        ({"partition": "column"}, "partition=column and column=NAME"),
    ],
)
def test_unsuitable_data_are_one_line_that_says_what_to_do(
    tmp_path: Path, change: dict[str, object], match: str
) -> None:
    root = garments(tmp_path, size=[-1] * 60)
    with pytest.raises(fedprior.FedpriorError, match=match) as caught:
        fedprior.task("hub", data_dir=str(root), **{**OPTIONS, **change})
    assert "\n" not in str(caught.value)


@needs_data
@pytest.mark.parametrize(
    ("name", "clients", "examples"),
    [("cifar10", 100, 50_000), ("cifar100", 500, 50_000), ("mnist-scaffold", 100, 60_000)],
)
def test_the_real_data_sets_have_the_papers_shape(name: str, clients: int, examples: int) -> None:
    task = fedprior.task(name, data_dir=REAL)
    assert task.data.clients == clients
    assert sum(task.data.train.size(s) for s in range(clients)) == examples
