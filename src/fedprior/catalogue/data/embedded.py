"""What ships with the package: 12,000 digits of MNIST and eight plays of Shakespeare.

See mnist_mini.txt and shakespeare_mini.txt.
"""

import io
import json
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
    arrays = np.load(io.BytesIO(_unpacked("mnist_mini.npz.xz")), allow_pickle=False)
    train, test, scale = normalise(arrays["train_x"], arrays["test_x"], pixels)
    train_y, test_y = (arrays[name].astype(np.int64) for name in ("train_y", "test_y"))
    if validation:
        return Images(train[:8000], train_y[:8000], train[8000:], train_y[8000:], scale)
    return Images(train, train_y, test, test_y, scale)


def shakespeare_mini() -> dict[str, str]:
    """The embedded plays, by name."""
    plays: dict[str, str] = json.loads(_unpacked("shakespeare_mini.json.xz"))
    return plays


def _unpacked(name: str) -> bytes:
    return lzma.decompress(resources.files("fedprior.catalogue.data").joinpath(name).read_bytes())
