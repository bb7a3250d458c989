"""The digits inside the package: 10,000 training and 2,000 test images of MNIST. mnist_mini.txt tells their origin."""

import io
import lzma
from functools import lru_cache
from importlib import resources

import numpy as np

from fedprior.catalogue.data.images import Images, normalise


@lru_cache
def mnist_mini(validation: bool = False, pixels: str = "standard") -> Images:
    """The embedded digits, scaled as `pixels` says; kept, so that runs share them.

    With `validation`, 8,000 of the training images, and the other 2,000 in the place of the test images.
    """
    packed = resources.files("fedprior.catalogue.data").joinpath("mnist_mini.npz.xz").read_bytes()
    arrays = np.load(io.BytesIO(lzma.decompress(packed)), allow_pickle=False)
    train, test, scale = normalise(arrays["train_x"], arrays["test_x"], pixels)
    train_y, test_y = (arrays[name].astype(np.int64) for name in ("train_y", "test_y"))
    if validation:
        return Images(train[:8000], train_y[:8000], train[8000:], train_y[8000:], scale)
    return Images(train, train_y, test, test_y, scale)
