"""How a GPU multiplies: what is set, for how long, and what is refused. No GPU is needed to set it."""

import pytest
import torch

import fedprior
from fedprior.engines import arithmetic
from fedprior.kernels.launch import precision


def current():
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize(("kind", "inside"), [("tf32", ("high", True)), ("float32", ("highest", False))])
def test_arithmetic_applies_to_products_and_convolutions_and_is_restored(kind, inside):
    before = current()

    def fail():
        with arithmetic.using(kind, torch.device("cuda")):
            assert current() == inside
            assert precision() == ("tf32" if kind == "tf32" else "ieee")
            raise RuntimeError("a round that fails")

    with pytest.raises(RuntimeError, match="a round that fails"):
        fail()
    assert current() == before


def test_nothing_changes_on_a_cpu():
    before = current()
    with arithmetic.using("float32" if before[1] else "tf32", torch.device("cpu")):
        assert current() == before


def test_an_unknown_arithmetic_is_refused():
    with pytest.raises(fedprior.SettingError, match="arithmetic must be tf32 or float32, got 'bf16'"):
        fedprior.run("mnist-mini", arithmetic="bf16")


def test_arithmetic_is_part_of_a_runs_config(small_task, tmp_path):
    fedprior.run(small_task(), "fedavg", rounds=1, clients_per_round=2, arithmetic="float32", out=tmp_path / "run")
    assert 'arithmetic = "float32"' in (tmp_path / "run" / "config.toml").read_text()
