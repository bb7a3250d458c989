"""The digits that ship with the package: 10,000 training and 2,000 test images of MNIST. See mnist_mini.txt."""

import io
import lzma
from functools import lru_cache
from importlib import resources

import numpy as np

from fedprior.catalogue.data.images import Images, normalise


@lru_cache
def mnist_mini(validation: bool = False, pixels: str = "standard") -> Images:
    """The embedded digits, scaled as `pixels` says. The result is cached, so that runs share it.

    With `validation`, 8,000 training images remain, and the other 2,000 replace the test images.
    """
    packed = resources.files("fedprior.catalogue.data").joinpath("mnist_mini.npz.xz").read_bytes()
    arrays = np.load(io.BytesIO(lzma.decompress(packed)), allow_pickle=False)
    train, test, scale = normalise(arrays["train_x"], arrays["test_x"], pixels)
    train_y, test_y = (arrays[name].astype(np.int64) for name in ("train_y", "test_y"))
    if validation:
        return Images(train[:8000], train_y[:8000], train[8000:], train_y[8000:], scale)
    return Images(train, train_y, test, test_y, scale)
