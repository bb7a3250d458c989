"""What the options of named tasks are, and when one of them has no effect: the types of their factories' parameters.

Options that several tasks share are in a group. `idle` gets all options of a task as attributes.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from fedprior.catalogue.data.hub import Source
from fedprior.catalogue.data.images import PIXELS, Images
from fedprior.catalogue.data.schemes import PARTITIONS
from fedprior.catalogue.tasks.loading import load
from fedprior.core.options import About, Group, either


@dataclass(frozen=True, kw_only=True)
class OfImages(Group):
    """The options of every task on images: how they and the weights begin, and what is held out."""

    init: Annotated[str, About("how weights are initialised: `default`, as torch does, `glorot` or `he`")] = "default"
    validation: Annotated[bool, About("whether a part of the training set takes the place of the test set")] = False
    pixels: Annotated[str, About("how images are scaled", PIXELS)] = "standard"
    partition_seed: Annotated[int | None, About("the seed of the partition", unsaid="the run's")] = None

    def division(self, seed: int) -> int:
        """The seed of the partition: the run's, if it has none of its own."""
        return seed if self.partition_seed is None else self.partition_seed


@dataclass(frozen=True, kw_only=True)
class Stored(OfImages):
    """The same for images that are loaded from a folder or the Hub."""

    data_dir: Annotated[str, About("a folder with the data sets in the Hugging Face Hub's layout", machine=True)] = ""

    def images(self, source: Source) -> tuple[Images, tuple[np.ndarray, np.ndarray]]:
        """Training and test images, and their coarse labels if they have any."""
        return load(source.repository, self.data_dir, self.validation, self.pixels)


def _of_partitions(*names: str) -> Any:
    def idle(chosen: Any) -> str:
        # A partition that cannot be made has a message of its own.
        made = chosen.partition in PARTITIONS and (chosen.partition != "column" or chosen.column)
        return f"partition={chosen.partition} does not look at it" if made and chosen.partition not in names else ""

    return idle


Clients = Annotated[int, About("how many clients there are")]
Alpha = Annotated[float, About("α of Dirichlet(α), by which classes are divided; small: each client has few")]
Beta = Annotated[float, About("β of the Pachinko allocation: how evenly a client has the classes of a superclass")]
Norm = Annotated[str, About("the layers that normalise", ("group", "batch"))]
TestFraction = Annotated[float, About("the share of each writer's images that are for testing")]
Dataset = Annotated[str, About("a data set of the Hugging Face Hub, such as zalando-datasets/fashion_mnist")]
ImageColumn = Annotated[str, About("the column of the images")]
LabelColumn = Annotated[str, About("the column of the labels")]
TrainSplit = Annotated[str, About("the split to train on")]
TestSplit = Annotated[str, About("the split to test on; none: a part of the training split")]
Subset = Annotated[str, About("the configuration of the data set, if it has several")]
Side = Annotated[int, About("height and width to which images are brought; 0: as they are")]
ForImages = Annotated[str, About("the network: lenet5, resnet20, resnet18 or logistic")]
Partition = Annotated[str, About(f"how examples are divided among clients: {either(PARTITIONS)}")]
Column = Annotated[str, About("the column of users, for partition=column")]
Concentration = Annotated[
    float, About("Dirichlet's concentration for each class: 0.1 and 0.5 in most papers; small: each client has few")
]
DividedClients = Annotated[
    int, About("how many clients there are", idle=_of_partitions("iid", "shards", "dirichlet", "classes", "quantity"))
]
DividedAlpha = Annotated[
    float,
    About("α of Dirichlet(α), by which examples are divided", idle=_of_partitions("dirichlet", "classes", "quantity")),
]
DividedShards = Annotated[int, About("shards that a client has", idle=_of_partitions("shards"))]
