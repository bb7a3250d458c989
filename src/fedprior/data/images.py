"""Labelled images as tensors: normalised by channel, channels first, no augmentation."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Images(NamedTuple):
    """A training and a test set, normalised."""

    x: Tensor
    y: np.ndarray
    test_x: Tensor
    test_y: np.ndarray


def normalise(train: np.ndarray, test: np.ndarray) -> tuple[Tensor, Tensor]:
    """8-bit images [N, H, W] or [N, H, W, C] to [N, C, H, W], less the training set's mean, over its deviation."""
    first, second = _channels_first(train), _channels_first(test)
    mean, deviation = first.mean((0, 2, 3), keepdim=True), first.std((0, 2, 3), keepdim=True)
    return (first - mean) / deviation, (second - mean) / deviation


def _channels_first(images: np.ndarray) -> Tensor:
    x = torch.from_numpy(np.ascontiguousarray(images))
    x = x.unsqueeze(1) if x.dim() == 3 else x.permute(0, 3, 1, 2)
    return x.float().contiguous() / 255
