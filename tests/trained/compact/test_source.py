"""Whatever a network is made of, its model.py loads where there is no fedprior and computes the same."""

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedprior.core.errors import ModelError
from fedprior.trained.compact import compact, export_module, load_module
from fedprior.trained.compact.construct import construction

Case = tuple[Callable[[], nn.Module], Tensor]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads the times here."""
    monkeypatch.setattr("fedprior.trained.compact.export_folder.fastest", lambda calls: [1.0] * len(calls))


class First(nn.Module):
    """A module that returns several things, of which the first is a sequence, and a linear layer."""

    def __init__(self, body: nn.Module, width: int, times: int = 1) -> None:
        super().__init__()
        self.body, self.head, self.times = body, nn.Linear(width, 3), times

    def forward(self, x: Tensor) -> Tensor:
        found = self.body(*[x] * self.times)
        return self.head((found[0] if self.times == 3 or isinstance(self.body, nn.RNNBase) else found).mean(1))


class Vision(nn.Module):
    """A class token, learnt positions, an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(5, 8), nn.Linear(8, 3)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 7, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", norm_first=True, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8), enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        x = torch.cat([self.token.expand(batch, -1, -1), self.embed(x)], 1)
        return self.head(self.encoder(x + self.places[:, : length + 1])[:, 0])


class Functional(nn.Module):
    """Functions, numbers of Python, parameters and buffers of its own, constants, new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.mix = nn.Linear(6, 4), nn.Parameter(torch.randn(4, 4))
        self.register_buffer("closed", torch.tensor([True, False, True, True]))
        self.register_buffer("forgotten", torch.rand(4), persistent=False)
        self.constant = torch.rand(4)
        self.act = lambda x: x * torch.sigmoid(x)

    def forward(self, x: Tensor) -> Tensor:
        x = F.softplus(self.act(self.fc(x))).masked_fill(self.closed, -math.inf).clamp(min=-3)
        x = F.linear(x, self.mix) / math.sqrt(4) + self.forgotten * self.constant
        x = x + torch.arange(4, device=x.device, dtype=x.dtype) + torch.zeros(4)
        return F.log_softmax(torch.einsum("bi,ij->bj", x, self.mix), -1)


class ByShape(nn.Module):
    """Control flow that depends on shapes, a layer used three times, a function that fx does not follow."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 2 or x.shape[1] != 6:
            raise ValueError(x.shape)
        for _ in range(3):
            x = torch.relu(self.fc(x)) + torch.ones(6)
        return self.head(x)


class Tied(nn.Module):
    """A language model whose decoder is its embedding."""

    def __init__(self, words: int = 200, width: int = 16) -> None:
        super().__init__()
        self.embed, self.decode = nn.Embedding(words, width), nn.Linear(width, words)
        self.hidden, self.back = nn.Linear(width, 40), nn.Linear(40, width)
        self.decode.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(torch.tanh(self.back(torch.relu(self.hidden(self.embed(x).mean(1))))))


class Alternating(nn.Module):
    """One weight, read by a function, by two layers of a list, and by an encoder's layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.layers[1].weight = self.layers[0].weight
        self.encoder.layers[1].linear1.weight = self.encoder.layers[0].linear1.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x).mean(1)
        return F.linear(self.layers[1](torch.tanh(self.layers[0](x))), self.layers[0].weight)


class Hooked(nn.Module):
    """Layers that look like torch's own but are not."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.hooked = nn.Linear(6, 6), nn.Linear(6, 6)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 3))
        self.hooked.register_forward_hook(lambda module, args, output: 2 * output)

    def forward(self, x: Tensor) -> Tensor:
        return self.normed(torch.relu(self.hooked(self.plain(x))))


def convolution(layer: nn.Module, width: int) -> nn.Module:
    return nn.Sequential(layer, nn.ReLU(), nn.Flatten(), nn.Linear(width, 3))


def case(build: Callable[[], nn.Module], *shape: int) -> Case:
    return build, torch.randn(5, *shape, generator=torch.Generator().manual_seed(3))


WORDS = torch.randint(0, 20, (5, 6), generator=torch.Generator().manual_seed(3))
CASES: dict[str, Case] = {
    "same": case(lambda: convolution(nn.Conv2d(1, 4, 3, padding="same"), 256), 1, 8, 8),
    "reflect": case(lambda: convolution(nn.Conv2d(1, 4, 3, padding=1, padding_mode="reflect"), 256), 1, 8, 8),
    "circular": case(lambda: convolution(nn.Conv1d(1, 4, 3, padding="same", padding_mode="circular"), 32), 1, 8),
    "replicate": case(lambda: convolution(nn.Conv3d(1, 4, 3, padding=1, padding_mode="replicate"), 256), 1, 4, 4, 4),
    "grouped": case(lambda: convolution(nn.Conv2d(4, 8, 3, stride=2, dilation=2, groups=2, bias=False), 32), 4, 8, 8),
    "transposed": case(lambda: convolution(nn.ConvTranspose2d(2, 4, 3, 2, 1, 1), 400), 2, 5, 5),
    "attention": case(lambda: First(nn.MultiheadAttention(8, 2, batch_first=True), 8, 3), 5, 8),
    "attention-kv": case(
        lambda: First(nn.MultiheadAttention(8, 2, 0.1, False, True, True, batch_first=True), 8, 3), 5, 8
    ),
    "encoder-layer": case(lambda: First(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 8), 5, 8),
    "encoder-silu": case(
        lambda: First(nn.TransformerEncoderLayer(8, 2, 16, 0.1, F.silu, 0.1, batch_first=True, bias=False), 8), 5, 8
    ),
    "vision": case(Vision, 6, 5),
    "lstm": case(lambda: First(nn.LSTM(5, 4, 2, batch_first=True, dropout=0.2, bidirectional=True), 8), 6, 5),
    "gru": case(lambda: First(nn.GRU(5, 8, bias=False, batch_first=True), 8), 6, 5),
    "rnn": case(lambda: First(nn.RNN(5, 8, nonlinearity="relu", batch_first=True), 8), 6, 5),
    "embedding": (lambda: nn.Sequential(nn.Embedding(20, 4, padding_idx=0), nn.Flatten(), nn.Linear(24, 3)), WORDS),
    "batchnorm": case(lambda: nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.Flatten()), 2, 6, 6),
    "layernorm": case(lambda: nn.Sequential(nn.LayerNorm([2, 6], 0.1, bias=False), nn.Flatten()), 2, 6),
    "groupnorm": case(lambda: nn.Sequential(nn.GroupNorm(2, 4, affine=False), nn.Flatten(), nn.Linear(24, 3)), 4, 6),
    "activations": case(
        lambda: nn.Sequential(
            nn.GELU(approximate="tanh"), nn.Hardtanh(-0.5, 0.5), nn.PReLU(8), nn.Softplus(2), nn.GLU()
        ),
        8,
    ),
    "functional": case(Functional, 6),
    "by-shape": case(ByShape, 6),
    "tied": (lambda: Tied(20, 4), WORDS),
    "alternating": case(Alternating, 5, 8),
    "hooked": case(Hooked, 6),
    "float64": (lambda: nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)).double(), torch.rand(5, 4).double()),
}
# Not made of torch's layers, or not as a tracer sees it.
OPERATIONS = ("by-shape", "hooked")

# Runs where nothing of fedprior can be imported, once for all of them.
ELSEWHERE = """
import importlib.util, sys
from pathlib import Path
sys.modules["fedprior"] = None
import numpy as np, torch
for folder in map(Path, sys.argv[1:]):
    spec = importlib.util.spec_from_file_location("model", folder / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model, x = module.load(), torch.from_numpy(np.load(folder / "inputs.npy"))
    with torch.no_grad():
        assert torch.allclose(model(x)[:1], model(x[:1]), atol=1e-5)
        np.save(folder / "outputs.npy", model(x).numpy())
"""


def built(name: str) -> tuple[nn.Module, Tensor]:
    build, x = CASES[name]
    torch.manual_seed(1)
    module = build()
    for norm in (m for m in module.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.running_mean, norm.running_var = torch.rand(6), 1 + torch.rand(6)
    return module.eval(), x


def test_model_py_of_any_layers_loads_without_fedprior(tmp_path: Path) -> None:
    for name in CASES:
        module, x = built(name)
        found = export_module(module, x, tmp_path / name, about={"title": name}, with_onnx=False)
        assert ("single operations" in " ".join(found["notes"])) == (name in OPERATIONS), name
        np.save(tmp_path / name / "inputs.npy", x.numpy())
    folders = [str(tmp_path / name) for name in CASES]
    subprocess.run([sys.executable, "-W", "error", "-c", ELSEWHERE, *folders], check=True)
    for name in CASES:
        module, x = built(name)
        there = torch.from_numpy(np.load(tmp_path / name / "outputs.npy"))
        torch.testing.assert_close(there, module(x).detach(), atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", ["same", "reflect", "attention", "encoder-layer", "by-shape"])
def test_model_onnx_is_the_same_network(name: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="the extra `export` is not installed")
    pytest.importorskip("onnxscript", reason="the extra `export` is not installed")
    module, x = built(name)
    export_module(module, x, tmp_path / "out", about={}, with_onnx=True)
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "model.onnx"), providers=["CPUExecutionProvider"])
    for batch in (x, x[:1]):
        found = torch.from_numpy(session.run(None, {"input": batch.numpy()})[0])
        torch.testing.assert_close(found, module(batch).detach(), atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------------- tied weights


def pruned_tied() -> Tied:
    torch.manual_seed(0)
    module = Tied()
    with torch.no_grad():
        for layer, rows in ((module.hidden, 30), (module.back, 6)):
            layer.weight[:rows], layer.bias[:rows] = 0, 0
    return module.eval()


@pytest.mark.parametrize("with_onnx", [False, True])
def test_tied_weights_are_stored_once_and_tied_after_loading(with_onnx: bool, tmp_path: Path) -> None:
    if with_onnx:
        pytest.importorskip("onnxscript", reason="the extra `export` is not installed")
    module, x = pruned_tied(), torch.randint(0, 200, (5, 6))
    found = export_module(module, x, tmp_path / "out", about={}, with_onnx=with_onnx)
    loaded = load_module(tmp_path / "out")
    assert loaded.decode.weight is loaded.embed.weight
    assert found["units"] == {"hidden": [10, 40]}
    assert "6 closed units stay" in found["notes"][0], "back's: the decoder that reads them is also the embedding"
    # 200 words of 16, read twice and stored once, a bias for each word, and what is left of two layers.
    numbers = 200 * 16 + 200 + (10 * 16 + 10) + (16 * 10 + 16)
    assert found["sizes"]["compact"]["parameters"] == numbers
    stored = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert sum(value.numel() for value in stored.values()) == numbers
    assert ("embed.weight" in stored) != ("decode.weight" in stored)
    dense = 200 * 16 + 200 + (40 * 16 + 40) + (16 * 40 + 16)
    for kind in ("", " onnx") if with_onnx else ("",):
        sizes = found["sizes"]
        assert 4 * dense <= sizes[f"dense{kind}"]["bytes"] <= 4 * dense + 2500
        assert 4 * numbers <= sizes[f"compact{kind}"]["bytes"] <= 4 * numbers + 2500


def test_only_layers_with_a_shared_weight_keep_closed_units() -> None:
    torch.manual_seed(0)
    first, second, third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 5)
    second.weight = first.weight
    module, x = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third, nn.ReLU(), nn.Linear(5, 2)), torch.rand(4, 6)
    with torch.no_grad():
        for layer in (first, second, third):
            layer.weight[2], layer.bias[2] = 0, 0
    small = compact(module.eval(), x[0])
    assert small.units == {"4": (4, 5)}
    assert small.module.get_parameter("0.weight") is small.module.get_submodule("2").weight
    torch.testing.assert_close(small.module(x), module(x))


def test_a_shared_weight_keeps_columns_that_read_closed_units() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.weight = first.weight
    module, x = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(8, 2)), torch.rand(4, 8)
    with torch.no_grad():
        first.weight[:, 2:] = 0
    small = compact(module.eval(), x[0])
    assert small.units == {}
    assert small.module.get_parameter("0.weight") is small.module.get_submodule("2").weight
    torch.testing.assert_close(small.module(x), module(x))


# ---------------------------------------------------------------------- single layers


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (nn.Conv2d(1, 4, 5), "nn.Conv2d(1, 4, (5, 5))"),
        (nn.Conv2d(1, 4, 3, padding="same", bias=False), "nn.Conv2d(1, 4, (3, 3), padding='same', bias=False)"),
        (nn.GroupNorm(2, 4, affine=False), "nn.GroupNorm(2, 4, affine=False)"),
        (nn.InstanceNorm2d(4, affine=True), "nn.InstanceNorm2d(4, affine=True)"),
        (nn.MultiheadAttention(8, 2, kdim=3), "nn.MultiheadAttention(8, 2, kdim=3)"),
        (
            nn.TransformerEncoderLayer(8, 2, activation=nn.Tanh()),
            "nn.TransformerEncoderLayer(8, 2, activation=nn.Tanh())",
        ),
        (nn.LSTM(3, 4, proj_size=2), "nn.LSTM(3, 4, proj_size=2)"),
        (nn.ConstantPad1d(1, math.inf), 'nn.ConstantPad1d((1, 1), float("inf"))'),
        (nn.Identity(), "nn.Identity()"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_layer_is_written_with_its_arguments_that_are_not_defaults(module: nn.Module, text: str) -> None:
    assert construction(module) == text


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda module, args, output: 2 * output)
    return module


def changed(module: nn.Module, **attributes: Any) -> nn.Module:
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


@pytest.mark.parametrize(
    "module",
    [
        changed(nn.ReLU(), forward=torch.cos),
        changed(nn.Linear(3, 4), weight=nn.Parameter(torch.rand(2, 3))),
        changed(nn.Linear(3, 4), scale=nn.Parameter(torch.rand(2, 3))),
        changed(nn.TransformerEncoderLayer(8, 2), norm1=nn.RMSNorm(8)),
        changed(nn.TransformerEncoderLayer(8, 2), activation=lambda x: x),
        nn.Sequential(nn.Linear(3, 4)),
        hooked(nn.Linear(3, 4)),
    ],
    ids=["forward", "shape", "more", "other", "own", "container", "hooked"],
)
def test_a_modified_layer_is_not_mistaken_for_torchs(module: nn.Module) -> None:
    with pytest.raises(ModelError, match="cannot be written as code"):
        construction(module)
