"""Encode and decode one message.

    header   magic "FEDP", version, precision, flags, a spare byte, fingerprint of the layout, round, CRC-32 of the rest
    bitmap   one bit per gate, padded to a byte; or, if the flag `MASKED` is set, layer by layer in a code (`masks.py`)
    values   the surviving entries of every section, little-endian, in the layout's order

In a rounded message (`quantise.py`), the scales precede a section's whole numbers. If the flag `CODED` is set, whole
numbers have a code of variable length (`rice.py`). Otherwise layout and gates determine the length, and a message of
any other length is refused before anything is allocated for it. Nothing is ever unpickled.
"""

import struct
import zlib
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedprior.core.errors import WireError
from fedprior.core.trees import Gates, Tree, leaves
from fedprior.wire import masks, rice
from fedprior.wire.layout import Layout
from fedprior.wire.parts import Part, parts_of, sections_of, size_of, table_of
from fedprior.wire.precision import FORMATS, Format, format_of
from fedprior.wire.quantise import SCALES

MAGIC = b"FEDP"
VERSION = 1
CODED = 1
MASKED = 2
_HEADER = struct.Struct("<4sBBBx8sII")
HEADER_BYTES = _HEADER.size
_NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype("<f4"),
    torch.float64: np.dtype("<f8"),
    torch.float16: np.dtype("<f2"),
    torch.bfloat16: np.dtype("<i2"),  # NumPy has no bfloat16, so we store its bits
    torch.int8: np.dtype("<i1"),
}


def encode(message: Tree, layout: Layout, round_number: int = 0) -> bytes:
    """Encode a message as bytes. Sections that the layout does not name are not sent."""
    gates = message.get("gates", {}) if layout.gates else {}
    bitmap, masked = _pack(gates, layout)
    plain, coded = [bitmap], [bitmap]
    for written, group in groupby(parts_of(layout, gates), lambda part: part.written):
        members = list(group)
        data = _write(torch.cat([_surviving(message, part) for part in members]), written, layout)
        plain.append(data)
        coded += [_table(message, part) for part in members] if _variable(layout, written) else [data]
    shorter = sum(map(len, coded)) < sum(map(len, plain))
    body = b"".join(coded if shorter else plain)
    return _header(layout, CODED * shorter | MASKED * masked, round_number, body) + body


def decode(data: bytes, layout: Layout, round_number: int | None = None, device: torch.device | str = "cpu") -> Tree:
    """Decode the message in `data`; what was not sent is zero. Anything invalid raises a WireError, and only that."""
    body, flags = _check(data, layout, round_number)
    gates, rest = _unpack(body, layout, bool(flags & MASKED))
    parts = list(parts_of(layout, gates))
    if not flags & CODED:
        _check_length(data, rest, parts, layout)
    message: Tree = {"gates": {name: gate.to(device) for name, gate in gates.items()}} if layout.gates else {}
    for written, group in groupby(parts, lambda part: part.written):
        members = list(group)
        if flags & CODED and written.levels:
            for part in members:
                section = message.setdefault(part.section, {})
                section[part.name], rest = _read_table(rest, part, message[part.section + SCALES][part.name])
            continue
        flat, rest = _read(rest, members, layout)
        for part, piece in zip(members, flat.to(device).split([int(part.count) for part in members]), strict=True):
            if part.section.endswith(SCALES):
                _check_scales(piece, format_of(layout, part.section.removesuffix(SCALES)).levels)
            section = message.setdefault(part.section, {})
            mask = None if part.mask is None else part.mask.to(device)
            section[part.name] = piece.reshape(part.shape) if mask is None else _scatter(piece, mask, part.shape)
    if len(rest):
        raise WireError(f"message of {len(data)} bytes, {len(rest):+d} from what its gates need")
    return {name: message.get(name, {}) for name in sections_of(layout)}


def message_bytes(message: Tree, layout: Layout) -> int:
    """`len(encode(message, layout))` without encoding."""
    return int(count_bytes(message, layout))


def count_bytes(message: Tree, layout: Layout) -> Tensor:
    """The same as a tensor, which can be stacked over clients without waiting for the device."""
    gates = message.get("gates", {}) if layout.gates else {}
    if layout.precision in (None, "float32"):
        return _count_plain(message, gates, layout)
    fixed = torch.zeros((), dtype=torch.int64, device=next(leaves(message))[1].device)
    plain, coded = fixed, fixed
    for written, group in groupby(parts_of(layout, gates), lambda part: part.written):
        members = list(group)
        count = fixed
        for part in members:
            count = count + part.count
        size = size_of(count, written, layout)
        plain = plain + size
        if _variable(layout, written):
            size = rice.count_bytes([table_of(message, part) for part in members], written.levels)
        coded = coded + size
    shorter = torch.minimum(plain, coded) if layout.entropy else plain
    return shorter + HEADER_BYTES + _count_gates(gates, layout)


def _count_gates(gates: Gates, layout: Layout) -> Tensor | int:
    """The bytes of the gates, one bit each or in their code, whichever is shorter."""
    plain = (layout.gate_count + 7) // 8
    if not layout.masked:
        return plain
    return torch.stack([masks.count_bytes(gates[name]) for name in layout.gates]).sum().clamp(max=plain)


def _count_plain(message: Tree, gates: Gates, layout: Layout) -> Tensor:
    """Count a message in the layout's own precision, in few operations."""
    fixed, masked = 0, dict[int, list[Tensor]]()
    for section in layout.sections.values():
        masks = section.mask(gates) if section.mask else {}
        for key, shape in section.shapes.items():
            size = torch.Size(shape).numel()
            if key in masks:  # grouped by how often an entry counts: few long sums, not many short ones
                masked.setdefault(size // max(masks[key].numel(), 1), []).append(masks[key].reshape(-1))
            else:
                fixed += size
    count = torch.full((), fixed, dtype=torch.int64, device=next(leaves(message))[1].device)
    if masked:
        present = torch.cat([mask for flat in masked.values() for mask in flat]) > 0
        pieces = present.split([sum(len(mask) for mask in flat) for flat in masked.values()])
        for times, piece in zip(masked, pieces, strict=True):
            count = count.add(piece.sum(), alpha=times)
    return count * layout.dtype.itemsize + HEADER_BYTES + _count_gates(gates, layout)


def _variable(layout: Layout, written: Format) -> bool:
    """Whether a format's numbers may be in a code of variable length."""
    return layout.entropy and written.levels > 0


def _surviving(message: Tree, part: Part) -> Tensor:
    """The entries of a tensor that travel, one after the other."""
    tensor = message[part.section][part.name]
    if tuple(tensor.shape) != part.shape:
        raise WireError(f"{part.section}/{part.name} has shape {tuple(tensor.shape)}, but the layout has {part.shape}")
    return tensor.reshape(-1) if part.mask is None else tensor[part.mask.expand(part.shape)]


def _write(flat: Tensor, written: Format, layout: Layout) -> bytes:
    """Write numbers of one format as bytes."""
    flat = flat.to(written.dtype or layout.dtype).cpu()
    if not _finite(flat):
        raise WireError("a message to be sent holds numbers that are not finite")
    if written.bits == 4:
        low = np.zeros(flat.numel() + flat.numel() % 2, np.uint8)
        low[: flat.numel()] = flat.numpy().view(np.uint8) & 15
        return (low[::2] | low[1::2] << 4).tobytes()
    plain = flat.view(torch.int16) if flat.dtype is torch.bfloat16 else flat
    return plain.numpy().astype(_NUMPY[flat.dtype], copy=False).tobytes()


def _read(data: memoryview, parts: list[Part], layout: Layout) -> tuple[Tensor, memoryview]:
    """The inverse: read the numbers of some tensors of one format; also return the rest."""
    written, count = parts[0].written, sum(int(part.count) for part in parts)
    dtype = written.dtype or layout.dtype
    size = size_of(count, written, layout)
    if len(data) < size:
        raise WireError("message ends inside its numbers")
    if written.bits == 4:
        pairs = np.frombuffer(data[:size], np.uint8)
        both = np.stack([pairs << 4, pairs & 240], 1).reshape(-1).view(np.int8) >> 4
        if both[count:].any():
            raise WireError("message has bits after its codes")
        flat = torch.from_numpy(both[:count].copy())
    else:
        kind = _NUMPY[dtype]
        numbers: NDArray[Any] = np.frombuffer(data[:size], kind).astype(kind.newbyteorder("="), copy=True)
        flat = torch.from_numpy(numbers)
        flat = flat.view(dtype) if dtype is torch.bfloat16 else flat
    if not _finite(flat):
        raise WireError("message holds numbers that are not finite")
    if written.levels and bool((flat < -written.levels).any()):
        raise WireError("message holds codes that are out of range")
    return flat, data[size:]


def _finite(flat: Tensor) -> bool:
    """Whether all numbers are finite. One that is not makes the sum so, which needs no memory; a sum may overflow."""
    return not flat.is_floating_point() or bool(flat.sum().isfinite()) or bool(flat.isfinite().all())


def _table(message: Tree, part: Part) -> bytes:
    """Write one tensor's codes in a code of variable length."""
    codes, rows, mask = table_of(message, part)
    written = rows[:, None].expand(codes.shape) if mask is None else mask & rows[:, None]
    return rice.encode(codes.cpu().numpy(), written.cpu().numpy(), part.written.levels)


def _read_table(data: memoryview, part: Part, scales: Tensor) -> tuple[Tensor, memoryview]:
    """The inverse; also return the rest."""
    rows = scales.reshape(-1).cpu() > 0
    columns = torch.Size(part.shape).numel() // max(len(rows), 1)
    mask = None if part.mask is None else part.mask.expand(part.shape).reshape(len(rows), columns).numpy()
    codes, rest = rice.decode(data, rows.numpy(), columns, mask, part.written.levels)
    return torch.from_numpy(codes.reshape(part.shape)).to(scales.device), rest


def _check_scales(scales: Tensor, levels: int) -> None:
    """Check scales: the numbers that they produce must be finite too."""
    if bool((scales < 0).any()):
        raise WireError("message holds scales that are negative")
    if not bool((scales * levels).isfinite().all()):
        raise WireError("message holds numbers that are not finite")


def _check_length(data: bytes, rest: memoryview, parts: list[Part], layout: Layout) -> None:
    """Check a message without codes of variable length: layout and gates determine its length."""
    size = 0
    for written, group in groupby(parts, lambda part: part.written):
        size += size_of(sum(int(part.count) for part in group), written, layout)
    if len(rest) != size:
        raise WireError(f"message of {len(data)} bytes, {len(rest) - size:+d} from what its gates need")


def _precision(layout: Layout) -> int:
    """The header's code for a layout's precision."""
    full = int(layout.dtype is torch.float64)
    return full if layout.precision in (None, "float32") else FORMATS[str(layout.precision)].code


def _header(layout: Layout, flags: int, round_number: int, body: bytes) -> bytes:
    fields = _HEADER.pack(MAGIC, VERSION, _precision(layout), flags, layout.fingerprint, round_number, 0)
    return fields[:-4] + struct.pack("<I", zlib.crc32(body, zlib.crc32(fields[:-4])))


def _check(data: bytes, layout: Layout, round_number: int | None) -> tuple[memoryview, int]:
    """Check a message's header; return its body and flags."""
    if len(data) < HEADER_BYTES:
        raise WireError(f"message of {len(data)} bytes is shorter than a header")
    magic, version, precision, flags, fingerprint, number, checksum = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise WireError("not a fedprior message")
    if version != VERSION:
        raise WireError(f"message has format version {version}, but this is version {VERSION}")
    if fingerprint != layout.fingerprint or precision != _precision(layout):
        raise WireError("message is for another model, algorithm or direction")
    known = CODED * any(format_of(layout, name).levels > 0 for name in layout.sections) | MASKED * layout.masked
    if flags & ~known or data[7] != 0:
        raise WireError("message sets header bytes that this version does not know")
    body = memoryview(data)[HEADER_BYTES:]
    if zlib.crc32(body, zlib.crc32(data[: HEADER_BYTES - 4])) != checksum:
        raise WireError("message was damaged on the way: its checksum does not match")
    if round_number is not None and number != round_number:
        raise WireError(f"message is from round {number}, expected {round_number}")
    return body, flags


def _pack(gates: Gates, layout: Layout) -> tuple[bytes, bool]:
    """Write gates; also say whether they are in their code."""
    if not layout.gates:
        return b"", False
    open_gates = [(gates[name] > 0).cpu().numpy() for name in layout.gates]
    plain = np.packbits(np.concatenate([gate.reshape(-1) for gate in open_gates])).tobytes()
    coded = b"".join(masks.encode(gate) for gate in open_gates) if layout.masked else plain
    return (coded, True) if len(coded) < len(plain) else (plain, False)


def _unpack(body: memoryview, layout: Layout, masked: bool) -> tuple[Gates, memoryview]:
    """Read gates; also return the rest."""
    sizes = {name: torch.Size(shape).numel() for name, shape in layout.gates.items()}
    if masked:
        pieces, rest = [], body
        for size in sizes.values():
            piece, rest = masks.decode(rest, size)
            pieces.append(piece)
    else:
        size = (layout.gate_count + 7) // 8
        if len(body) < size:
            raise WireError("message ends inside its gate bitmap")
        bits, rest = np.unpackbits(np.frombuffer(body[:size], np.uint8)), body[size:]
        if bits[layout.gate_count :].any():
            raise WireError("message sets gates that the model does not have")
        pieces = np.split(bits[: layout.gate_count], np.cumsum(list(sizes.values()))[:-1])
    flat = zip(layout.gates.items(), pieces, strict=bool(layout.gates))
    return {name: torch.from_numpy(piece).to(layout.dtype).reshape(shape) for (name, shape), piece in flat}, rest


def _scatter(values: Tensor, mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    return values.new_zeros(shape).masked_scatter_(mask.expand(shape), values)
