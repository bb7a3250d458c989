"""Labelled images as tensors: scaled by channel, channels first, without augmentation."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedprior.core.errors import DataError


class Scale(NamedTuple):
    """How pixels from 0 to 1 become a network's inputs: (pixel − mean) / deviation, channel by channel."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def __call__(self, images: np.ndarray) -> Tensor:
        """Convert 8-bit images [N, H, W] or [N, H, W, C] to inputs [N, C, H, W]."""
        mean, deviation = (torch.tensor(values).reshape(1, -1, 1, 1) for values in self)
        return _channels_first(images).sub_(mean).div_(deviation)


class Images(NamedTuple):
    """A training and a test set, scaled."""

    x: Tensor
    y: np.ndarray
    test_x: Tensor
    test_y: np.ndarray
    scale: Scale


PIXELS = ("standard", "symmetric")
"""(pixel − mean) / deviation of the training set, channel by channel; or (pixel − 0.5) / 0.5, from −1 to 1."""


def normalise(train: np.ndarray, test: np.ndarray, pixels: str = "standard") -> tuple[Tensor, Tensor, Scale]:
    """Convert 8-bit images [N, H, W] or [N, H, W, C] to [N, C, H, W], scaled as `pixels` says; see PIXELS."""
    first, second = _channels_first(train), _channels_first(test)
    if pixels == "symmetric":
        mean = deviation = torch.full((1, first.shape[1], 1, 1), 0.5)
    else:
        mean, deviation = first.mean((0, 2, 3), keepdim=True), first.std((0, 2, 3), keepdim=True)
    scale = Scale(tuple(mean.flatten().tolist()), tuple(deviation.flatten().tolist()))
    return first.sub_(mean).div_(deviation), second.sub_(mean).div_(deviation), scale


def numbered_labels(arrays: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """Renumber the labels, which may be numbers or words, as 0 … C − 1 in sorted order."""
    splits = [split for split in ("train", "test") if f"{split}_label" in arrays]
    for split in splits:
        labels = arrays[f"{split}_label"]
        if labels.dtype.kind not in "iubU" or labels.ndim != 1:
            raise DataError(f"the {split} labels of {name} are neither whole numbers nor words; choose another column")
        if labels.dtype.kind == "i" and len(labels) and labels.min() < 0:
            raise DataError(f"{name} has {split} examples without a label ({labels.min()}); choose another split")
    known = np.unique(np.concatenate([arrays[f"{split}_label"] for split in splits]))
    numbers = {f"{split}_label": np.searchsorted(known, arrays[f"{split}_label"]) for split in splits}
    return {**arrays, **numbers}


def _channels_first(images: np.ndarray) -> Tensor:
    x = torch.from_numpy(np.ascontiguousarray(images))
    x = x.unsqueeze(1) if x.dim() == 3 else x.permute(0, 3, 1, 2)
    return x.contiguous().float().div_(255)  # bytes are moved, not floats
