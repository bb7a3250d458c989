"""What the interpreter takes, the compiler may refuse: tuples of tensors are compiled for a GPU that is not there."""

import os
import subprocess
import sys

PROGRAM = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

class NoGpu:
    "What the compiler asks of a GPU: an H100 or H200."
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

driver.set_active(NoGpu())
from fedprior.kernels import gate_kernels, gates
from fedprior.units.rows import Rows

def strides(tensors): return tuple(t.stride(0) for t in tensors)

mine = torch.zeros(2, 5, 27), torch.zeros(1, 5).expand(2, 5), torch.zeros(2, 3, 1500)
z = torch.zeros(2, 8)
launch, = gates._launches([Rows(5, 2), Rows(3, 1)])
norms, = gates._launches([Rows(5, 1), Rows(3, 1)])
some = mine[::2]
gate_kernels.norm_kernel.warmup(some, strides(some), z, 8, grid=(16,), **norms.sizes(some))
gate_kernels.scale_kernel.warmup(mine, mine, strides(mine), z, 8, grid=(16,), **launch.sizes(mine))
both = strides(mine), strides(mine)
backward = gate_kernels.scale_backward_kernel.warmup(mine, mine, mine, *both, z, z, 8, grid=(16,), **launch.sizes(mine))
print("cubin" in backward.asm)
"""


def test_gates_of_several_layers_compile(tmp_path):
    settings = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=settings)
    assert ran.stdout == "True\n", ran.stderr
