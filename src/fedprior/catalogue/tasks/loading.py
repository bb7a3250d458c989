"""Images for the named tasks: the splits of a data set, scaled, and a held-out part if asked for."""

from functools import lru_cache

import numpy as np
import torch

from fedprior.catalogue.data import hub
from fedprior.catalogue.data.images import Images, Scale, normalise

HELD_OUT = 0.1


@lru_cache(maxsize=2)
def load(
    repository: str, data_dir: str, validation: bool, pixels: str = "standard"
) -> tuple[Images, tuple[np.ndarray, np.ndarray]]:
    """Training and test images and, where there are any, their coarse labels. Cached, so that runs share one copy."""
    arrays = hub.load(hub.SOURCES[repository], data_dir)
    images, (kept, rows) = split(arrays, validation, pixels)
    coarse = [arrays.get(f"{part}_coarse", arrays[f"{part}_label"]) for part in ("train", tested(validation))]
    return images, (coarse[0][kept], coarse[1][rows])


def tested(validation: bool) -> str:
    """The split that stands in as the test set."""
    return "train" if validation else "test"


def hold_out(arrays: hub.Arrays) -> hub.Arrays:
    """A tenth of the training set as the test set, for a data set without one; always the same tenth."""
    order = np.random.RandomState(0).permutation(len(arrays["train_label"]))
    held = max(round(HELD_OUT * len(order)), 1)
    names = [name.removeprefix("train_") for name in arrays if name.startswith("train_")]
    rows = {"test": np.sort(order[:held]), "train": np.sort(order[held:])}
    return {f"{part}_{name}": arrays[f"train_{name}"][rows[part]] for part in rows for name in names}


def split(
    arrays: hub.Arrays, validation: bool, pixels: str = "standard"
) -> tuple[Images, tuple[np.ndarray, np.ndarray]]:
    """Training and test images, and their rows; for validation both come from the training set."""
    count = len(arrays["train_label"])
    order = np.random.RandomState(0).permutation(count) if validation else np.arange(count)
    held = round(HELD_OUT * count) if validation else 0
    kept, other = np.sort(order[held:]), np.sort(order[:held])
    test = tested(validation)
    rows = other if validation else np.arange(len(arrays["test_label"]))
    pair = arrays["train_image"], arrays[f"{test}_image"]
    x, test_x, scale = normalise(*((pair[0][kept], pair[1][rows]) if validation else pair), pixels)
    labels = (arrays["train_label"][kept].astype(np.int64), arrays[f"{test}_label"][rows].astype(np.int64))
    return Images(x, labels[0], test_x, labels[1], scale), (kept, rows)


@lru_cache(maxsize=1)
def load_femnist(data_dir: str, pixels: str = "standard") -> tuple[torch.Tensor, np.ndarray, np.ndarray, Scale]:
    """Images, characters, writers, and how the images were scaled."""
    arrays = hub.load(hub.FEMNIST, data_dir)
    x, _, scale = normalise(arrays["train_image"], arrays["train_image"][:1], pixels)
    return x, arrays["train_label"].astype(np.int64), arrays["train_writer"], scale
