"""Messages as bytes. What is counted is what is encoded."""

from fedprior.wire.codec import HEADER_BYTES, count_bytes, decode, encode, message_bytes
from fedprior.wire.layout import Layout, Section
from fedprior.wire.precision import FORMATS, Wire
from fedprior.wire.quantise import quantise, restore

__all__ = [
    "FORMATS",
    "HEADER_BYTES",
    "Layout",
    "Section",
    "Wire",
    "count_bytes",
    "decode",
    "encode",
    "message_bytes",
    "quantise",
    "restore",
]
