"""What the interpreter takes, the compiler may refuse: kernels are compiled for a GPU that is not there."""

import os
import subprocess
import sys

PROGRAM = """
import sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

class NoGpu:
    "What the compiler asks of a GPU: an H100 or H200."
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

driver.set_active(NoGpu())
sys.path += {path!r}

import fedprior
from fedprior.core.errors import FedpriorError
from fedprior.kernels import registration
from small_world import small_clients
from test_launches import kernels, model

compiled = set()

def compiling(name, run):
    def launch(*args, **given):
        if "cubin" in run(*args, **{{**given, "warmup": True}}).asm:
            compiled.add(name)
    return launch

everything = dict(kernels())
for name, kernel in everything.items():
    kernel.run = compiling(name, kernel.run)
registration.register_for(lambda x: True, force=True)
torch.manual_seed(0)
task = fedprior.own_task(model(), small_clients((3, 4), (2, 2)), batch_size=4, rounds=1, clients_per_round=2)
try:
    fedprior.run(task, "fedsparse", device="cpu", mode="vectorised")
except FedpriorError:  # nothing is computed, so numbers are what was in memory
    pass
print(sorted(everything.keys() - compiled))
"""


def test_every_kernel_of_a_round_compiles(tmp_path):
    program = PROGRAM.format(path=[path for path in sys.path if path])
    settings = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=settings)
    assert ran.stdout == "[]\n", ran.stderr
