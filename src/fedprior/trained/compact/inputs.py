"""Turn a user's images and arrays into inputs with the same scale, shape and type as in training."""

import warnings
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from fedprior.catalogue.data.images import Scale
from fedprior.core.errors import DataError, FedpriorWarning, SettingError

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
ARRAYS = (("x", "y"), ("test_x", "test_y"), ("test_image", "test_label"))


class Reader(NamedTuple):
    """Reads the inputs of a network."""

    shape: tuple[int, ...]
    """The shape of one input."""
    dtype: torch.dtype
    scale: Scale | None
    """How pixels become inputs; None if the network was not trained on images, so that it can only read arrays."""
    resize: bool = False

    def read(self, paths: Sequence[Path]) -> tuple[list[str], Tensor]:
        """Read image files, folders of images and arrays (.npy, .npz), in order; return a name for each input."""
        names: list[str] = []
        parts: list[Tensor] = []
        for path in paths:
            found = sorted(p for p in path.rglob("*") if p.suffix.lower() in IMAGES) if path.is_dir() else [path]
            if not found:
                raise DataError(f"{path} holds no images ({', '.join(IMAGES)})")
            for file in found:
                inputs = self.array(_load(file), file) if file.suffix.lower() in (".npy", ".npz") else self.image(file)
                names += [str(file)] if len(inputs) == 1 else [f"{file}[{i}]" for i in range(len(inputs))]
                parts.append(inputs)
        return names, torch.cat(parts)

    def labelled(self, path: Path, like: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Read inputs and targets: an .npz with x and y, or a folder with one numbered folder of images per class.

        Targets are `like` those in training. Without `like`, there is one whole number per input.
        """
        like = torch.zeros(1, dtype=torch.int64) if like is None else like
        if not path.is_dir():
            x, y = _labelled_arrays(path)
            if y.dtype.kind not in ("fiu" if like.is_floating_point() else "iu"):
                wanted = "numbers" if like.is_floating_point() else "whole numbers"
                raise DataError(f"{path} holds labels that are {y.dtype}, not {wanted}")
            inputs = self.array(x, path)
            labels = torch.from_numpy(y.astype(np.float64 if y.dtype.kind == "f" else np.int64)).to(like.dtype)
        else:
            files = sorted(p for p in path.glob("*/*") if p.suffix.lower() in IMAGES)
            if not files or not all(file.parent.name.isdecimal() for file in files):
                raise DataError(f"{path} must hold one folder of images per class, named 0, 1, 2, …")
            inputs = self.read(files)[1]
            labels = torch.tensor([int(file.parent.name) for file in files])
        if labels.shape != (len(inputs), *like.shape[1:]):
            expected = f", not {(len(inputs), *like.shape[1:])}"
            raise DataError(f"{path} holds {len(inputs)} inputs, but labels of shape {tuple(labels.shape)}{expected}")
        if not bool(labels.isfinite().all()):
            raise DataError(f"{path} holds labels that are not finite")
        return inputs, labels

    def array(self, values: np.ndarray, path: Path) -> Tensor:
        """Read one input or many. Whole numbers are pixels if the network was trained on images, else inputs."""
        if values.dtype.kind not in "fiu":
            raise DataError(f"{path} holds {values.dtype} values, not numbers")
        if values.dtype == np.uint8 and self.scale is None and self.dtype.is_floating_point:
            raise DataError(f"{path} holds pixels, but this network was not trained on images; use real numbers")
        stacked = self._stacked(values)
        if stacked is None:
            where = ", channels first or last" if self.scale else ""
            raise DataError(f"{path} has shape {values.shape}, not that of one or many inputs {self.shape}{where}")
        if not stacked.size:
            raise DataError(f"{path} holds no inputs")
        whole = stacked.dtype.kind in "iu"
        numbers = np.ascontiguousarray(stacked, np.int64 if whole else np.float64)
        low, high = numbers.min(), numbers.max()
        if not np.isfinite([low, high]).all():
            raise DataError(f"{path} holds numbers that are not finite")
        if whole and self.scale is not None:
            if low < 0 or high > 255:
                raise DataError(f"{path} holds whole numbers from {low} to {high}; pixels run from 0 to 255")
            return self.scale(np.moveaxis(numbers, 1, -1).astype(np.uint8)).to(self.dtype)
        self._check_range(float(low), float(high), path)
        if not self.dtype.is_floating_point and not np.array_equal(numbers, np.round(numbers)):
            raise DataError(f"{path} holds fractional numbers, but this network reads whole numbers")
        return torch.from_numpy(numbers).to(self.dtype)

    def _stacked(self, values: np.ndarray) -> np.ndarray | None:
        """The array as [N, *shape], wherever its channels are, or None if its shape does not fit."""
        ways: list[tuple[tuple[int, ...], Callable[[np.ndarray], np.ndarray]]] = [(self.shape, lambda many: many)]
        if len(self.shape) == 3 and self.scale is not None:
            channels, height, width = self.shape
            ways.append(((height, width, channels), lambda many: np.moveaxis(many, -1, 1)))
            ways += [((height, width), lambda many: many[:, None])] if channels == 1 else []
        for shape, arranged in ways:
            if values.shape[1:] == shape and values.ndim > len(shape):
                return arranged(values)
            if values.shape == shape:
                return arranged(values[None])
        return None

    def _check_range(self, low: float, high: float, path: Path) -> None:
        """Refuse real numbers that cannot be inputs, and warn about those that look like pixels."""
        if self.scale is None:
            return
        least = min(-mean / deviation for mean, deviation in zip(*self.scale, strict=True))
        most = max((1 - mean) / deviation for mean, deviation in zip(*self.scale, strict=True))
        wide = 5 * (most - least)  # allows for added noise, but not for pixels from 0 to 255
        if low < least - wide or high > most + wide:
            raise DataError(
                f"{path} holds numbers from {low:g} to {high:g}, but this network's inputs run from {least:.3g} to "
                f"{most:.3g}; pass pixels as whole numbers from 0 to 255 (uint8), which fedprior scales"
            )
        if low >= 0 and high <= 1 and least < 0:
            warnings.warn(
                f"{path} holds numbers from {low:g} to {high:g}, used as inputs without scaling; if they are pixels, "
                "pass them as whole numbers from 0 to 255 (uint8), which fedprior scales",
                FedpriorWarning,
                stacklevel=2,
            )

    def image(self, path: Path) -> Tensor:
        """Read one image file."""
        try:
            from PIL import Image
        except ImportError as error:
            raise SettingError("reading image files needs Pillow: pip install 'fedprior[export]'") from error
        if not path.is_file():
            raise DataError(f"{path} does not exist")
        if self.scale is None or len(self.shape) != 3:
            raise DataError(f"{path} is an image, but this network was not trained on images; use an array (.npy)")
        try:
            with Image.open(path) as file:
                picture = file.convert("L" if self.shape[0] == 1 else "RGB")
        except Exception as error:  # the type that Pillow raises depends on the format
            raise DataError(f"{path} cannot be read as an image: {error}") from error
        height, width = self.shape[-2:]
        if picture.size != (width, height) and not self.resize:
            found = f"{picture.size[1]}×{picture.size[0]}"
            raise DataError(f"{path} has {found} pixels, not {height}×{width}; --resize resizes images")
        if picture.size != (width, height):
            picture = picture.resize((width, height), Image.Resampling.BILINEAR)
        return self.array(np.array(picture)[None], path)


def targets_of(path: Path, real: torch.dtype) -> Tensor | None:
    """Targets of the type and shape that a file's have, real numbers of this type; None for a folder of images."""
    if path.is_dir():
        return None
    y = _labelled_arrays(path)[1]
    return torch.zeros(0, *y.shape[1:], dtype=real if y.dtype.kind == "f" else torch.int64)


def _load(path: Path) -> np.ndarray:
    """The array of an .npy file, or the inputs of an .npz file."""
    found = _loaded(path)
    if not isinstance(found, dict):
        return found
    named = [x for x, _ in ARRAYS if x in found] or list(found)
    if not named or (len(named) > 1 and named[0] not in ("x", "test_x", "test_image")):
        raise DataError(f"{path} holds {len(found)} arrays, none of which is named x; save the inputs as .npy")
    return found[named[0]]


def _labelled_arrays(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels of an .npz file."""
    found = _loaded(path)
    names = next((pair for pair in ARRAYS if isinstance(found, dict) and all(name in found for name in pair)), None)
    if names is None:
        has = f"it has {', '.join(found) or 'none'}" if isinstance(found, dict) else "it is a single array"
        raise DataError(f"{path} must hold arrays named x and y, as np.savez(FILE, x=…, y=…) writes; {has}")
    assert isinstance(found, dict)
    return found[names[0]], found[names[1]]


def _loaded(path: Path) -> np.ndarray | dict[str, np.ndarray]:
    """The single array or the named arrays of a numpy file, all read at once so that nothing can fail later."""
    if not path.exists():
        raise DataError(f"{path} does not exist")
    try:
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            return loaded if isinstance(loaded, np.ndarray) else dict(loaded)
    except (OSError, ValueError, EOFError, BadZipFile, zlib.error) as error:
        raise DataError(f"{path} cannot be read as a numpy file: {error}") from error
