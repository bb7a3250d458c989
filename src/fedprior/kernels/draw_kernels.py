"""Triton code of keyed draws: `fedprior.keys.uniform` in one launch instead of twenty."""

import triton
import triton.language as tl


@triton.jit
def uniform_kernel(keys, out, count, BLOCK: tl.constexpr):
    """SplitMix64 of key + (i + 1) γ, its upper 23 bits as a number strictly between 0 and 1."""
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + row).to(tl.uint64, bitcast=True)
    x = key + (i + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    value = ((x >> 41).to(tl.int32).to(tl.float32) + 0.5) * (1.0 / 8388608.0)
    tl.store(out + row * count + i, value, mask=i < count)
