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

from fedprior.catalogue.data import by_writer, dirichlet, hub, pachinko, single_class
from fedprior.catalogue.data.embedded import mnist_mini as embedded_digits
from fedprior.catalogue.data.images import Images, numbered_labels
from fedprior.catalogue.data.partition import Parts
from fedprior.catalogue.data.schemes import PARTITIONS, divide
from fedprior.catalogue.models import LeNet5, LogisticRegression, ResNet18, ResNet20, for_images, initialise
from fedprior.catalogue.tasks import options
from fedprior.catalogue.tasks.base import Task
from fedprior.catalogue.tasks.loading import hold_out, load_femnist, split, tested
from fedprior.catalogue.tasks.options import OfImages, Stored
from fedprior.catalogue.tasks.texts import shakespeare, shakespeare_mini
from fedprior.core.errors import SettingError
from fedprior.core.federated import FederatedData, Shards
from fedprior.core.network import Network
from fedprior.core.options import nearest

STORED = Stored()
# The paper's server optimiser, for every method that it compares, and for those that are compared with them here.
ADAM = {"server_optimiser": "Adam(lr=0.001)"}
SPARSE = [f"fed{kind}{more}" for kind in ("sparse", "narrow") for more in ("", "-unstructured", "+scaffold")]
COMPARED = ("fedavg", "fedprox", "fedgauss", "feddrop", "fedl1", "fedtopk", "fedsparse-sized", *SPARSE)
# The paper's M-step is 1/S Σ_s, whatever the clients' sizes.
EQUAL = {"weighting": "equal"}
# Chosen on held-out images of seed 7: docs/search.md.
COLD = {"fedgauss": {**ADAM, "examples": 5e5, "decay": 3e-4}}
# FedNarrow, which is not the paper's, sends each client half of LeNet-5's neurons: docs/search.md.
DROPOUT = {name: {**ADAM, "linear_rate": 0.5} for name in ("fednarrow", "fednarrow+scaffold", "fedsparse-sized")}


def mnist_mini(
    seed: int,
    *,
    clients: options.Clients = 100,
    alpha: options.Alpha = 10.0,
    embedded: OfImages = OfImages(init="glorot"),
) -> Task:
    """LeNet-5 on 12,000 embedded MNIST digits, divided by Dirichlet(α) among clients."""
    images = embedded_digits(embedded.validation, embedded.pixels)
    parts = dirichlet(images.y, images.test_y, clients, alpha, embedded.division(seed))
    adam = {"server_optimiser": "Adam(lr=0.003)"}
    return _image_task(
        "mnist-mini",
        images,
        parts,
        lambda: initialise(lambda: LeNet5(channels=1, side=28, classes=10), embedded.init, seed),
        defaults={"rounds": 40, "batch_size": 10, "evaluate_every": 5},
        # Rates were chosen on a part of the training set; see docs/tasks.md.
        algorithms={
            **dict.fromkeys(COMPARED, adam),
            **{
                name: {**adam, "server_threshold_optimiser": "Adamax(lr=0.0175)"}
                for name in ("fedsparse", "fedsparse-unstructured", "fedsparse+scaffold")
            },
        },
    )


def cifar10(
    seed: int,
    *,
    clients: options.Clients = 100,
    alpha: options.Alpha = 1.0,
    stored: Stored = STORED,
) -> Task:
    """LeNet-5 on CIFAR-10, divided by Dirichlet(α) among clients: the paper's first experiment."""
    images, _ = stored.images(hub.CIFAR10)
    return _image_task(
        "cifar10",
        images,
        dirichlet(images.y, images.test_y, clients, alpha, stored.division(seed)),
        lambda: initialise(lambda: LeNet5(channels=3, side=32, classes=10), stored.init, seed),
        classes=10,
        defaults={**EQUAL, "rounds": 1000, "batch_size": 64, "evaluate_every": 10},
        algorithms={**dict.fromkeys(COMPARED, ADAM), **DROPOUT, **COLD},
    )


def cifar100(
    seed: int,
    *,
    clients: options.Clients = 500,
    alpha: options.Alpha = 0.1,
    beta: options.Beta = 10.0,
    norm: options.Norm = "group",
    stored: Stored = STORED,
) -> Task:
    """ResNet20 with group or batch norm on CIFAR-100, divided by Pachinko allocation: the paper's second experiment."""
    images, (coarse, test_coarse) = stored.images(hub.CIFAR100)
    return _image_task(
        "cifar100",
        images,
        pachinko(images.y, coarse, images.test_y, test_coarse, clients, stored.division(seed), alpha, beta),
        lambda: initialise(lambda: ResNet20(channels=3, classes=100, norm=norm), stored.init, seed),
        classes=100,
        defaults={**EQUAL, "rounds": 6000, "batch_size": 20, "evaluate_every": 50},
        algorithms={
            **dict.fromkeys(COMPARED, ADAM),
            "feddrop": {**ADAM, "conv_rate": 0.1, "output_rate": 0.0},
        },
    )


def femnist(
    seed: int,
    *,
    test_fraction: options.TestFraction = 0.1,
    stored: Stored = STORED,
) -> Task:
    """LeNet-5 on FEMNIST's 62 characters, one client a writer: the paper's third experiment."""
    x, y, owners, scale = load_femnist(stored.data_dir, stored.pixels)
    division = stored.division(seed)
    train, test = by_writer(owners, division, test_fraction)
    if stored.validation:  # a second split of each writer's training examples
        writers = np.concatenate([np.full(len(rows), writer) for writer, rows in enumerate(train)])
        everything = np.concatenate(train)
        train, test = ([everything[rows] for rows in part] for part in by_writer(writers, division, test_fraction))
    return _image_task(
        "femnist",
        Images(x, y, x, y, scale),
        (train, test),
        lambda: initialise(lambda: LeNet5(channels=1, side=28, classes=62), stored.init, seed),
        defaults={**EQUAL, "rounds": 6000, "batch_size": 20, "evaluate_every": 50},
        algorithms={
            **dict.fromkeys(COMPARED, ADAM),
            "feddrop": {**ADAM, "conv_rate": 0.2, "linear_rate": 0.4},
            "fedl1": {**ADAM, "strength": 1e-3},
            **DROPOUT,
        },
        classes=62,
    )


def _residual(name: str, source: hub.Source, build: Callable[[int], nn.Module], what: str) -> Callable[..., Task]:
    """The factory of CIFAR with a residual network and BatchNorm: a Dirichlet over classes, as recent papers have it.

    `concentration` is a class's own, as most papers give it; α of `dirichlet` is divided by the number of classes.
    """

    def factory(
        seed: int,
        *,
        clients: options.Clients = 100,
        concentration: options.Concentration = 0.5,
        stored: Stored = STORED,
    ) -> Task:
        images, _ = stored.images(source)
        classes = int(images.y.max()) + 1
        return _image_task(
            name,
            images,
            dirichlet(images.y, images.test_y, clients, concentration * classes, stored.division(seed)),
            lambda: initialise(lambda: build(classes), stored.init, seed),
            classes=classes,
            defaults={"rounds": 500, "batch_size": 50, "evaluate_every": 10, "clients_per_round": 10},
            # The paper's rates of dropout for ResNet20; the mean for all.
            algorithms={"feddrop": {"conv_rate": 0.1, "output_rate": 0.0}},
        )

    factory.__doc__ = f"{what}, divided by a Dirichlet over each client's classes: what recent papers compare on."
    return factory


def mnist_scaffold(
    seed: int,
    *,
    clients: options.Clients = 100,
    stored: Stored = STORED,
) -> Task:
    """Logistic regression on MNIST, every user with a single class: the paper's SCAFFOLD experiment."""
    images, _ = stored.images(hub.MNIST)
    return _image_task(
        "mnist-scaffold",
        images,
        single_class(images.y, images.test_y, clients, stored.division(seed)),
        lambda: initialise(lambda: LogisticRegression(784, 10), stored.init, seed),
        classes=10,
        defaults={**EQUAL, "rounds": 400, "batch_size": 20, "evaluate_every": 10},
        # The only units feed the output, so the gates are the weights'.
        algorithms={
            name: {"structured": False} for one in ("fedsparse", "fednarrow") for name in (one, f"{one}+scaffold")
        },
    )


def hub_images(
    seed: int,
    *,
    dataset: options.Dataset = "",
    image: options.ImageColumn = "image",
    label: options.LabelColumn = "label",
    train: options.TrainSplit = "train",
    test: options.TestSplit = "test",
    subset: options.Subset = "",
    side: options.Side = 0,
    model: options.ForImages = "lenet5",
    partition: options.Partition = "dirichlet",
    clients: options.DividedClients = 100,
    alpha: options.DividedAlpha = 1.0,
    shards: options.DividedShards = 2,
    column: options.Column = "",
    stored: Stored = STORED,
) -> Task:
    """Any set of labelled images of the Hugging Face Hub, by name and columns, divided as `partition` says."""
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
    arrays = hub.load(hub.Source(dataset, image, columns, splits, subset, side), stored.data_dir)
    arrays = numbered_labels(arrays, dataset)
    arrays = arrays if "test_label" in arrays else hold_out(arrays)
    images, (kept, rows) = split(arrays, stored.validation, stored.pixels)
    owners = (arrays["train_owner"][kept], arrays[f"{tested(stored.validation)}_owner"][rows]) if column else (None, ())
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
            seed=stored.division(seed),
        ),
        lambda: initialise(lambda: for_images(model, tuple(images.x.shape[1:]), classes), stored.init, seed),
        defaults={"rounds": 100, "batch_size": 20, "evaluate_every": 5},
        algorithms=dict.fromkeys(COMPARED, ADAM),
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
    "cifar10-resnet18": _residual("cifar10-resnet18", hub.CIFAR10, _resnet18, "ResNet18 on CIFAR-10"),
    "cifar100-resnet18": _residual("cifar100-resnet18", hub.CIFAR100, _resnet18, "ResNet18 on CIFAR-100"),
    "cifar10-resnet20": _residual("cifar10-resnet20", hub.CIFAR10, _resnet20, "ResNet20 on CIFAR-10"),
    "cifar100-resnet20": _residual("cifar100-resnet20", hub.CIFAR100, _resnet20, "ResNet20 on CIFAR-100"),
    "hub": hub_images,
    "shakespeare-mini": shakespeare_mini,
    "shakespeare": shakespeare,
}


def _image_task(
    name: str,
    images: Images,
    parts: Parts,
    build: Callable[[], nn.Module],
    *,
    defaults: Mapping[str, Any],
    algorithms: Mapping[str, Mapping[str, Any]],
    classes: int | None = None,
) -> Task:
    y, test_y = torch.from_numpy(images.y), torch.from_numpy(images.test_y)
    classes = classes or int(max(images.y.max(), images.test_y.max())) + 1
    data = FederatedData(images.x, y, images.test_x, test_y, Shards.of(parts[0]), Shards.of(parts[1]), classes)
    data.check()
    return Task(name, Network(build(), images.x[0]), data, defaults, algorithms, scale=images.scale)
