"""The named tasks, with the paper's settings as defaults, and residual networks on CIFAR as other papers have them.

Every factory takes the seed of the run first, for the partition and the initial weights. Its keyword parameters are the
task's options. With `validation`, a part of the training set takes the place of the test set: use it for tuning. With
`partition_seed`, runs of all seeds share one partition and differ only in their weights, cohorts and batches. `pixels`
says how images are scaled: `data.images.PIXELS`.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from fedprior.catalogue import options
from fedprior.catalogue.data import by_writer, dirichlet, hub, pachinko, single_class
from fedprior.catalogue.data.embedded import mnist_mini as embedded_digits
from fedprior.catalogue.data.images import Images, check_pixels, numbered_labels
from fedprior.catalogue.data.partition import Parts
from fedprior.catalogue.data.schemes import PARTITIONS, divide
from fedprior.catalogue.models import LeNet5, LogisticRegression, ResNet18, ResNet20, for_images, initialise
from fedprior.catalogue.tasks.base import Task
from fedprior.catalogue.tasks.loading import hold_out, load, load_femnist, split, tested
from fedprior.core.errors import SettingError
from fedprior.core.federated import FederatedData, Shards
from fedprior.core.network import Network
from fedprior.core.options import nearest

# The paper's server optimiser, for every method that it compares, and for those that are compared with them here.
ADAM = {"server_optimiser": "Adam(lr=0.001)"}
SPARSE = [f"fed{kind}{more}" for kind in ("sparse", "narrow") for more in ("", "-unstructured", "+scaffold")]
COMPARED = ("fedavg", "fedprox", "feddrop", "fedl1", "fedtopk", "fedsparse-sized", *SPARSE)
# The paper's M-step is 1/S Σ_s, whatever the clients' sizes.
EQUAL = {"weighting": "equal"}
# FedNarrow, which is not the paper's, sends each client half of LeNet-5's neurons: docs/search.md.
DROPOUT = {name: {**ADAM, "linear_rate": 0.5} for name in ("fednarrow", "fednarrow+scaffold", "fedsparse-sized")}


def mnist_mini(
    seed: int,
    *,
    clients: options.Clients = 100,
    alpha: options.Alpha = 10.0,
    init: options.Init = "glorot",
    validation: options.Validation = False,
    pixels: options.Pixels = "standard",
    partition_seed: options.PartitionSeed = None,
) -> Task:
    """LeNet-5 on 12,000 embedded MNIST digits, divided by Dirichlet(α) among clients."""
    chosen = _options(locals())
    images = embedded_digits(validation, pixels)
    parts = dirichlet(images.y, images.test_y, clients, alpha, _either(partition_seed, seed))
    adam = {"server_optimiser": "Adam(lr=0.003)"}
    return _image_task(
        "mnist-mini",
        images,
        parts,
        lambda: initialise(lambda: LeNet5(channels=1, side=28, classes=10), init, seed),
        defaults={"rounds": 40, "batch_size": 10, "evaluate_every": 5},
        # Rates were chosen on a part of the training set; see docs/tasks.md.
        algorithms={
            **dict.fromkeys(COMPARED, adam),
            **{
                name: {**adam, "server_threshold_optimiser": "Adamax(lr=0.0175)"}
                for name in ("fedsparse", "fedsparse-unstructured", "fedsparse+scaffold")
            },
        },
        options=chosen,
    )


def cifar10(
    seed: int,
    *,
    clients: options.Clients = 100,
    alpha: options.Alpha = 1.0,
    init: options.Init = "default",
    data_dir: options.DataDir = "",
    validation: options.Validation = False,
    pixels: options.Pixels = "standard",
    partition_seed: options.PartitionSeed = None,
) -> Task:
    """LeNet-5 on CIFAR-10, divided by Dirichlet(α) among clients: the paper's first experiment."""
    chosen = _options(locals())
    images, _ = load(hub.CIFAR10.repository, data_dir, validation, pixels)
    return _image_task(
        "cifar10",
        images,
        dirichlet(images.y, images.test_y, clients, alpha, _either(partition_seed, seed)),
        lambda: initialise(lambda: LeNet5(channels=3, side=32, classes=10), init, seed),
        classes=10,
        defaults={**EQUAL, "rounds": 1000, "batch_size": 64, "evaluate_every": 10},
        algorithms={**dict.fromkeys(COMPARED, ADAM), **DROPOUT},
        options=chosen,
    )


def cifar100(
    seed: int,
    *,
    clients: options.Clients = 500,
    alpha: options.Alpha = 0.1,
    beta: float = 10.0,
    norm: str = "group",
    init: options.Init = "default",
    data_dir: options.DataDir = "",
    validation: options.Validation = False,
    pixels: options.Pixels = "standard",
    partition_seed: options.PartitionSeed = None,
) -> Task:
    """ResNet20 with group or batch norm on CIFAR-100, divided by Pachinko allocation: the paper's second experiment."""
    chosen = _options(locals())
    images, (coarse, test_coarse) = load(hub.CIFAR100.repository, data_dir, validation, pixels)
    return _image_task(
        "cifar100",
        images,
        pachinko(images.y, coarse, images.test_y, test_coarse, clients, _either(partition_seed, seed), alpha, beta),
        lambda: initialise(lambda: ResNet20(channels=3, classes=100, norm=norm), init, seed),
        classes=100,
        defaults={**EQUAL, "rounds": 6000, "batch_size": 20, "evaluate_every": 50},
        algorithms={
            **dict.fromkeys(COMPARED, ADAM),
            "feddrop": {**ADAM, "conv_rate": 0.1, "output_rate": 0.0},
        },
        options=chosen,
    )


def femnist(
    seed: int,
    *,
    test_fraction: float = 0.1,
    init: options.Init = "default",
    data_dir: options.DataDir = "",
    validation: options.Validation = False,
    pixels: options.Pixels = "standard",
    partition_seed: options.PartitionSeed = None,
) -> Task:
    """LeNet-5 on FEMNIST's 62 characters, one client a writer: the paper's third experiment."""
    chosen = _options(locals())
    x, y, owners, scale = load_femnist(data_dir, pixels)
    division = _either(partition_seed, seed)
    train, test = by_writer(owners, division, test_fraction)
    if validation:  # a second split of each writer's training examples
        writers = np.concatenate([np.full(len(rows), writer) for writer, rows in enumerate(train)])
        everything = np.concatenate(train)
        train, test = ([everything[rows] for rows in part] for part in by_writer(writers, division, test_fraction))
    return _image_task(
        "femnist",
        Images(x, y, x, y, scale),
        (train, test),
        lambda: initialise(lambda: LeNet5(channels=1, side=28, classes=62), init, seed),
        defaults={**EQUAL, "rounds": 6000, "batch_size": 20, "evaluate_every": 50},
        algorithms={
            **dict.fromkeys(COMPARED, ADAM),
            "feddrop": {**ADAM, "conv_rate": 0.2, "linear_rate": 0.4},
            "fedl1": {**ADAM, "strength": 1e-3},
            **DROPOUT,
        },
        options=chosen,
        classes=62,
    )


def _residual(
    name: str, source: hub.Source, build: Callable[[int], nn.Module], seed: int, chosen: Mapping[str, Any]
) -> Task:
    """CIFAR with a residual network and BatchNorm: 100 clients of 500 images, divided by a Dirichlet over classes.

    `concentration` is a class's own, as most papers give it; α of `dirichlet` is divided by the number of classes.
    """
    images, _ = load(source.repository, chosen["data_dir"], chosen["validation"], chosen["pixels"])
    classes, division = int(images.y.max()) + 1, _either(chosen["partition_seed"], seed)
    alpha = chosen["concentration"] * classes
    return _image_task(
        name,
        images,
        dirichlet(images.y, images.test_y, chosen["clients"], alpha, division),
        lambda: initialise(lambda: build(classes), chosen["init"], seed),
        classes=classes,
        defaults={"rounds": 500, "batch_size": 50, "evaluate_every": 10, "clients_per_round": 10},
        # The paper's rates of dropout for ResNet20; the mean for all.
        algorithms={"feddrop": {"conv_rate": 0.1, "output_rate": 0.0}},
        options=chosen,
    )


def _residual_task(name: str, source: hub.Source, build: Callable[[int], nn.Module], what: str) -> Callable[..., Task]:
    """The factory of one such task."""

    def factory(
        seed: int,
        *,
        clients: options.Clients = 100,
        concentration: options.Concentration = 0.5,
        init: options.Init = "default",
        data_dir: options.DataDir = "",
        validation: options.Validation = False,
        pixels: options.Pixels = "standard",
        partition_seed: options.PartitionSeed = None,
    ) -> Task:
        return _residual(name, source, build, seed, _options(locals()))

    factory.__doc__ = f"{what}, divided by a Dirichlet over each client's classes: what recent papers compare on."
    return factory


def mnist_scaffold(
    seed: int,
    *,
    clients: options.Clients = 100,
    init: options.Init = "default",
    data_dir: options.DataDir = "",
    validation: options.Validation = False,
    pixels: options.Pixels = "standard",
    partition_seed: options.PartitionSeed = None,
) -> Task:
    """Logistic regression on MNIST, every user with a single class: the paper's SCAFFOLD experiment."""
    chosen = _options(locals())
    images, _ = load(hub.MNIST.repository, data_dir, validation, pixels)
    return _image_task(
        "mnist-scaffold",
        images,
        single_class(images.y, images.test_y, clients, _either(partition_seed, seed)),
        lambda: initialise(lambda: LogisticRegression(784, 10), init, seed),
        classes=10,
        defaults={**EQUAL, "rounds": 400, "batch_size": 20, "evaluate_every": 10},
        # The only units feed the output, so the gates are the weights'.
        algorithms={
            name: {"structured": False} for one in ("fedsparse", "fednarrow") for name in (one, f"{one}+scaffold")
        },
        options=chosen,
    )


def hub_images(
    seed: int,
    *,
    dataset: str = "",
    image: str = "image",
    label: str = "label",
    train: str = "train",
    test: str = "test",
    subset: str = "",
    side: int = 0,
    model: str = "lenet5",
    partition: str = "dirichlet",
    clients: options.DividedClients = 100,
    alpha: options.DividedAlpha = 1.0,
    shards: options.DividedShards = 2,
    column: str = "",
    init: options.Init = "default",
    data_dir: options.DataDir = "",
    validation: options.Validation = False,
    pixels: options.Pixels = "standard",
    partition_seed: options.PartitionSeed = None,
) -> Task:
    """Any set of labelled images of the Hugging Face Hub, by name and columns, divided as `partition` says."""
    chosen = _options(locals())
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", dataset):
        raise SettingError(
            f"name a data set of the Hub, such as --set dataset=zalando-datasets/fashion_mnist; got {dataset!r}"
        )
    if side < 0:
        raise SettingError(f"side must be at least 0, got {side}")
    if partition not in PARTITIONS:
        raise nearest(partition, PARTITIONS, "partition")
    if (partition == "column") != bool(column):
        raise SettingError("partition=column and column=NAME, the column of users, must be given together")
    splits = (train,) if test == "none" else (train, test)
    columns = {"label": label} | ({"owner": column} if column else {})
    arrays = hub.load(hub.Source(dataset, image, columns, splits, subset, side), data_dir)
    arrays = numbered_labels(arrays, dataset)
    arrays = arrays if "test_label" in arrays else hold_out(arrays)
    images, (kept, rows) = split(arrays, validation, pixels)
    owners = (arrays["train_owner"][kept], arrays[f"{tested(validation)}_owner"][rows]) if column else (None, ())
    classes = int(max(images.y.max(), images.test_y.max())) + 1
    return _image_task(
        "hub",
        images,
        divide(
            images.y,
            images.test_y,
            partition=partition,
            clients=clients,
            alpha=alpha,
            shards_each=shards,
            owners=owners[0],
            test_owners=owners[1],
            seed=_either(partition_seed, seed),
        ),
        lambda: initialise(lambda: for_images(model, tuple(images.x.shape[1:]), classes), init, seed),
        defaults={"rounds": 100, "batch_size": 20, "evaluate_every": 5},
        algorithms=dict.fromkeys(COMPARED, ADAM),
        options=chosen,
        classes=classes,
    )


def _resnet18(classes: int) -> nn.Module:
    return ResNet18(channels=3, classes=classes, norm="batch")


def _resnet20(classes: int) -> nn.Module:
    return ResNet20(channels=3, classes=classes, norm="batch")


TASKS: dict[str, Callable[..., Task]] = {
    "mnist-mini": mnist_mini,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "femnist": femnist,
    "mnist-scaffold": mnist_scaffold,
    "cifar10-resnet18": _residual_task("cifar10-resnet18", hub.CIFAR10, _resnet18, "ResNet18 on CIFAR-10"),
    "cifar100-resnet18": _residual_task("cifar100-resnet18", hub.CIFAR100, _resnet18, "ResNet18 on CIFAR-100"),
    "cifar10-resnet20": _residual_task("cifar10-resnet20", hub.CIFAR10, _resnet20, "ResNet20 on CIFAR-10"),
    "cifar100-resnet20": _residual_task("cifar100-resnet20", hub.CIFAR100, _resnet20, "ResNet20 on CIFAR-100"),
    "hub": hub_images,
}


NOT_OPTIONS = ("seed", "name", "source", "build")
"""The run's seed, and what a closure has beside its options."""


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """A factory's options: everything it was called with except the seed."""
    check_pixels(given["pixels"])  # before anything is downloaded
    return {name: value for name, value in given.items() if name not in NOT_OPTIONS}


def _either(partition_seed: int | None, seed: int) -> int:
    """The seed of the partition: the run's, if it has none of its own."""
    return seed if partition_seed is None else partition_seed


def _image_task(
    name: str,
    images: Images,
    parts: Parts,
    build: Callable[[], nn.Module],
    *,
    defaults: Mapping[str, Any],
    algorithms: Mapping[str, Mapping[str, Any]],
    options: Mapping[str, Any],
    classes: int | None = None,
) -> Task:
    y, test_y = torch.from_numpy(images.y), torch.from_numpy(images.test_y)
    classes = classes or int(max(images.y.max(), images.test_y.max())) + 1
    data = FederatedData(images.x, y, images.test_x, test_y, Shards.of(parts[0]), Shards.of(parts[1]), classes)
    data.check()
    return Task(name, Network(build(), images.x[0]), data, defaults, algorithms, options, images.scale)
