"""The code in the documents is run as it stands."""

import re
from pathlib import Path

import torch

import fedprior

DOCS = Path(__file__).parents[1] / "docs"


def python_blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(encoding="utf-8"), re.DOTALL)


def test_new_prior_example_runs_and_is_what_it_says() -> None:
    definition, use = python_blocks("new-prior.md")
    namespace: dict[str, object] = {"__name__": "new_prior"}
    exec(definition, namespace)
    prior = namespace["StudentT"]()  # type: ignore[operator]
    phi, w = torch.randn(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    ours = prior.log_prob({"weights": {"w": phi}}, {"weights": {"w": w}})
    student = torch.distributions.StudentT(torch.tensor(3.0).double(), w, 0.01)
    at_centre = torch.distributions.StudentT(torch.tensor(3.0).double(), phi, 0.01)
    torch.testing.assert_close(ours, (student.log_prob(phi) - at_centre.log_prob(phi)).sum())
    exec(use, namespace)
    result = namespace["result"]
    assert isinstance(result, fedprior.Result)
    assert len(result.records) == 3
    assert result.records[-1]["train_loss"] < result.records[0]["train_loss"]


def test_every_algorithm_is_documented() -> None:
    text = (DOCS / "algorithms.md").read_text(encoding="utf-8")
    for name in fedprior.ALGORITHMS:
        assert f"`{name}`" in text, name
