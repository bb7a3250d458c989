"""Messages as bytes: what is encoded is what is counted."""

from fedprior.wire.codec import HEADER_BYTES, count_bytes, decode, encode, message_bytes
from fedprior.wire.layout import Layout, Section

__all__ = ["HEADER_BYTES", "Layout", "Section", "count_bytes", "decode", "encode", "message_bytes"]
