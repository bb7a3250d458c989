"""An exported folder: loads without fedprior, says what it is, and computes what the run's network does."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedprior
from fedprior.catalogue.data.images import Scale
from fedprior.catalogue.models import LeNet5, ResNet20
from fedprior.core.ensemble import Ensemble
from fedprior.core.errors import DataError, FedpriorWarning, ModelError, RunError
from fedprior.core.storage import to_bytes
from fedprior.trained.compact import export_module, load_module
from fedprior.trained.compact.inputs import Reader
from fedprior.trained.compact.predict import describe, outputs, predict, reader
from fedprior.units import UnitGating, find_structure

# Runs where nothing of fedprior can be imported.
ELSEWHERE = """
import sys
sys.modules["fedprior"] = None
import numpy as np, torch
from model import load
np.save("outputs.npy", load()(torch.from_numpy(np.load("inputs.npy"))).detach().numpy())
"""


def pruned(module: nn.Module, example: Tensor, share: float, seed: int = 0) -> nn.Module:
    """Close a share of the units of every layer."""
    draw = torch.Generator().manual_seed(seed)
    gating = UnitGating(find_structure(module, example))
    gates = {layer: torch.ones(size) for layer, size in gating.gate_shapes.items()}
    for gate in gates.values():
        gate[torch.randperm(len(gate), generator=draw)[: int(share * len(gate))]] = 0
    params = {name: p.detach() + 0.01 for name, p in module.named_parameters()}
    module.load_state_dict(gating.prune(params, gates), strict=False)
    return module.eval()


@pytest.mark.parametrize("name", ["lenet5", "resnet20", "ensemble", "own"])
def test_model_py_loads_without_fedprior(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nobody reads the times.
    monkeypatch.setattr("fedprior.trained.compact.export_folder.fastest", lambda calls: [1.0] * len(calls))
    torch.manual_seed(0)
    shape = (3, 16, 16) if name == "resnet20" else (1, 16, 16)
    x = torch.randn(6, *shape)
    module: nn.Module = {
        "lenet5": lambda: pruned(LeNet5(1, 16, 4), x[0], 0.5),
        "resnet20": lambda: pruned(ResNet20(3, 5), x[0], 0.5),
        "ensemble": lambda: Ensemble([pruned(LeNet5(1, 16, 4), x[0], 0.5, seed) for seed in (0, 1)]).eval(),
        "own": lambda: pruned(Own(), x[0], 0.5),
    }[name]()
    found = export_module(module, x, tmp_path / "out", about={"title": name}, with_onnx=False)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["model.json", "model.py", "model.safetensors"]
    assert found["sizes"]["compact"]["parameters"] < found["sizes"]["dense"]["parameters"]
    assert found["compared"]["torch"]["same_predictions"] == len(x)
    np.save(tmp_path / "out" / "inputs.npy", x.numpy())
    subprocess.run([sys.executable, "-W", "error", "-c", ELSEWHERE], cwd=tmp_path / "out", check=True)
    there = torch.from_numpy(np.load(tmp_path / "out" / "outputs.npy"))
    torch.testing.assert_close(there, module(x).detach(), atol=1e-5, rtol=1e-5)


class Own(nn.Module):
    """With a parameter and a buffer that the forward reads itself, and numbered modules."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 6, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 49, 9), nn.GELU()
        )
        self.head = nn.Linear(9, 3)
        self.scale = nn.Parameter(torch.tensor([2.0, 3.0, 4.0]))
        self.register_buffer("shift", torch.tensor([0.1, 0.2, 0.3]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)) * self.scale + self.shift


def test_wrong_files_are_not_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(tensors: dict[str, Tensor]) -> bytes:
        return to_bytes({name: value + 1e-3 for name, value in tensors.items()})

    monkeypatch.setattr("fedprior.trained.compact.export_folder.to_bytes", damaged)
    with pytest.raises(ModelError, match=r"model\.py is wrong: its outputs differ from the network's by"):
        export_module(nn.Linear(3, 2), torch.rand(2, 3), tmp_path / "out", about={}, with_onnx=False)
    assert list(tmp_path.iterdir()) == []


def test_a_refused_export_leaves_no_files(tmp_path: Path) -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) if x.sum() > 0 else self.fc(-x)

    x = torch.randn(2, 3)
    with pytest.raises(ModelError, match="cannot be traced"):
        export_module(Loop(), x, tmp_path / "out", about={}, with_onnx=False)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("text")
    with pytest.raises(RunError, match="exists; choose another folder"):
        export_module(nn.Linear(3, 2), x, tmp_path / "mine", about={}, with_onnx=False)
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


# ---------------------------------------------------------------------- ONNX


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module, fedprior.Task]:
    """LeNet-5 for mnist-mini with 60% of its units closed, exported with everything."""
    pytest.importorskip("onnxruntime", reason="the extra `export` is not installed")
    pytest.importorskip("onnxscript", reason="the extra `export` is not installed")
    task = fedprior.task("mnist-mini")
    module = pruned(task.network.module, task.network.example, 0.6)
    folder = tmp_path_factory.mktemp("export") / "digits"
    about = {"title": "digits", "scale": task.scale._asdict()}
    export_module(module, task.data.test_x[:300], folder, about=about, with_onnx=True)
    return folder, module, task


def test_onnx_equals_the_network_on_real_inputs_for_any_batch(digits) -> None:
    import onnxruntime

    folder, module, task = digits
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    for size in (1, 7, 500):
        x = task.data.test_x[:size]
        found = torch.from_numpy(session.run(None, {"input": x.numpy()})[0])
        expected = module(x).detach()
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(found.argmax(1), expected.argmax(1))
    torch.testing.assert_close(outputs(folder, x), expected, atol=1e-5, rtol=1e-5)


def test_files_are_at_most_two_percent_larger_than_what_survives(digits) -> None:
    folder, module, task = digits
    gating = UnitGating(find_structure(module, task.network.example))
    gates = {layer: (norm > 0).float() for layer, norm in gating.norms(dict(module.named_parameters())).items()}
    surviving = float(gating.effective_parameters(gates)) / 582_026
    sizes = json.loads((folder / "model.json").read_text())["sizes"]
    assert sizes["compact"]["parameters"] == int(gating.effective_parameters(gates))
    for kind, name in (("", "model.safetensors"), (" onnx", "model.onnx")):
        bytes_ = (folder / name).stat().st_size
        assert bytes_ == sizes[f"compact{kind}"]["bytes"]
        assert bytes_ <= (surviving + 0.02) * sizes[f"dense{kind}"]["bytes"]
    assert b"/home" not in (folder / "model.onnx").read_bytes()
    assert b"fedprior/" not in (folder / "model.onnx").read_bytes(), "no paths of the machine that made it"


def test_multiply_adds_are_those_of_the_formula(digits) -> None:
    folder, _, _ = digits
    found = describe(folder)
    (a, _), (b, _), (c, _) = (found["units"][name] for name in ("conv1", "conv2", "fc1"))
    expected = 24 * 24 * 25 * a + 8 * 8 * 25 * a * b + 16 * b * c + c * 10
    assert found["sizes"]["compact"]["multiply_adds"] == expected
    assert found["sizes"]["dense"]["multiply_adds"] == 24 * 24 * 25 * 32 + 8 * 8 * 25 * 32 * 64 + 1024 * 512 + 5120


# ---------------------------------------------------------------------- predict


@pytest.fixture(scope="module")
def pixels() -> tuple[np.ndarray, np.ndarray]:
    """The embedded test digits as 8-bit images."""
    import io
    import lzma
    from importlib import resources

    packed = resources.files("fedprior.catalogue.data").joinpath("mnist_mini.npz.xz").read_bytes()
    arrays = np.load(io.BytesIO(lzma.decompress(packed)))
    return arrays["test_x"], arrays["test_y"]


def test_images_and_arrays_give_the_networks_predictions(digits, pixels, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    folder, module, task = digits
    np.save(tmp_path / "many.npy", pixels[0][:9])
    np.save(tmp_path / "inputs.npy", task.data.test_x[:9].numpy())
    (tmp_path / "images").mkdir()
    for i in range(9):
        image.fromarray(pixels[0][i]).save(tmp_path / "images" / f"{i}.png")
    expected = module(task.data.test_x[:9]).softmax(1).max(1)
    for path in ("many.npy", "inputs.npy", "images"):
        found = predict(folder, [tmp_path / path])
        assert [row.label for row in found] == expected.indices.tolist()
        assert [row.probability for row in found] == pytest.approx(expected.values.tolist(), abs=1e-4)
    assert [row.name for row in found] == [str(tmp_path / "images" / f"{i}.png") for i in range(9)]
    one = predict(folder, [tmp_path / "images" / "4.png"])
    assert one == [found[4]]


@pytest.mark.parametrize("dtype", ["uint8", "int64", ">i2"])
@pytest.mark.parametrize("shape", [(9, 28, 28), (9, 1, 28, 28), (9, 28, 28, 1)])
def test_pixels_may_have_their_channel_first_last_or_not_at_all(shape, dtype, digits, pixels, tmp_path: Path) -> None:
    folder, _, task = digits
    read, images = reader(describe(folder)), pixels[0][:9].reshape(shape).astype(dtype)
    torch.testing.assert_close(read.array(images, tmp_path), task.data.test_x[:9])
    torch.testing.assert_close(read.array(images[3], tmp_path), task.data.test_x[3:4])
    np.savez(tmp_path / "data.npz", x=images, y=pixels[1][:9])
    assert torch.equal(read.read([tmp_path / "data.npz"])[1], read.labelled(tmp_path / "data.npz")[0])
    found = predict(folder, [tmp_path / "data.npz"])
    assert [row.label for row in found] == outputs(folder, task.data.test_x[:9]).argmax(1).tolist()


def test_colours_may_come_first_or_last() -> None:
    read = Reader((3, 4, 5), torch.float64, Scale((0.5, 0.4, 0.3), (0.5, 0.6, 0.7)))
    images = np.random.default_rng(0).integers(0, 256, (2, 4, 5, 3), np.uint8)
    found = read.array(images, Path("x.npy"))
    assert found.dtype == torch.float64
    for channel, (mean, deviation) in enumerate(zip(*read.scale, strict=True)):
        expected = (images[..., channel] / 255 - mean) / deviation
        np.testing.assert_allclose(found[:, channel].numpy(), expected, atol=1e-6)
    assert torch.equal(read.array(np.moveaxis(images, -1, 1), Path("x.npy")), found)
    with pytest.raises(DataError, match="whole numbers from -1 to -1; pixels run from 0 to 255"):
        read.array(np.full((1, 4, 5, 3), -1), Path("x.npy"))
    with pytest.raises(DataError, match=r"numbers from 0 to 255, but this network's inputs run from -1 to 1; pass"):
        read.array(np.linspace(0, 255, 60).reshape(1, 4, 5, 3), Path("x.npy"))
    inputs = found.numpy()
    assert torch.equal(read.array(inputs, Path("x.npy")), found), "real numbers are inputs as they are"
    assert torch.equal(read.array(np.moveaxis(inputs, 1, -1), Path("x.npy")), found)
    with pytest.warns(FedpriorWarning, match="numbers from 0 to 1, used as inputs without scaling; if they are pixels"):
        read.array(np.moveaxis(images, -1, 1) // 128 * 1.0, Path("x.npy"))


def test_networks_for_text_and_measurements_read_only_arrays(tmp_path: Path) -> None:
    words, numbers = Reader((4,), torch.int64, None), Reader((3,), torch.float32, None)
    path = Path("x.npy")
    assert torch.equal(words.array(np.array([[1, 2, 3, 255]], np.uint8), path), torch.tensor([[1, 2, 3, 255]]))
    assert torch.equal(words.array(np.array([1.0, 2, 3, 4]), path), torch.tensor([[1, 2, 3, 4]]))
    assert torch.equal(numbers.array(np.array([1, 2, -300]), path), torch.tensor([[1.0, 2, -300]]))
    with pytest.raises(DataError, match="fractional numbers, but this network reads whole numbers"):
        words.array(np.array([1.5, 2, 3, 4]), path)
    with pytest.raises(DataError, match="not trained on images; use real numbers"):
        numbers.array(np.zeros((2, 3), np.uint8), path)
    (tmp_path / "x.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"not trained on images; use an array \(.npy\)"):
        numbers.read([tmp_path / "x.png"])


@pytest.mark.parametrize("with_onnx", [False, True])
def test_unusable_inputs_and_outputs_without_classes_are_refused(with_onnx: bool, tmp_path: Path) -> None:
    if with_onnx:
        pytest.importorskip("onnxscript", reason="the extra `export` is not installed")
    module = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 1)).eval()
    export_module(module, torch.tensor([[1, 2], [3, 4]]), tmp_path / "out", about={}, with_onnx=with_onnx)
    np.save(tmp_path / "known.npy", np.array([[0, 4]]))
    np.save(tmp_path / "unknown.npy", np.array([[0, 7]]))
    with pytest.raises(ModelError, match=r"outputs \(1,\) are not class scores.*from model import load"):
        predict(tmp_path / "out", [tmp_path / "known.npy"])
    with pytest.raises((DataError, ModelError), match=r"does not run on these inputs|onnxruntime cannot run") as caught:
        predict(tmp_path / "out", [tmp_path / "unknown.npy"])
    assert "\n" not in str(caught.value)


def test_without_onnx_torch_predicts_the_same(digits, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, module, task = digits
    monkeypatch.setattr("fedprior.trained.compact.onnx.available", lambda: False)
    x = task.data.test_x[:20]
    torch.testing.assert_close(outputs(folder, x), module(x).detach(), atol=1e-5, rtol=1e-5)
    assert isinstance(load_module(folder), nn.Module)


def test_inputs_that_do_not_fit_are_refused(digits, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    folder, _, _ = digits
    image.fromarray(np.zeros((56, 56), np.uint8)).save(tmp_path / "large.png")
    np.save(tmp_path / "wide.npy", np.zeros((3, 28, 29), np.uint8))
    np.save(tmp_path / "nan.npy", np.full((1, 28, 28), np.nan, np.float32))
    np.save(tmp_path / "words.npy", np.array(["a", "b"]))
    (tmp_path / "text.png").write_text("not an image")
    (tmp_path / "empty").mkdir()
    np.save(tmp_path / "colour.npy", np.zeros((2, 28, 28, 3), np.uint8))
    np.save(tmp_path / "none.npy", np.zeros((0, 28, 28), np.uint8))
    np.save(tmp_path / "scalar.npy", np.uint8(3))
    np.save(tmp_path / "bright.npy", np.full((2, 1, 28, 28), 200.0))
    np.save(tmp_path / "negative.npy", np.full((2, 1, 28, 28), -1))
    np.save(tmp_path / "objects.npy", np.array([{}], object))
    np.savez(tmp_path / "several.npz", a=np.zeros((2, 28, 28), np.uint8), b=np.zeros(2))
    for name, words in {
        "large.png": "has 56×56 pixels, not 28×28; --resize",
        "wide.npy": r"has shape \(3, 28, 29\), not that of one or many inputs \(1, 28, 28\), channels first",
        "colour.npy": r"has shape \(2, 28, 28, 3\)",
        "none.npy": "holds no inputs",
        "scalar.npy": r"has shape \(\)",
        "bright.npy": r"numbers from 200 to 200, but this network's inputs run from -0\.4\d* to 2\.\d*; pass pixels as",
        "negative.npy": "whole numbers from -1 to -1; pixels run from 0 to 255",
        "objects.npy": "cannot be read as a numpy file",
        "several.npz": "holds 2 arrays, none of which is named x",
        "nan.npy": "not finite",
        "words.npy": "<U1 values, not numbers",
        "text.png": "cannot be read as an image",
        "empty": "holds no images",
        "nowhere.png": "does not exist",
        "nowhere.npy": "does not exist",
    }.items():
        with pytest.raises(DataError, match=words) as caught:
            predict(folder, [tmp_path / name])
        assert "\n" not in str(caught.value)
    assert len(predict(folder, [tmp_path / "large.png"], resize=True)) == 1
    with pytest.raises(RunError, match="not an exported model"):
        predict(tmp_path, [tmp_path / "large.png"])


def test_labelled_data_from_arrays_and_from_folders(digits, pixels, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    folder, _, task = digits
    read = reader(describe(folder))
    np.savez(tmp_path / "data.npz", x=pixels[0][:12], y=pixels[1][:12])
    x, y = read.labelled(tmp_path / "data.npz")
    torch.testing.assert_close(x, task.data.test_x[:12])
    assert torch.equal(y, task.data.test_y[:12])
    for i in range(12):
        (tmp_path / "tree" / str(pixels[1][i])).mkdir(parents=True, exist_ok=True)
        image.fromarray(pixels[0][i]).save(tmp_path / "tree" / str(pixels[1][i]) / f"{i:02}.png")
    tree_x, tree_y = read.labelled(tmp_path / "tree")
    order = sorted(range(12), key=lambda i: (str(pixels[1][i]), i))
    torch.testing.assert_close(tree_x, x[order])
    assert torch.equal(tree_y, y[order])
    np.savez(tmp_path / "odd.npz", a=pixels[0])
    with pytest.raises(DataError, match="arrays named x and y"):
        read.labelled(tmp_path / "odd.npz")
    whole = (tmp_path / "data.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="cannot be read as a numpy file"):
        read.labelled(tmp_path / "cut.npz")
    np.savez(tmp_path / "shares.npz", x=pixels[0][:2], y=np.array([0.5, 1.5]))
    with pytest.raises(DataError, match="labels that are float64"):
        read.labelled(tmp_path / "shares.npz")


def test_targets_have_the_kind_of_those_in_training(tmp_path: Path) -> None:
    read = Reader((2,), torch.float32, None)
    for like, y, found in (
        (torch.zeros(3, 1), np.array([[0.5], [1], [2]]), torch.tensor([[0.5], [1], [2]])),
        (torch.zeros(3), np.array([1, 2, 3]), torch.tensor([1.0, 2, 3])),
        (torch.zeros(3, 2, dtype=torch.int64), np.array([[1, 2]] * 3), torch.tensor([[1, 2]] * 3)),
    ):
        np.savez(tmp_path / "data.npz", x=np.zeros((3, 2)), y=y)
        assert torch.equal(read.labelled(tmp_path / "data.npz", like)[1], found)
    for like, y, words in (
        (torch.zeros(3, 1), np.zeros(3), r"labels of shape \(3,\), not \(3, 1\)"),
        (torch.zeros(3), np.full(3, np.inf), "labels that are not finite"),
        (torch.zeros(3), np.array(["a", "b", "c"]), "labels that are <U1, not numbers"),
    ):
        np.savez(tmp_path / "data.npz", x=np.zeros((3, 2)), y=y)
        with pytest.raises(DataError, match=words):
            read.labelled(tmp_path / "data.npz", like)


def test_an_export_may_go_to_the_current_folder_if_it_is_empty(
    digits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, module, task = digits
    monkeypatch.chdir(tmp_path)
    export_module(module, task.data.test_x[:2], Path(), about={}, with_onnx=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.json", "model.py", "model.safetensors"]
    with pytest.raises(RunError, match="exists"):
        export_module(module, task.data.test_x[:2], Path(), about={}, with_onnx=False)


def test_a_damaged_description_is_a_one_line_error(digits, tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text('{"format": "fedprior-export-1"}')
    with pytest.raises(RunError, match=r"model\.json cannot be read: 'input_shape'"):
        describe(tmp_path)
    about = {"format": "fedprior-export-1", "input_shape": [3], "input_type": "nn"}
    (tmp_path / "model.json").write_text(json.dumps(about))
    with pytest.raises(RunError, match=r"model\.json cannot be read: its input_type is 'nn'"):
        describe(tmp_path)
