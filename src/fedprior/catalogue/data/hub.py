"""Image sets from the Hugging Face Hub, by name online or from a local folder of the same layout, decoded once.

Only decoding needs `datasets`. The arrays are then kept as a plain .npz. A folder with such a file
(`uoft-cs--cifar10.npz` for `uoft-cs/cifar10`) serves machines that have neither the library nor a network.
"""

import hashlib
import logging
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedprior.core.errors import DataError


@dataclass(frozen=True)
class Source:
    """A data set on the Hub: where it is, and what its columns hold."""

    repository: str
    image: str
    columns: Mapping[str, str]
    """Maps our names to the Hub's: {"label": "fine_label", …}."""
    splits: tuple[str, ...] = ("train", "test")
    """The Hub's names for the training split and, if there is one, the test split."""
    subset: str = ""
    """The configuration, if the data set has several."""
    side: int = 0
    """Images are scaled to this many pixels per side; 0 leaves them as they are."""
    shape: tuple[int, ...] = ()
    """The shape of an image, if known."""


CIFAR10 = Source("uoft-cs/cifar10", "img", {"label": "label"}, shape=(32, 32, 3))
CIFAR100 = Source("uoft-cs/cifar100", "img", {"label": "fine_label", "coarse": "coarse_label"}, shape=(32, 32, 3))
MNIST = Source("ylecun/mnist", "image", {"label": "label"}, shape=(28, 28))
FEMNIST = Source("flwrlabs/femnist", "image", {"label": "character", "writer": "writer_id"}, ("train",), shape=(28, 28))
NAMED = (CIFAR10, CIFAR100, MNIST, FEMNIST)

SOURCES = {source.repository: source for source in NAMED}

OURS = ("train", "test")
Arrays = dict[str, np.ndarray]
"""`train_image`, `train_label`, `test_image`, …"""


def load(source: Source, data_dir: str = "") -> Arrays:
    """Load a set's arrays from an .npz in the data folder or the cache, or decode them from the folder or the Hub."""
    folder = Path(data_dir).expanduser() / source.repository if data_dir else None
    if data_dir and not Path(data_dir).expanduser().is_dir():
        raise DataError(f"the data folder {data_dir} does not exist")
    ready = Path(data_dir).expanduser() / f"{_flat(source)}.npz" if data_dir else None
    if ready is not None and ready.is_file():
        return _read(ready, source)
    if folder is not None and not folder.is_dir():
        raise DataError(f"{folder} does not exist; --data-dir must hold {source.repository} in the Hub's layout")
    path = _cache_file(source, folder)
    if path.is_file():
        return _read(path, source)
    arrays = _decode(source, folder)
    _check(arrays, source, source.repository)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.stem}.{os.getpid()}.part.npz")
    np.savez(temporary, **arrays)  # type: ignore[arg-type]  # numpy's stub takes the first keyword for an option
    temporary.replace(path)
    return arrays


def _flat(source: Source) -> str:
    return source.repository.replace("/", "--")


def _cache_file(source: Source, folder: Path | None) -> Path:
    """One file per set and choice of columns; for a local folder, one per state of its files."""
    cache = Path(os.environ.get("FEDPRIOR_CACHE", Path.home() / ".cache" / "fedprior"))
    about: list[object] = [] if source in NAMED else [source]
    if folder is not None:
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        about += [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = f"-{hashlib.sha256(repr(about).encode()).hexdigest()[:12]}" if about else ""
    return cache / f"{_flat(source)}{key}.npz"


def _read(path: Path, source: Source) -> Arrays:
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read ({error}); delete it to decode the data again") from error
    splits = OURS[: len(source.splits)]
    missing = {f"{split}_{name}" for split in splits for name in ("image", *source.columns)} - set(arrays)
    if missing:
        raise DataError(f"{path} lacks {', '.join(sorted(missing))}; delete it to decode the data again")
    _check(arrays, source, str(path))
    return arrays


def _check(arrays: Arrays, source: Source, where: str) -> None:
    """Refuse arrays that are not 8-bit images, channels last, one label each, in the set's shape if it is known."""
    shapes = set()
    for split in OURS[: len(source.splits)]:
        images = arrays[f"{split}_image"]
        shape = images.shape[1:] if images.shape[3:] != (1,) else images.shape[1:3]
        shapes.add(shape)
        if images.dtype != np.uint8 or len(shape) not in (2, 3) or shape[2:] not in ((), (3,)):
            raise DataError(
                f"{where}: {split}_image must be 8-bit images [N, H, W] or [N, H, W, 3], got {images.dtype} of shape "
                f"{images.shape}"
            )
        if source.shape and shape != source.shape:
            raise DataError(f"{where}: {split}_image must have images of shape {source.shape}, got {shape}")
        for name in source.columns:
            values = arrays[f"{split}_{name}"]
            if values.shape != images.shape[:1] or not len(values):
                raise DataError(
                    f"{where}: {split}_{name} must have one entry per image, got shape {values.shape} for {len(images)}"
                )
            if source in NAMED and name != "writer" and (values.dtype.kind not in "iu" or values.min() < 0):
                raise DataError(f"{where}: {split}_{name} must be whole numbers of at least 0, got {values.dtype}")
    if len(shapes) > 1:
        raise DataError(f"{where}: training and test images differ in shape, {' and '.join(map(str, shapes))}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the Hub's library, which logs every failed attempt without a network. We raise one line at the end."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _decode(source: Source, folder: Path | None) -> Arrays:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"decoding {source.repository} needs the Hugging Face library: pip install 'fedprior[hub]'"
        ) from error
    try:
        with _quiet():
            loaded: Any = datasets.load_dataset(str(folder) if folder else source.repository, source.subset or None)
    except Exception as error:  # the library raises whatever its network stack raises
        raise DataError(
            f"{source.repository} could not be loaded ({type(error).__name__}: {error}); go online once, or pass "
            f"--data-dir with the folder {source.repository} in the Hub's layout"
        ) from error
    arrays: Arrays = {}
    for ours, split in zip(OURS, source.splits, strict=False):
        if split not in loaded:
            raise DataError(f"{source.repository} has no split {split!r}; it has {', '.join(loaded)}")
        absent = {source.image, *source.columns.values()} - set(loaded[split].column_names)
        if absent:
            there = ", ".join(loaded[split].column_names)
            raise DataError(
                f"{source.repository} has no column {', '.join(sorted(absent))} in its split {split!r}; it has {there}"
            )
        arrays[f"{ours}_image"] = _pixels(loaded[split][source.image], source)
        for name, theirs in source.columns.items():
            arrays[f"{ours}_{name}"] = np.asarray(loaded[split][theirs])
    return _alike(arrays, source)


def _alike(arrays: Arrays, source: Source) -> Arrays:
    """Give training and test images the same shape: if only one set has colour, the other gets it too."""
    images = {name: values for name, values in arrays.items() if name.endswith("_image")}
    if len({values.ndim for values in images.values()}) > 1:
        images = {name: v if v.ndim == 4 else v[..., None].repeat(3, -1) for name, v in images.items()}
    if len({values.shape[1:] for values in images.values()}) > 1:
        raise DataError(f"training and test images of {source.repository} differ in size; scale them: --set side=32")
    return {**arrays, **images}


def _pixels(images: Iterable[Any], source: Source) -> np.ndarray:
    """Read images of one size, [N, H, W] for grey or [N, H, W, 3]. What is neither grey nor RGB becomes RGB."""
    listed = list(images)
    if not all(hasattr(image, "convert") for image in listed):
        raise DataError(f"the column {source.image!r} of {source.repository} does not hold images")
    modes = {image.mode for image in listed}
    if len(modes) > 1 or not modes <= {"L", "RGB"}:
        listed = [image.convert("L" if modes <= {"1", "L"} else "RGB") for image in listed]
    if source.side:
        listed = [image.resize((source.side, source.side)) for image in listed]
    sizes = sorted({image.size for image in listed})
    if len(sizes) != 1:
        found = f"{sizes[0][0]}×{sizes[0][1]} to {sizes[-1][0]}×{sizes[-1][1]}" if sizes else "no images"
        raise DataError(f"the images of {source.repository} differ in size ({found}); scale them: --set side=32")
    return np.stack([np.asarray(image) for image in listed])
