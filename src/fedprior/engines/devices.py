"""What a device needs before anything runs on it."""

import torch


def prepare(device: torch.device) -> None:
    """Have the kernels of a GPU registered. Nothing else in fedprior imports them.

    This comes before a run's first tensor, so that no import happens while a CUDA graph is captured.
    """
    if device.type == "cuda":
        from fedprior.kernels import registration

        registration.register()
