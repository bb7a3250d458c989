"""What a network has that nobody trains: its frozen parameters. They never travel, and every copy shares them."""

import copy
import zlib

import torch
from torch import nn


def copied(module: nn.Module) -> nn.Module:
    """A copy of a module that shares the memory of its frozen parameters, which nobody changes."""
    # New parameters around the old numbers: moved to a device, the copy leaves the original where it is.
    frozen = (p for p in module.parameters() if not p.requires_grad)
    return copy.deepcopy(module, {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in frozen})


def frozen_parameters(module: nn.Module) -> int:
    """How many frozen parameters a module has."""
    return sum(p.numel() for p in module.parameters() if not p.requires_grad)


def fingerprint(module: nn.Module) -> str:
    """A checksum of the names and values of the frozen parameters; empty if there are none."""
    found, total = False, 0
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            numbers = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            found, total = True, zlib.crc32(numbers.data, zlib.crc32(name.encode(), total))
    return f"{total:08x}" if found else ""
