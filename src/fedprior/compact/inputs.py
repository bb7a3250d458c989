"""A user's images and arrays as a network's inputs: the same scale, shape and type as in training."""

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from fedprior.data.images import Scale
from fedprior.errors import DataError, SettingError

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
ARRAYS = (("x", "y"), ("test_x", "test_y"), ("test_image", "test_label"))


class Reader(NamedTuple):
    """What a network takes in."""

    shape: tuple[int, ...]
    """Of one input."""
    dtype: torch.dtype
    scale: Scale | None
    """How pixels become inputs; None: only arrays of real numbers can be read."""
    resize: bool = False

    def read(self, paths: Sequence[Path]) -> tuple[list[str], Tensor]:
        """Image files, folders of them and .npy arrays, in order, each input with a name."""
        names: list[str] = []
        parts: list[Tensor] = []
        for path in paths:
            found = sorted(p for p in path.rglob("*") if p.suffix.lower() in IMAGES) if path.is_dir() else [path]
            if not found:
                raise DataError(f"{path} holds no images")
            for file in found:
                inputs = self.array(_load(file), file) if file.suffix.lower() == ".npy" else self.image(file)
                names += [str(file)] if len(inputs) == 1 else [f"{file}[{i}]" for i in range(len(inputs))]
                parts.append(inputs)
        return names, torch.cat(parts)

    def labelled(self, path: Path) -> tuple[Tensor, Tensor]:
        """Inputs and labels: an .npz with x and y, or a folder with one folder of images a class, named by number."""
        if not path.is_dir():
            x, y = _labelled_arrays(path)
            inputs, labels = self.array(x, path), torch.from_numpy(y.astype(np.int64))
        else:
            files = sorted(p for p in path.glob("*/*") if p.suffix.lower() in IMAGES)
            if not files or not all(file.parent.name.isdecimal() for file in files):
                raise DataError(f"{path} must hold one folder of images a class, named 0, 1, 2, …")
            inputs = self.read(files)[1]
            labels = torch.tensor([int(file.parent.name) for file in files])
        if labels.shape != (len(inputs),):
            raise DataError(f"{path} holds {len(inputs)} inputs, but labels of shape {tuple(labels.shape)}")
        return inputs, labels

    def array(self, values: np.ndarray, path: Path) -> Tensor:
        """8-bit images, to be scaled, or real numbers, which are inputs already; one or many."""
        if values.dtype == np.uint8:
            grey = self.shape[0] == 1
            stacked = values if values.ndim == (3 if grey else 4) else values[None]
            return self._scaled(stacked, path)
        if values.dtype.kind not in "fiu":
            raise DataError(f"{path} holds {values.dtype} values, not numbers")
        inputs = torch.from_numpy(np.ascontiguousarray(values, values.dtype.newbyteorder("=")))
        inputs = inputs if inputs.dim() == len(self.shape) + 1 else inputs.unsqueeze(0)
        return self._checked(inputs, path)

    def image(self, path: Path) -> Tensor:
        """One image file."""
        try:
            from PIL import Image
        except ImportError as error:
            raise SettingError("reading image files needs Pillow: pip install 'fedprior[export]'") from error
        if not path.is_file():
            raise DataError(f"{path} does not exist")
        try:
            with Image.open(path) as file:
                picture = file.convert("L" if self.shape[0] == 1 else "RGB")
        except OSError as error:
            raise DataError(f"{path} cannot be read as an image: {error}") from error
        height, width = self.shape[-2:]
        if picture.size != (width, height) and self.resize:
            picture = picture.resize((width, height), Image.Resampling.BILINEAR)
        return self._scaled(np.array(picture)[None], path)

    def _scaled(self, images: np.ndarray, path: Path) -> Tensor:
        if self.scale is None or len(self.shape) != 3:
            raise DataError(f"{path} holds pixels, but this network was not trained on images; give real numbers")
        return self._checked(self.scale(images), path)

    def _checked(self, inputs: Tensor, path: Path) -> Tensor:
        if tuple(inputs.shape[1:]) != self.shape:
            hint = "; --resize makes images fit" if self.scale else ""
            raise DataError(f"{path} holds inputs of shape {tuple(inputs.shape[1:])}, not {self.shape}{hint}")
        inputs = inputs.to(self.dtype)
        if not bool(inputs.isfinite().all()):
            raise DataError(f"{path} holds numbers that are not finite")
        return inputs


def _load(path: Path) -> np.ndarray:
    """The array of an .npy file."""
    found = _loaded(path)
    if not isinstance(found, np.ndarray):
        raise DataError(f"{path} holds several arrays; give one as .npy")
    return found


def _labelled_arrays(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels of an .npz file."""
    found = _loaded(path)
    names = next((pair for pair in ARRAYS if isinstance(found, dict) and all(name in found for name in pair)), None)
    if names is None:
        raise DataError(f"{path} must hold arrays named x and y")
    x, y = found[names[0]], found[names[1]]
    if y.dtype.kind not in "iu":
        raise DataError(f"{path} holds labels that are {y.dtype}, not whole numbers")
    return x, y


def _loaded(path: Path) -> np.ndarray | dict[str, np.ndarray]:
    """The one array or the named arrays of a numpy file, all read, so that nothing can fail later."""
    try:
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            return loaded if isinstance(loaded, np.ndarray) else dict(loaded)
    except (OSError, ValueError, EOFError, BadZipFile, zlib.error) as error:
        raise DataError(f"{path} cannot be read as a numpy file: {error}") from error
