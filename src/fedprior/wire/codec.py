"""Encode and decode one message.

    header   magic "FEDP", version, precision, two spare bytes, fingerprint of the layout, round, CRC-32 of the rest
    bitmap   one bit a gate, padded to a byte
    values   the surviving entries of every section, little-endian, in the layout's order

There is no length field: layout and bitmap determine the length, and a message of any other length is refused before
anything is allocated for it. Nothing is ever unpickled.
"""

import struct
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedprior.errors import WireError
from fedprior.trees import Gates, Tree, leaves
from fedprior.wire.layout import Layout

MAGIC = b"FEDP"
VERSION = 1
_HEADER = struct.Struct("<4sBBxx8sII")
HEADER_BYTES = _HEADER.size
_PRECISIONS: dict[torch.dtype, tuple[int, np.dtype[Any]]] = {
    torch.float32: (0, np.dtype("<f4")),
    torch.float64: (1, np.dtype("<f8")),
}


def encode(message: Tree, layout: Layout, round_number: int = 0) -> bytes:
    """The bytes of a message. Sections that the layout does not name stay at home."""
    gates = message.get("gates", {}) if layout.gates else {}
    bitmap = _pack(gates, layout)
    values = []
    for name, section in layout.sections.items():
        masks = section.mask(gates) if section.mask else {}
        for key, shape in section.shapes.items():
            tensor = message[name][key]
            if tuple(tensor.shape) != shape:
                raise WireError(f"{name}/{key} has shape {tuple(tensor.shape)}, the layout says {shape}")
            values.append(tensor[masks[key].expand(shape) > 0] if key in masks else tensor.reshape(-1))
    precision, dtype = _PRECISIONS[layout.dtype]
    flat = torch.cat(values).to(layout.dtype).cpu().numpy().astype(dtype, copy=False)
    if not np.isfinite(flat).all():
        raise WireError("a message to be sent holds numbers that are not finite")
    body = bitmap + flat.tobytes()
    return _header(precision, layout, round_number, body) + body


def decode(data: bytes, layout: Layout, round_number: int | None = None, device: torch.device | str = "cpu") -> Tree:
    """The message in `data`; what was not sent is zero. Raises WireError, and only that, for anything else."""
    body = _check(data, layout, round_number)
    gates = _unpack(body, layout)
    masks = {
        (name, key): mask > 0
        for name, section in layout.sections.items()
        if section.mask
        for key, mask in section.mask(gates).items()
    }
    counts = [
        int(_count(masks.get((name, key)), shape))
        for name, section in layout.sections.items()
        for key, shape in section.shapes.items()
    ]
    dtype = _PRECISIONS[layout.dtype][1]
    values = body[(layout.gate_count + 7) // 8 :]
    if len(values) != sum(counts) * dtype.itemsize:
        raise WireError(
            f"message of {len(data)} bytes, {len(values) - sum(counts) * dtype.itemsize:+d} from what its gates need"
        )
    flat = np.frombuffer(values, dtype).astype(dtype.newbyteorder("="), copy=True)
    if not np.isfinite(flat).all():
        raise WireError("message holds numbers that are not finite")
    pieces = iter(torch.from_numpy(flat).to(device).split(counts))
    message: Tree = {"gates": {name: gate.to(device) for name, gate in gates.items()}} if layout.gates else {}
    for name, section in layout.sections.items():
        message[name] = {}
        for key, shape in section.shapes.items():
            piece = next(pieces)
            mask = masks.get((name, key))
            message[name][key] = piece.reshape(shape) if mask is None else _scatter(piece, mask.to(device), shape)
    return message


def message_bytes(message: Tree, layout: Layout) -> int:
    """`len(encode(message, layout))` without encoding."""
    return int(count_bytes(message, layout))


def count_bytes(message: Tree, layout: Layout) -> Tensor:
    """The same as a tensor: it can be stacked over clients, and nobody waits for it."""
    gates = message.get("gates", {}) if layout.gates else {}
    fixed, masked = 0, dict[int, list[Tensor]]()
    for section in layout.sections.values():
        masks = section.mask(gates) if section.mask else {}
        for key, shape in section.shapes.items():
            size = torch.Size(shape).numel()
            if key in masks:  # by how often each of its entries counts: few long sums instead of many short ones
                masked.setdefault(size // max(masks[key].numel(), 1), []).append(masks[key].reshape(-1))
            else:
                fixed += size
    count = torch.full((), fixed, dtype=torch.int64, device=next(leaves(message))[1].device)
    for times, flat in masked.items():
        count = count + (torch.cat(flat) > 0).sum() * times
    return count * layout.dtype.itemsize + HEADER_BYTES + (layout.gate_count + 7) // 8


def _header(precision: int, layout: Layout, round_number: int, body: bytes) -> bytes:
    fields = _HEADER.pack(MAGIC, VERSION, precision, layout.fingerprint, round_number, 0)
    return fields[:-4] + struct.pack("<I", zlib.crc32(body, zlib.crc32(fields[:-4])))


def _check(data: bytes, layout: Layout, round_number: int | None) -> memoryview:
    """The body of a message whose header is as it should be."""
    if len(data) < HEADER_BYTES:
        raise WireError(f"message of {len(data)} bytes is shorter than a header")
    magic, version, precision, fingerprint, number, checksum = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise WireError("not a fedprior message")
    if version != VERSION:
        raise WireError(f"message of format version {version}, this is version {VERSION}")
    if fingerprint != layout.fingerprint or precision != _PRECISIONS[layout.dtype][0]:
        raise WireError("message is for another model, algorithm or direction")
    if data[6:8] != b"\0\0":
        raise WireError("message sets header bytes that this version does not know")
    body = memoryview(data)[HEADER_BYTES:]
    if zlib.crc32(body, zlib.crc32(data[: HEADER_BYTES - 4])) != checksum:
        raise WireError("message was damaged on the way: its checksum does not match")
    if round_number is not None and number != round_number:
        raise WireError(f"message is of round {number}, expected {round_number}")
    return body


def _pack(gates: Gates, layout: Layout) -> bytes:
    if not layout.gates:
        return b""
    bits = torch.cat([gates[name].reshape(-1) for name in layout.gates]) > 0
    return np.packbits(bits.cpu().numpy()).tobytes()


def _unpack(body: memoryview, layout: Layout) -> Gates:
    size = (layout.gate_count + 7) // 8
    if len(body) < size:
        raise WireError("message ends inside its gate bitmap")
    bits = np.unpackbits(np.frombuffer(body[:size], np.uint8))
    if bits[layout.gate_count :].any():
        raise WireError("message sets gates that the model does not have")
    flat = torch.from_numpy(bits[: layout.gate_count]).to(layout.dtype)
    pieces = flat.split([torch.Size(shape).numel() for shape in layout.gates.values()])
    return {name: piece.reshape(shape) for (name, shape), piece in zip(layout.gates.items(), pieces, strict=True)}


def _count(mask: Tensor | None, shape: tuple[int, ...]) -> Tensor | int:
    """How many entries of a tensor a mask leaves, without expanding the mask."""
    size = torch.Size(shape).numel()
    return size if mask is None else mask.sum() * (size // max(mask.numel(), 1))


def _scatter(values: Tensor, mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    return values.new_zeros(shape).masked_scatter_(mask.expand(shape), values)
