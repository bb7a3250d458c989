"""Compare the batched kernels with torch's own on one GPU: are they right, and how fast are they?

    PYTHONPATH=src python3 benchmarks/kernels.py [--quick] [--json FILE]

For every convolution of the benchmark models, it prints errors against double precision, then the microseconds of the
three products with cuDNN's grouped kernel and with ours for several tiles. Then it times whole training steps in a CUDA
graph.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
import types
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

SOURCE = Path(__file__).resolve().parent.parent / "src" / "fedprior"
for name, folder in (("fedprior", SOURCE), ("fedprior.catalogue.models", SOURCE / "catalogue" / "models")):
    # The kernels and models need only torch; the whole package needs more than a GPU machine may have.
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules.setdefault(name, package)

from fedprior.catalogue.models.lenet5 import LeNet5  # noqa: E402
from fedprior.catalogue.models.resnet import ResNet20  # noqa: E402
from fedprior.kernels import BatchedKernels, conv  # noqa: E402
from fedprior.kernels.mode import ROUTES  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PATIENCE = 140
"""After this many seconds, only the default tiles are measured."""


@dataclass(frozen=True)
class Shape:
    """One convolution of one cohort."""

    name: str
    clients: int
    images: int
    inputs: int
    side: int
    outputs: int
    kernel: int
    stride: int = 1
    padding: int = 0
    bias: bool = False
    first: bool = False

    @property
    def products(self) -> list[str]:
        return ["forward", "weight"] if self.first else ["forward", "input", "weight"]

    @property
    def flop(self) -> float:
        out = (self.side + 2 * self.padding - self.kernel) // self.stride + 1
        return 2.0 * self.clients * self.images * out**2 * self.outputs * self.inputs * self.kernel**2

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        torch.manual_seed(0)
        x = torch.randn(self.clients, self.images, self.inputs, self.side, self.side, device=DEVICE)
        weight = torch.randn(self.clients, self.outputs, self.inputs, self.kernel, self.kernel, device=DEVICE)
        bias = torch.randn(self.clients, self.outputs, device=DEVICE) if self.bias else None
        out = (self.side + 2 * self.padding - self.kernel) // self.stride + 1
        return x, weight, bias, torch.randn(self.clients, self.images, self.outputs, out, out, device=DEVICE)


SHAPES = [
    Shape("lenet conv1", 10, 64, 3, 32, 32, 5, bias=True, first=True),
    Shape("lenet conv2", 10, 64, 32, 14, 64, 5, bias=True),
    Shape("pfl conv1", 50, 10, 3, 32, 32, 3, bias=True, first=True),
    Shape("pfl conv2", 50, 10, 32, 30, 64, 3, bias=True),
    Shape("resnet stem", 10, 20, 3, 32, 16, 3, padding=1, first=True),
    Shape("resnet 16@32", 10, 20, 16, 32, 16, 3, padding=1),
    Shape("resnet 16-32/2", 10, 20, 16, 32, 32, 3, 2, padding=1),
    Shape("resnet 32@16", 10, 20, 32, 16, 32, 3, padding=1),
    Shape("resnet 32-64/2", 10, 20, 32, 16, 64, 3, 2, padding=1),
    Shape("resnet 64@8", 10, 20, 64, 8, 64, 3, padding=1),
    Shape("short 16-32/2", 10, 20, 16, 32, 32, 1, 2),
    Shape("short 32-64/2", 10, 20, 32, 16, 64, 1, 2),
    Shape("sweep conv1", 90, 64, 3, 32, 32, 5, bias=True, first=True),
    Shape("sweep conv2", 90, 64, 32, 14, 64, 5, bias=True),
]


def ours(shape: Shape, product: str, data: Any, tile: conv.Tile | None) -> Any:
    x, weight, bias, g = data
    stride, padding = (shape.stride,) * 2, (shape.padding,) * 2
    if product == "forward":
        return conv.forward(x, weight, bias, stride, padding, tile)
    if product == "input":
        return conv.grad_input(g, weight, (shape.side,) * 2, stride, padding, tile)
    return conv.grad_weight(x, g, (shape.kernel,) * 2, stride, padding, shape.bias, tile)[0]


def theirs(shape: Shape, product: str, data: Any) -> Any:
    x, weight, bias, g = data
    if product == "forward":
        dims = (0, 0, None if bias is None else 0)
        return vmap(lambda x, w, b: F.conv2d(x, w, b, shape.stride, shape.padding), dims)(x, weight, bias)
    mask = [product == "input", product == "weight", product == "weight" and shape.bias]

    def backward(g: Tensor, x: Tensor, w: Tensor) -> Any:
        sizes = [shape.outputs] if shape.bias else None
        stride, padding = [shape.stride] * 2, [shape.padding] * 2
        out = torch.ops.aten.convolution_backward(g, x, w, sizes, stride, padding, [1, 1], False, [0, 0], 1, mask)
        return out[0] if product == "input" else out[1]

    return vmap(backward)(g, x, weight)


def tiles(shape: Shape, product: str) -> list[conv.Tile]:
    """The default tile first, then a handful around it."""
    out = (shape.side + 2 * shape.padding - shape.kernel) // shape.stride + 1
    taps = shape.kernel**2
    if product == "weight":
        base = conv.choose_weight(shape.outputs, shape.inputs * taps, shape.images * out**2, shape.clients)
        more = [
            replace(base, swap=not base.swap),
            replace(base, positions=64),
            replace(base, positions=64, swap=not base.swap),
            replace(base, depth=min(64, base.depth)),
            replace(base, depth=min(64, base.depth), swap=not base.swap, splits=max(1, base.splits // 2)),
            replace(base, splits=min(64, base.splits * 2)),
            replace(base, splits=max(1, base.splits // 2)),
            replace(base, stages=2),
            replace(base, stages=4),
            replace(base, outputs=min(32, base.outputs)),
            replace(base, outputs=min(32, base.outputs), depth=min(64, base.depth), splits=max(1, base.splits // 2)),
            replace(base, depth=min(64, base.depth), splits=max(1, base.splits // 2)),
            replace(base, depth=min(64, base.depth), swap=not base.swap),
            replace(base, positions=64, depth=min(64, base.depth), swap=not base.swap),
        ]
    else:
        channels, outputs, side = (shape.inputs, shape.outputs, out)
        if product == "input":
            channels, outputs, side = (shape.outputs, shape.inputs, shape.side)
        base = conv.choose(channels, outputs, taps, shape.images * side**2, shape.clients)
        half = max(16, base.outputs // 2)
        more = [
            replace(base, swap=True),
            replace(base, positions=64, warps=4),
            replace(base, positions=64, warps=4, swap=True),
            replace(base, positions=64, warps=2),
            replace(base, positions=128, warps=4),
            replace(base, positions=128, warps=4, swap=True),
            replace(base, positions=256, warps=8),
            replace(base, positions=256, warps=8, swap=True),
            replace(base, positions=32, warps=2),
            replace(base, stages=2),
            replace(base, stages=4),
            replace(base, depth=16),
            replace(base, outputs=half),
        ]
        if channels % 16 == 0:
            more += [replace(t, last=not t.last) for t in (base, *more[:3], *more[4:7])]
        if channels % 64 == 0:
            more += [replace(base, depth=64, stages=2), replace(base, depth=64, swap=True)]
        if channels * taps <= 160:
            more += [replace(base, unroll=not base.unroll), replace(base, unroll=not base.unroll, depth=16)]
    return list(dict.fromkeys([base, *more]))


def short(tile: conv.Tile) -> str:
    flags = "s" * tile.swap + "u" * tile.unroll + "l" * tile.last
    return f"{tile.outputs}x{tile.positions}x{tile.depth}/w{tile.warps}/p{tile.stages}/k{tile.splits}{flags}"


def graphed(work: Callable[[], Any], calls: int, replays: int) -> float:
    """Median microseconds per call, in a graph of several calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            work()
    times = []
    for i in range(replays + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b).norm() / b.norm())


def build(job: tuple[Shape, str, conv.Tile]) -> str:
    """Compile and run once in a separate process: that fills Triton's cache, and a crash does no harm."""
    shape, product, tile = job
    try:
        ours(shape, product, shape.tensors(), tile)
        torch.cuda.synchronize()
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}"


def measure(shape: Shape, product: str, candidates: list[conv.Tile], calls: int) -> dict[str, Any]:
    data = shape.tensors()
    reference = theirs(shape, product, [None if t is None else t[-2:].double() for t in data])  # slow: two clients
    row: dict[str, Any] = {"shape": shape.name, "product": product, "tiles": {}}
    row["cudnn error"] = relative(theirs(shape, product, data)[-2:], reference)
    row["cudnn"] = graphed(lambda: theirs(shape, product, data), calls, 10)
    for tile in candidates:
        try:
            # Try several times: a race between threads may not show at once.
            error = max(relative(ours(shape, product, data, tile)[-2:], reference) for _ in range(6))
            row.setdefault("error", error)
            if not error < 3e-3:
                print(f"  WRONG {shape.name} {product} {short(tile)}: {error:.1e}")
                continue
            row["tiles"][short(tile)] = graphed(lambda tile=tile: ours(shape, product, data, tile), calls, 10)
        except Exception as error:
            print(f"  FAILED {shape.name} {product} {short(tile)}: {str(error).splitlines()[0][:100]}")
    return row


def exact(shape: Shape) -> str:
    """Errors of the default tiles without TF32."""
    torch.backends.cudnn.allow_tf32 = False
    small = replace(shape, clients=2, images=3)
    data = small.tensors()
    errors = []
    for product in small.products:
        reference = theirs(small, product, [None if t is None else t.double() for t in data])
        try:
            errors.append(f"{relative(ours(small, product, data, None), reference):.0e}")
        except Exception as error:
            errors.append(f"FAILED {str(error)[:80]}")
    torch.backends.cudnn.allow_tf32 = True
    return " ".join(errors)


class Pfl(nn.Module):
    """pfl-research's CNN for CIFAR10, without its dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 64, 3)
        self.pool, self.fc1, self.fc2 = nn.MaxPool2d(2), nn.Linear(64 * 14 * 14, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.conv2(torch.relu(self.conv1(x)))))
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))


def step(make: Callable[[], nn.Module], clients: int, images: int, mode: Callable[[], Any]) -> Callable[[], Any]:
    """One SGD step of a cohort, as a function that a graph can capture."""
    torch.manual_seed(0)
    modules = [make() for _ in range(clients)]
    stacked, _ = stack_module_state(modules)
    params = {k: v.detach().to(DEVICE) for k, v in stacked.items()}
    x, y = torch.randn(clients, images, 3, 32, 32).to(DEVICE), torch.randint(10, (clients, images)).to(DEVICE)
    module = modules[0].to(DEVICE)
    slope = vmap(grad(lambda p, x, y: F.cross_entropy(functional_call(module, p, (x,)), y)))

    def work() -> dict[str, Tensor]:
        with mode():
            slopes = slope(params, x, y)
        torch._foreach_add_(list(params.values()), list(slopes.values()), alpha=-1e-6)
        return slopes

    return work


def steps() -> list[dict[str, Any]]:
    rows = []
    only = lambda *names: {f: r for f, r in ROUTES.items() if r.__name__ in names}  # noqa: E731
    modes: dict[str, Callable[[], Any]] = {
        "torch": nullcontext,
        "conv": lambda: BatchedKernels(routes=only("conv2d")),
        "conv+norm": lambda: BatchedKernels(routes=only("conv2d", "group_norm")),
        "all": BatchedKernels,
    }
    models: list[tuple[str, Callable[[], nn.Module], int, int]] = [
        ("LeNet-5 10x64", lambda: LeNet5(3, 32), 10, 64),
        ("LeNet-5 90x64", lambda: LeNet5(3, 32), 90, 64),
        ("pfl CNN 50x10", Pfl, 50, 10),
        ("ResNet20 10x20", ResNet20, 10, 20),
    ]
    for name, make, clients, images in models:
        row: dict[str, Any] = {"model": name}
        expected = None
        for label, mode in modes.items():
            if label == "conv+norm" and "ResNet" not in name:
                continue
            try:
                slopes = {k: v.clone() for k, v in step(make, clients, images, mode)().items()}
                expected = expected or slopes
                error = max(float((slopes[k] - v).norm() / v.norm().clamp(min=1e-12)) for k, v in expected.items())
                ms = graphed(step(make, clients, images, mode), 1, 20) / 1e3
                row[label] = ms
                row[f"{label} difference"] = error
            except Exception as error:
                print(f"  FAILED {name} {label}: {type(error).__name__}: {str(error)[:200]}")
        rows.append(row)
        print("  ".join([f"{name:16s}", *(f"{k} {v:.3f} ms" for k, v in row.items() if k in modes)]), end="   ")
        print(" ".join(f"{v:.0e}" for k, v in row.items() if k.endswith("difference")), flush=True)
    return rows


def profile(make: Callable[[], nn.Module], clients: int, images: int) -> None:
    """Print the ten kernels that take the most time in a step."""
    work = step(make, clients, images, BatchedKernels)
    work()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as record:
        work()
        torch.cuda.synchronize()
    for event in sorted(record.key_averages(), key=lambda e: -e.self_device_time_total)[:12]:
        print(f"    {event.self_device_time_total:7.0f} us {event.count:3d}x {event.key[:110]}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="only the default tiles")
    parser.add_argument("--json", type=Path, help="where to put all numbers")
    arguments = parser.parse_args()
    began = time.time()
    print(torch.cuda.get_device_name(), torch.__version__)
    few = {s.name for s in SHAPES if s.name.startswith("sweep")}
    jobs = [
        (shape, product, tile)
        for shape in SHAPES
        for product in shape.products
        for tile in (tiles(shape, product)[:1] if arguments.quick or shape.name in few else tiles(shape, product))
    ]
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        failures = pool.map(build, jobs, chunksize=4)
        plain = pool.map(exact, SHAPES[:12], chunksize=1)
    print(f"{len(jobs)} kernels compiled, {time.time() - began:.0f} s; failed: {sum(map(bool, failures))}")
    for (shape, product, tile), failure in zip(jobs, failures, strict=True):
        if failure:
            print(f"  not built: {shape.name} {product} {short(tile)}: {failure}")
    timed = steps()
    rows = []
    header = (
        f"{'shape':15s} {'product':8s} {'cuDNN':>7s} {'default':>7s} {'best':>7s} TFLOP/s  error  tiles, best first"
    )
    print(header)
    for shape in SHAPES:
        for product in shape.products:
            good = [t for (s, p, t), f in zip(jobs, failures, strict=True) if (s, p) == (shape, product) and not f]
            if time.time() - began > PATIENCE:
                good = good[:1]
            try:
                row = measure(shape, product, good, 3 if shape.clients > 50 else 10)
            except Exception as error:
                print(f"  FAILED {shape.name} {product}: {str(error)[:200]}")
                continue
            rows.append(row)
            order = sorted(row["tiles"].items(), key=lambda item: item[1])
            if order:
                default = row["tiles"].get(short(good[0]), float("nan"))
                rate = shape.flop / order[0][1] / 1e6
                listed = " ".join(f"{k} {v:.0f}" for k, v in order[:3])
                print(f"{shape.name:15s} {product:8s} {row['cudnn']:7.1f} {default:7.1f} {order[0][1]:7.1f} "
                      f"{rate:7.1f}  {row['error']:.0e}  {listed}", flush=True)  # fmt: skip
    print("errors without TF32:", "; ".join(f"{s.name} {e}" for s, e in zip(SHAPES, plain, strict=False)))
    for label, make, clients, images in (("LeNet-5", lambda: LeNet5(3, 32), 10, 64), ("ResNet20", ResNet20, 10, 20)):
        print(f"  {label}, where the time goes:")
        profile(make, clients, images)
    if arguments.json:
        shapes = [asdict(s) for s in SHAPES]
        arguments.json.write_text(json.dumps({"shapes": shapes, "products": rows, "steps": timed}, indent=1))
    print(f"{time.time() - began:.0f} s")


if __name__ == "__main__":
    main()
