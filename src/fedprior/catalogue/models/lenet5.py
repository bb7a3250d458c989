"""LeNet-5, as determined by the paper's byte counts."""

from torch import Tensor, nn


class LeNet5(nn.Module):
    """5×5 conv with 32 filters, pool, 5×5 conv with 64, pool, 512 neurons, classes: 878,538 parameters on CIFAR-10."""

    def __init__(self, channels: int = 1, side: int = 28, classes: int = 10) -> None:
        super().__init__()
        left = ((side - 4) // 2 - 4) // 2
        self.conv1 = nn.Conv2d(channels, 32, 5)
        self.conv2 = nn.Conv2d(32, 64, 5)
        self.fc1 = nn.Linear(64 * left * left, 512)
        self.fc2 = nn.Linear(512, classes)
        self.pool = nn.MaxPool2d(2)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        # The pool comes first: the numbers are the same to the last bit, and ReLU has a quarter of them to read.
        x = self.relu(self.pool(self.conv1(x)))
        x = self.relu(self.pool(self.conv2(x)))
        x = self.relu(self.fc1(x.flatten(1)))
        out: Tensor = self.fc2(x)
        return out
