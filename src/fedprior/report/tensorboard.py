"""A run's records as TensorBoard scalars, while it runs. Needs the extra `tensorboard`."""

from pathlib import Path
from typing import Any

from fedprior.core.errors import SettingError


class TensorBoard:
    """Called with each round's record; without a folder it writes nothing.

    Bytes are totals, so that curves can be compared at equal cost.
    """

    def __init__(self, folder: Path | None) -> None:
        self.bytes = 0
        self.writer: Any = None
        if folder is None:
            return
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise SettingError("TensorBoard is not installed: pip install 'fedprior[tensorboard]'") from error
        self.writer = SummaryWriter(str(folder))

    def __call__(self, record: dict[str, Any]) -> None:
        """Write one round."""
        if self.writer is None:
            return
        self.bytes += record["bytes_up"] + record["bytes_down"]
        numbers = {"bytes": self.bytes, **{k: v for k, v in record.items() if k != "round"}}
        for name, value in numbers.items():
            if isinstance(value, int | float):
                self.writer.add_scalar(name, value, record["round"])

    def __enter__(self) -> "TensorBoard":
        return self

    def __exit__(self, *error: object) -> None:
        if self.writer is not None:
            self.writer.close()
