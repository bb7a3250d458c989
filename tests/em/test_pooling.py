"""How a server combines the statistics that clients report, worked out by hand on one norm of two channels."""

import torch
from torch import Tensor

from fedprior.core.trees import Params, stack
from fedprior.em.statistics import absorb, masked


def statistics(mean: list[float], variance: list[float], count: float) -> Params:
    values = {"n.running_mean": mean, "n.running_var": variance}
    found = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
    return {**found, "count": torch.tensor(count, dtype=torch.float64)}


def server(count: float = 100.0) -> Params:
    return statistics([10.0, 10.0], [5.0, 5.0], count)


def close(found: Tensor, *expected: float) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


REPORTS = stack([statistics([0.0, 2.0], [1.0, 1.0], 1), statistics([4.0, 2.0], [1.0, 3.0], 3)])
"""One example with mean 0, three with mean 4: together mean 3, and variance 1 + (9 + 3 · 1) / 4 = 4."""


def test_reports_are_pooled_by_their_examples() -> None:
    found = absorb(server(), REPORTS, {}, None, 1.0)
    close(found["n.running_mean"], 3, 2)
    close(found["n.running_var"], 4, 2.5)
    assert float(found["count"]) == 4


def test_the_server_adopts_the_first_statistics_fully_and_later_ones_in_part() -> None:
    found = absorb(server(), REPORTS, {}, None, 0.25)
    close(found["n.running_mean"], 10 - 7 / 4, 10 - 8 / 4)
    close(found["n.running_var"], 5 - 1 / 4, 5 - 2.5 / 4)
    close(absorb(server(0), REPORTS, {}, None, 0.25)["n.running_mean"], 3, 2)


def test_statistics_count_where_a_unit_was_sent_and_else_stay() -> None:
    """The second client has closed the first unit; both have closed the second."""
    sent = {"n.weight": torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)}
    found = absorb(server(), REPORTS, sent, None, 1.0)
    close(found["n.running_mean"], 0, 10)
    close(found["n.running_var"], 1, 5)


def test_models_have_the_statistics_of_the_clients_they_answer_for() -> None:
    """Two models: the first answers for the first client alone, the second for both by half and whole."""
    shares = torch.tensor([[1.0, 0.5], [0.0, 1.0]], dtype=torch.float64)
    known = {name: value if name == "count" else torch.stack([value, value]) for name, value in server().items()}
    found = absorb(known, REPORTS, {}, shares, 1.0)
    close(found["n.running_mean"][0], 0, 2)
    close(found["n.running_mean"][1], 3 * 4 / 3.5, 2)


def test_statistics_of_closed_units_are_not_sent() -> None:
    left = masked(server(), {"n.weight": torch.tensor([1.0, 0.0], dtype=torch.float64)})
    close(left["n.running_mean"], 10, 0)
    close(left["n.running_var"], 5, 0)
    assert float(left["count"]) == 100
    assert masked(server(), {})["n.running_mean"].tolist() == [10, 10]
