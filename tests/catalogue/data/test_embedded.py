"""The digits inside the package."""

from importlib import resources

import numpy as np
import pytest
import torch

import fedprior
from fedprior.catalogue.data.embedded import mnist_mini


@pytest.fixture(scope="module")
def images():
    return mnist_mini()


def test_ten_thousand_training_and_two_thousand_test_digits(images):
    assert images.x.shape == (10_000, 1, 28, 28)
    assert images.test_x.shape == (2_000, 1, 28, 28)
    assert images.x.dtype == images.test_x.dtype == torch.float32
    assert np.bincount(images.y).tolist() == [1000] * 10
    assert np.bincount(images.test_y).tolist() == [200] * 10


def test_pixels_are_normalised(images):
    assert float(images.x.mean()) == pytest.approx(0, abs=1e-4)
    assert float(images.x.std()) == pytest.approx(1, abs=1e-4)
    # Both sets by the same numbers: black is the same value in each, and so is white.
    assert float(images.x.min()) == float(images.test_x.min())
    assert float(images.x.max()) == float(images.test_x.max())
    # MNIST's own mean and deviation are 0.1307 and 0.3081 of white.
    black, white = float(images.x.min()), float(images.x.max())
    assert -black / (white - black) == pytest.approx(0.1307, abs=0.005)
    assert 1 / (white - black) == pytest.approx(0.3081, abs=0.005)


def test_symmetric_pixels_go_from_minus_one_to_one():
    images = mnist_mini(pixels="symmetric")
    for x in (images.x, images.test_x):
        assert (float(x.min()), float(x.max())) == (-1, 1)
    assert images.scale == ((0.5,), (0.5,))


def test_embedded_digits_look_like_digits(images):
    """The nearest class mean recognises four of five; mixed-up labels would make it one of ten."""
    means = torch.stack([images.x[images.y == c].mean(0) for c in range(10)]).flatten(1)
    nearest = torch.cdist(images.test_x.flatten(1), means).argmin(1)
    assert (nearest.numpy() == images.test_y).mean() > 0.78


def test_no_test_digit_is_a_training_digit(images):
    train = {image.numpy().tobytes() for image in images.x}
    assert len(train) == 10_000
    assert not any(image.numpy().tobytes() in train for image in images.test_x)


def test_the_file_is_small_and_names_its_source():
    folder = resources.files("fedprior.catalogue.data")
    assert len(folder.joinpath("mnist_mini.npz.xz").read_bytes()) <= 3_000_000
    about = folder.joinpath("mnist_mini.txt").read_text(encoding="utf-8")
    assert "LeCun" in about
    assert "Creative Commons" in about


def test_the_task_is_lenet5_over_a_hundred_clients():
    task = fedprior.task("mnist-mini")
    assert task.data.clients == 100
    assert {task.data.train.size(c) for c in range(100)} == {100}
    assert {task.data.test.size(c) for c in range(100)} == {20}
    shapes = {name: tuple(value.shape) for name, value in task.network.params().items()}
    assert shapes["conv1.weight"] == (32, 1, 5, 5)
    assert shapes["conv2.weight"] == (64, 32, 5, 5)
    assert shapes["fc1.weight"] == (512, 1024)
    assert shapes["fc2.weight"] == (10, 512)
    other = fedprior.task("mnist-mini", seed=1)
    assert not torch.equal(task.data.train.rows, other.data.train.rows)
    assert not torch.equal(task.network.params()["fc2.weight"], other.network.params()["fc2.weight"])
