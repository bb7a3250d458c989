"""The digits inside the package: 10,000 training and 2,000 test images of MNIST. mnist_mini.txt tells their origin."""

import io
import lzma
from importlib import resources
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Images(NamedTuple):
    """A labelled image set, normalised, channels first."""

    x: Tensor
    y: np.ndarray
    test_x: Tensor
    test_y: np.ndarray


def mnist_mini() -> Images:
    """The embedded digits, with the mean and deviation of the training pixels taken out."""
    packed = resources.files("fedprior.data").joinpath("mnist_mini.npz.xz").read_bytes()
    arrays = np.load(io.BytesIO(lzma.decompress(packed)), allow_pickle=False)
    train, test = (torch.from_numpy(arrays[name]).unsqueeze(1).float() / 255 for name in ("train_x", "test_x"))
    mean, deviation = train.mean(), train.std()
    labels = (arrays[name].astype(np.int64) for name in ("train_y", "test_y"))
    train_y, test_y = labels
    return Images((train - mean) / deviation, train_y, (test - mean) / deviation, test_y)
