"""Every prior but spike and slab on a network of a few weights: what its formula gives, worked out by hand."""

import math

import pytest
import torch
from torch import Tensor, nn

from fedprior.core import keys
from fedprior.core.errors import SettingError
from fedprior.core.optimisers import Optimiser, TreeOptimiser
from fedprior.core.trees import Params, Tree, stack
from fedprior.em import Algorithm, m_step
from fedprior.em.lifting import lifting
from fedprior.engines.stacked.tensors import own_settings
from fedprior.priors import (
    Assignment,
    Distance,
    FixedGates,
    Gaussian,
    GroupLasso,
    Laplace,
    Mixture,
    Narrow,
    Prior,
    SpikeSlab,
    StudentT,
)
from fedprior.priors.gated import gated_mean
from fedprior.units import UnitGating, WeightGating, find_structure


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def no_look(params: Params) -> Tensor:
    raise AssertionError("this prior does not look at the data")


def hidden_layer() -> UnitGating:
    """Two inputs, three hidden units, two outputs: a unit has three weights of its own, and two read it."""
    return UnitGating(find_structure(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), torch.zeros(2)))


def hidden_params(scale: float = 1.0) -> Params:
    """Units of norms 5, 1 and 0.5: (3, 4, 0), (0, 0, 1) and (0.3, 0, 0.4)."""
    return {
        "0.weight": scale * torch.tensor([[3.0, 4], [0, 0], [0.3, 0]]).double(),
        "0.bias": scale * numbers(0, 1, 0.4),
        "2.weight": scale * torch.tensor([[1.0, 2, 2], [0, 2, -1]]).double(),
        "2.bias": scale * numbers(5, 6),
    }


def gates(*values: float) -> Params:
    return {"0": numbers(*values)}


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (lambda value: Gaussian(value), (-1e-9, -math.inf, math.nan)),
        (lambda value: Laplace(value), (-1e-9, math.nan)),
        (lambda value: StudentT(freedom=value), (0.0, -1.0, math.nan)),
        (lambda value: StudentT(scale=value), (0.0, -1.0, math.nan)),
        (lambda value: StudentT(trim=value), (-0.01, 0.5, math.nan)),
        (lambda value: StudentT(steps=value), (-1,)),
        (lambda value: Distance(precision=value), (-1e-9, math.nan)),
        (lambda value: Distance(steps=value), (0,)),
        (lambda value: Mixture(precision=value), (0.0, -1.0, math.nan)),
        (lambda value: Mixture(components=value), (0, -1)),
        (lambda value: Mixture(spread=value), (-0.01, 1.01, math.nan)),
        (lambda value: GroupLasso(hidden_layer(), value), (-1e-9, math.nan)),
        (lambda value: FixedGates(hidden_layer(), {"0": value}), (-0.1, 1.0, 1.5, math.nan)),
        (lambda value: FixedGates(hidden_layer(), {"0": 0.5}, precision=value), (-1e-9, math.nan)),
        (lambda value: Narrow(hidden_layer(), sparsity=value), (-0.01, 1.0, math.nan)),
        (lambda value: Narrow(hidden_layer(), precision=value), (-1e-9, math.nan)),
        (lambda value: Narrow(hidden_layer(), dense_rounds=value), (-1,)),
        (lambda value: Narrow(hidden_layer(), shrink=value), (0.0, -0.5, 1.01, math.nan)),
        (lambda value: Narrow(hidden_layer(), conv_rate=value), (-0.1, 1.0, math.nan)),
        (lambda value: Narrow(hidden_layer(), linear_rate=value), (-0.1, 1.0, math.nan)),
        (lambda value: SpikeSlab(hidden_layer(), lambda0=value), (-1e-9, math.nan)),
        (lambda value: SpikeSlab(hidden_layer(), precision=value), (-1e-9, math.nan)),
        (lambda value: SpikeSlab(hidden_layer(), cross_entropy=value), (-1e-9, math.nan)),
        (lambda value: SpikeSlab(hidden_layer(), temperature=value), (0.0, -1.0, math.nan)),
        (lambda value: SpikeSlab(hidden_layer(), theta_start=value), (0.0, 1.0, -0.1, math.nan)),
        (lambda value: SpikeSlab(hidden_layer(), prune_below=value), (0.0, 1.0, 1.1, math.nan)),
        (lambda value: SpikeSlab(hidden_layer(), dense_rounds=value), (-1,)),
        (lambda value: UnitGating(hidden_layer().structure, floor=value), (0, -1)),
        (lambda value: WeightGating({"w": (2, 2)}, floor=value), (0, -1)),
    ],
)
def test_a_setting_out_of_its_range_is_refused(make, wrong):
    for value in wrong:
        with pytest.raises(SettingError):
            make(value).check()


def test_the_ends_of_ranges_are_allowed():
    for fine in (
        *(StudentT(trim=0.0, steps=0), Distance(steps=1)),
        *(Gaussian(0.0), Laplace(0.0), Mixture(1, 1e-9, 0.0), Mixture(spread=1.0), GroupLasso(hidden_layer(), 0.0)),
        *(FixedGates(hidden_layer(), {"0": 0.0}), Narrow(hidden_layer(), 0.0, shrink=1.0, conv_rate=0.0)),
        SpikeSlab(hidden_layer(), lambda0=0.0, precision=0.0, cross_entropy=0.0),
    ):
        fine.check()


# ---------------------------------------------------------------------- densities


def test_the_gaussian_is_minus_half_the_squared_distance():
    assignment, other = (Assignment({"a": numbers(*values)}) for values in ((4.0, -1.0), (1.0, 1.0)))
    prior, server = Gaussian(0.3), {"weights": other.weights}
    assert float(prior.log_prob(assignment, server)) == -6.5
    assert float(prior.tempered_log_prob(assignment, server)) == pytest.approx(-6.5 * 0.3)
    assert float(Gaussian(0.0).tempered_log_prob(assignment, server)) == 0
    many = stack([assignment, other, other])
    assert prior.solve(many, server)["weights"]["a"].tolist() == [2.0, pytest.approx(1 / 3)]


def test_the_laplace_is_minus_the_distance_and_its_pull_is_the_exact_step():
    prior = Laplace(0.5)
    packet = {"weights": {"a": numbers(1, 1, 1, 1)}, "more": {}}
    local = {"weights": {"a": numbers(4, 1.04, -2, 0.96)}}
    assert float(prior.log_prob(Assignment(**local), packet)) == pytest.approx(-(3 + 0.04 + 3 + 0.04))
    assert float(prior.tempered_log_prob(Assignment(**local), packet)) == 0, "the pull is the step, not a gradient"
    assert not prior.smooth
    pulled = prior.prox(local, packet, numbers(0.1)[0])["weights"]["a"]
    torch.testing.assert_close(pulled, numbers(3.95, 1, -1.95, 1), rtol=0, atol=1e-12)
    assert pulled[1] == pulled[3] == 1, "equal, not only near"
    upload = prior.commit({"weights": {"a": pulled}}, packet, keys.key(0))
    assert upload["gates"]["a"].tolist() == [1, 0, 1, 0]
    assert upload["weights"]["a"][[1, 3]].tolist() == [0, 0], "what did not move is not sent"
    moved_since = {"weights": {"a": numbers(9, 8, 7, 6)}}
    torch.testing.assert_close(prior.realise(upload, moved_since)["a"], numbers(3.95, 8, -1.95, 6))


@pytest.mark.parametrize(("values", "median"), [((5, 1, 100), 5), ((5, 1, 100, 2), 3.5), ((7,), 7), ((1, 2), 1.5)])
def test_the_laplaces_m_step_is_the_median(values, median):
    uploads = stack([Assignment({"a": numbers(value)}) for value in values])
    assert Laplace().solve(uploads, {"weights": {"a": numbers(0)}})["weights"]["a"].tolist() == [median]


def uploads_of(*values: float) -> Assignment:
    return stack([Assignment({"a": numbers(value)}) for value in values])


NOWHERE = {"weights": {"a": numbers(0)}}


def test_the_students_density_is_torchs_and_its_m_step_trusts_near_clients_more():
    prior, phi, w = StudentT(3.0, 0.5, 0.3, 1, precision=0.2), numbers(1, -2, 0.3), numbers(0.5, 1, 0.3)
    ours = prior.log_prob(Assignment({"a": phi}), {"weights": {"a": w}})
    here, there = (torch.distributions.StudentT(numbers(3), at, numbers(0.5)) for at in (w, phi))
    torch.testing.assert_close(ours, (here.log_prob(phi) - there.log_prob(phi)).sum())
    assert float(prior.tempered_log_prob(Assignment({"a": phi}), {"weights": {"a": w}})) == pytest.approx(0.2 * ours)
    start = (0.1 * 0 + 1 * 1 + 0.1 * 3) / 1.2  # what is left of the clients when 0.9 of one are cut off at each end
    trust = [4 / (3 + ((x - start) / 0.5) ** 2) for x in (0, 1, 3)]
    expected = (trust[1] + 3 * trust[2]) / sum(trust)
    assert float(prior.solve(uploads_of(0, 3, 1), NOWHERE)["weights"]["a"]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("values", "trim", "mean"),
    [
        ((5, 1, 100, 3), 0.25, 4),
        ((5, 1, 100, 3), 0.0, 27.25),
        ((5, 1, 100), 0.49, 5),
        ((1, 2, 3, 4, 100), 0.3, (0.5 * 2 + 3 + 0.5 * 4) / 2),
        ((7,), 0.4, 7),
    ],
)
def test_the_trimmed_mean_leaves_out_both_ends(values, trim, mean):
    """A cut within a client leaves a part of it: 0.3 of five clients are one and a half."""
    found = StudentT(trim=trim, steps=0).solve(uploads_of(*values), NOWHERE)["weights"]["a"]
    assert found.tolist() == [pytest.approx(mean)]


def test_the_distance_is_that_of_all_parameters_together():
    prior, server = Distance(0.5), {"weights": {"a": numbers(1, 1), "b": numbers(0)}}
    away = Assignment({"a": numbers(4, 5), "b": numbers(12)})
    assert float(prior.log_prob(away, server)) == pytest.approx(-13)
    assert float(prior.tempered_log_prob(away, server)) == pytest.approx(-6.5)
    here = {"weights": {name: value.clone().requires_grad_() for name, value in server["weights"].items()}}
    prior.log_prob(Assignment(server["weights"]), here).backward()
    assert here["weights"]["a"].grad.tolist() == [0, 0], "a pull that is known where there is none"


def test_the_geometric_median_of_a_triangle_sees_its_sides_under_equal_angles():
    """Fermat's point, and however far the fourth client of five goes, it moves the point no further."""
    corners = [numbers(0, 0), numbers(4, 0), numbers(1, 3)]
    solve = Distance(steps=200).solve
    point = solve(stack([Assignment({"a": c}) for c in corners]), {"weights": {"a": numbers(0, 0)}})["weights"]["a"]
    sides = [(corner - point) / (corner - point).norm() for corner in corners]
    for one in range(3):
        assert float(sides[one] @ sides[one - 1]) == pytest.approx(-0.5, abs=1e-9)
    honest = [numbers(0, 1), numbers(1, 0), numbers(0, -1), numbers(-1, 0)]
    for far in (1e3, 1e9):
        cohort = stack([Assignment({"a": value}) for value in [*honest, numbers(far, 0)]])
        assert solve(cohort, {"weights": {"a": numbers(0, 0)}})["weights"]["a"].norm() < 1


def test_the_mixture_is_the_log_of_a_mean_of_gaussians():
    """φ = 1 and components at 0 and 3 with λ = 0.5: exp(−0.25) and exp(−1)."""
    prior = Mixture(2, 0.5)
    server, assignment = {"weights": {"a": torch.tensor([[0.0], [3.0]]).double()}}, Assignment({"a": numbers(1)})
    parts = math.exp(-0.25), math.exp(-1.0)
    log_density = math.log(sum(parts) / 2)
    assert float(prior.log_prob(assignment, server)) == pytest.approx(log_density / 0.5)
    assert float(prior.tempered_log_prob(assignment, server)) == pytest.approx(log_density)
    shares = [part / sum(parts) for part in parts]
    torch.testing.assert_close(prior.responsibilities(assignment, server), numbers(*shares))
    other = Assignment({"a": numbers(2)})  # by symmetry the shares the other way round
    solved = prior.solve(stack([assignment, other]), server)["weights"]["a"].flatten()
    torch.testing.assert_close(solved, numbers(shares[0] * 1 + shares[1] * 2, shares[1] * 1 + shares[0] * 2))


def test_a_component_without_clients_does_not_move():
    prior = Mixture(2, 1.0)
    server = {"weights": {"a": torch.tensor([[0.0, 0.0], [300.0, 500.0]]).double()}}
    uploads = stack([Assignment({"a": numbers(1, 2)}), Assignment({"a": numbers(3, 4)})])
    solved = prior.solve(uploads, server)["weights"]["a"]
    assert solved.tolist() == [[2, 3], [300, 500]]


def test_a_client_of_the_mixture_looks_at_its_data_only_if_there_is_a_choice():
    packet = {"weights": {"a": torch.tensor([[5.0], [1.0], [9.0]]).double()}}
    local = Mixture(3).adopt(packet, keys.key(0), lambda params: (params["a"] - 8.5).abs().sum())
    assert local["weights"]["a"].tolist() == [9.0]
    alone = {"weights": {"a": packet["weights"]["a"][:1]}}
    assert Mixture(1).adopt(alone, keys.key(0), no_look)["weights"]["a"].tolist() == [5.0]
    assert Mixture(3).looks_at_data
    assert not Mixture(1).looks_at_data


@pytest.mark.parametrize("spread", [0.0, 0.25, 1.0])
def test_components_are_mixed_with_a_shuffle_of_the_models_entries(spread):
    value = torch.arange(50, dtype=torch.float64)
    first, second, third = Mixture(3, spread=spread).init({"a": value})["weights"]["a"]
    assert torch.equal(first, value)
    for other in (second, third):
        if spread:
            shuffled = (other - (1 - spread) * value) / spread
            torch.testing.assert_close(shuffled.sort().values, value)
            assert not torch.equal(shuffled.round(), value)
        else:
            assert torch.equal(other, value)
    assert spread == 0 or not torch.equal(second, third)


def test_the_group_lasso_has_no_drift_at_the_client():
    """λ (5 + 1 + 0.5), wherever the server is; the server's own term is the squared distance."""
    prior, params = GroupLasso(hidden_layer(), 0.3), hidden_params()
    elsewhere = {name: value + 1 for name, value in params.items()}
    assignment = Assignment(params, gates(1, 1, 1))
    penalty = -prior.tempered_log_prob(assignment, {"weights": elsewhere})
    assert float(penalty) == pytest.approx(0.3 * 6.5)
    assert float(prior.drift(assignment, {"weights": elsewhere})) == -0.5 * (6 + 3 + 6 + 2)
    assert float(prior.log_prob(assignment, {"weights": elsewhere})) == pytest.approx(-8.5 - 6.5)


def test_the_group_lasso_keeps_what_is_above_its_strength_and_not_what_is_at_it():
    prior, params = GroupLasso(hidden_layer(), 1.0), hidden_params()
    upload = prior.commit({"weights": params}, {}, keys.key(0))
    assert upload["gates"]["0"].tolist() == [1, 0, 0]
    assert upload["floored"]["0"] == 0
    pruned = prior.prune({"weights": params})
    for weights in (upload["weights"], pruned["weights"]):
        assert weights["0.weight"].tolist() == [[3, 4], [0, 0], [0, 0]]
    assert pruned["weights"]["2.weight"].tolist() == [[1, 0, 0], [0, 0, 0]], "the server's units take columns along"
    assert upload["weights"]["2.weight"].tolist() == params["2.weight"].tolist(), "a client's do not"
    assert pruned["open"]["0"].tolist() == [1, 0, 0]
    strict = GroupLasso(hidden_layer(), 6.0).commit({"weights": params}, {}, keys.key(0))
    assert strict["gates"]["0"].tolist() == [1, 0, 0], "the floor keeps the strongest"
    assert strict["floored"]["0"] == 1


def test_with_global_gates_only_sent_weights_are_pulled():
    """Unit 1 is closed: its own weights and those that read it have no say; λ/2 over the rest."""
    for prior in (FixedGates(hidden_layer(), {"0": 0.5}, precision=0.4), Narrow(hidden_layer(), precision=0.4)):
        local, packet = hidden_params(2.0), {"weights": hidden_params(), "gates": gates(1, 0, 1)}
        expected = prior.expect({"weights": local}, packet)
        squares = (9 + 16 + 0.09) + 0.16 + (1 + 4 + 0 + 1) + (25 + 36)
        assert float(prior.tempered_log_prob(expected, packet)) == pytest.approx(-0.4 / 2 * squares)
        assert float(prior.log_prob(expected, packet)) == pytest.approx(-0.5 * squares)
        run = prior.relax(expected, packet, keys.key(0))
        assert run["0.bias"].tolist() == [0, 0, 0.8]
        sent = prior.commit({"weights": local}, packet, keys.key(0))
        assert sent["weights"]["2.weight"].tolist() == [[2, 0, 4], [0, 0, -2]]


@pytest.mark.parametrize(
    "prior", [GroupLasso(hidden_layer(), 1.0), SpikeSlab(hidden_layer())], ids=["fedl1", "fedsparse"]
)
def test_an_upload_lacks_its_own_closed_groups_and_what_the_server_has_pruned(prior):
    """The client closes unit 2, the server has closed unit 1: of the columns only those of unit 1 stay at home."""
    mine, packet = gates(1, 0, 0), {"weights": hidden_params(), "gates": gates(1, 0, 1)}
    upload = prior.leave(hidden_params(), mine, packet)
    assert upload["0.bias"].tolist() == [0, 0, 0]
    assert upload["0.weight"].tolist() == [[3, 4], [0, 0], [0, 0]]
    assert upload["2.weight"].tolist() == [[1, 0, 2], [0, 0, -1]]
    sent = prior.sent(mine, packet)
    for name, value in hidden_params().items():
        torch.testing.assert_close(upload[name], value * sent.get(name, torch.ones(()).double()))
    assert (sent["2.weight"].expand(2, 3) > 0).tolist() == [[True, False, True]] * 2
    layout = prior.uplink(packet)
    assert layout.sections["weights"].mask(mine)["2.weight"].reshape(-1).tolist() == [1, 0, 1]
    nothing_pruned = prior.leave(hidden_params(), mine, {"weights": hidden_params()})
    assert nothing_pruned["2.weight"].tolist() == hidden_params()["2.weight"].tolist()


def test_the_gated_mean_is_over_those_who_sent():
    gating = hidden_layer()
    server = {"weights": hidden_params(100.0)}
    clients = [
        Assignment(gating.prune(hidden_params(scale), gates(*z)), gates(*z))
        for scale, z in ((1.0, (1, 0, 1)), (2.0, (1, 0, 0)), (6.0, (0, 0, 1)))
    ]
    sent = torch.func.vmap(gating.mask)(stack(clients).gates)
    mean = gated_mean(sent, stack(clients), server)
    torch.testing.assert_close(mean["0.weight"][0], numbers(3, 4) * 1.5)  # of clients 0 and 1
    assert mean["0.bias"][1] == 100, "no client sent it: it stays"
    torch.testing.assert_close(mean["0.bias"][2], torch.tensor(0.4 * 3.5, dtype=torch.float64))  # of clients 0 and 2
    torch.testing.assert_close(mean["2.weight"][1], numbers(0, 200, -3.5))
    torch.testing.assert_close(mean["2.bias"], numbers(5, 6) * 3)  # of all three


# ---------------------------------------------------------------------- gates that the server draws


def test_a_unit_is_left_out_where_its_draw_is_below_the_rate():
    gating = UnitGating(find_structure(nn.Sequential(nn.Linear(1, 500), nn.ReLU(), nn.Linear(500, 1)), torch.zeros(1)))
    params = {name: torch.ones(shape, dtype=torch.float64) for name, shape in gating.shapes.items()}
    for prior in (
        FixedGates(gating, {"0": 0.2}),
        Narrow(gating, 0.0, linear_rate=0.2, kinds={"0": "linear"}),
        Narrow(gating, 0.0, conv_rate=0.2, kinds={"0": "conv"}),
    ):
        assert prior.per_client
        server = prior.init(params)
        packet = prior.broadcast(server, keys.key(4))
        draws = keys.uniform(keys.key(4), (500,), torch.float64)
        assert torch.equal(packet["gates"]["0"] > 0, draws >= 0.2)
        assert torch.equal(packet["weights"]["0.weight"][:, 0], packet["gates"]["0"])
        assert torch.equal(packet["weights"]["2.weight"][0], packet["gates"]["0"])
        assert packet["floored"]["0"] == 0


def test_the_floor_of_a_draw_takes_the_largest_draw_of_an_open_unit_only():
    """All are left out; the unit with the largest draw of all is closed for good, so the next one is kept."""
    gating = hidden_layer()
    prior = FixedGates(gating, {"0": 0.999999})
    for seed in range(6):
        draws = keys.uniform(keys.key(seed), (3,), torch.float64)
        best, second, _ = draws.argsort(descending=True).tolist()
        open_ = torch.ones(3, dtype=torch.float64)
        open_[best] = 0
        drawn, floored = prior.draw({"0": open_}, keys.key(seed))
        assert drawn["0"].nonzero().flatten().tolist() == [second]
        assert floored["0"] == 1


def test_noise_at_the_client_keeps_the_mean():
    gating = WeightGating({"w": (1, 4000)})
    prior = FixedGates(gating, {"w": 0.2}, noise=True)
    ones = {"w": torch.ones(1, 4000, dtype=torch.float64)}
    drawn = prior.relax(Assignment(ones), {"gates": ones}, keys.key(1))["w"]
    assert set(drawn.unique().tolist()) == {0.0, 1.25}
    assert float(drawn.mean()) == pytest.approx(1, abs=5 * 0.5 / 4000**0.5)


def test_drawn_shares_and_the_shipped_network():
    """A unit's strength is its norm times that of what reads it: 5·1, 1·√8 and 0.5·√5."""
    prior = Narrow(hidden_layer(), 0.0, linear_rate=0.25, kinds={"0": "linear"})
    strengths = numbers(5, math.sqrt(8), 0.5 * math.sqrt(5))
    torch.testing.assert_close(prior.shares(hidden_params())["0"], strengths / strengths.sum())
    server = {**prior.init(hidden_params()), "open": gates(1, 0, 1)}
    assert prior.gates(server)["0"].tolist() == [0.75, 0, 0.75]
    shipped = prior.predict(server)
    assert shipped["0.bias"][0].tolist() == [0, 0, pytest.approx(0.3)]
    assert shipped["2.weight"][0].tolist() == [[1, 0, 2], [0, 0, -1]], "only what makes a unit is scaled"
    assert prior.effective_parameters(server) == 2 * 3 + 2 * 2 + 2


def test_units_of_least_worth_per_parameter_close_until_the_size_is_met():
    """Every unit takes five parameters with it; shares are 0.558, 0.316 and 0.125 of 17 parameters."""
    prior = Narrow(hidden_layer(), sparsity=0.5, shrink=0.2, dense_rounds=1)
    weights, everything = hidden_params(), gates(1, 1, 1)
    for goal, left in ((17, [1, 1, 1]), (16.9, [1, 1, 0]), (12, [1, 1, 0]), (11.9, [1, 0, 0]), (1, [1, 0, 0])):
        found, _ = prior.assign(weights, everything, torch.tensor(goal, dtype=torch.float64))
        assert found["0"].tolist() == left, goal
    goals = [float(prior._goal(torch.tensor(float(age), dtype=torch.float64))) / 17 for age in range(6)]
    assert goals == pytest.approx([1, 1, 0.8, 0.64, 0.512, 0.5])
    assert [prior.settled(number) for number in range(6)] == [False] * 5 + [True]


# ---------------------------------------------------------------------- the base, and stacked runs


class Two(Gaussian):
    """Two terms of which one has no weight at a client."""

    def terms(self):
        return {"density": self.density, "free": lambda assignment, server: torch.tensor(10.0, dtype=torch.float64)}


def test_the_e_step_weighs_its_terms_and_the_m_step_does_not():
    assignment, server = Assignment({"a": numbers(3.0)}), {"weights": {"a": numbers(1.0)}}
    prior = Two(0.25)
    assert float(prior.tempered_log_prob(assignment, server)) == -2 * 0.25
    assert float(prior.log_prob(assignment, server)) == -2 + 10


class Spelled(Gaussian):
    """The Gaussian's density, written out: its slope must come from autograd."""

    def density(self, assignment: Assignment, server: Tree) -> Tensor:
        return super().density(assignment, server)


@pytest.mark.parametrize("sizes", [None, (3.0, 1.0, 7.0, 20.0, 9.0)], ids=["equal", "examples"])
def test_the_gaussians_slope_is_autograds_to_the_last_bit(sizes):
    assert Gaussian.known_slope
    assert not Spelled.known_slope
    assert not Two.known_slope
    weights = {"a": torch.randn(4, 3, dtype=torch.float64), "b": torch.randn(2, dtype=torch.float64)}
    sent = {name: value + torch.randn(5, *value.shape, dtype=torch.float64) for name, value in weights.items()}
    weight = sizes and numbers(*sizes)
    stepped = []
    for prior in (Gaussian(), Spelled()):
        algorithm = Algorithm(prior, {"weights": Optimiser("SGD", {"lr": 0.1})})
        optimiser = TreeOptimiser({"weights": Optimiser("SGD", {"lr": 0.3})}, {"weights": dict(weights)})
        stepped.append(m_step(algorithm, {"weights": weights}, {"weights": sent}, optimiser, weight=weight)["weights"])
    for name in weights:
        assert torch.equal(stepped[0][name], stepped[1][name])
        assert not torch.equal(stepped[0][name], weights[name])


def test_stacked_runs_have_their_own_settings():
    priors = [GroupLasso(hidden_layer(), value) for value in (0.1, 2.0)]
    settings = own_settings(priors, numbers(0))
    state: Tree = {"weights": hidden_params()}
    assignment = Assignment(hidden_params(), gates(1, 1, 1))
    algorithm = Algorithm(priors[0], {"weights": Optimiser("SGD", {"lr": 0.1})})
    lift, both = lifting(algorithm, True, settings), stack([state, state])
    penalties = lift(lambda own: own.prior.tempered_log_prob)(stack([assignment, assignment]), both)
    pruned = lift(lambda own: own.prior.prune)(both)
    for i, prior in enumerate(priors):
        assert float(penalties[i]) == float(prior.tempered_log_prob(assignment, state))
        assert pruned["open"]["0"][i].tolist() == prior.prune(state)["open"]["0"].tolist()
    assert priors[0].strength == 0.1, "a prior is another one at other settings"
    assert own_settings([priors[0], priors[0]], numbers(0)) == {}


class Near(Prior):
    """The least that a prior must say."""

    def density(self, assignment, server):
        return -sum((assignment.weights[name] - w).abs().sqrt().sum() for name, w in server["weights"].items())


def test_with_a_server_optimiser_a_density_is_enough():
    sgd, params = {"weights": Optimiser("SGD", {"lr": 0.1})}, {"a": numbers(1.0, 5.0)}
    algorithm = Algorithm(Near(), sgd, sgd)
    algorithm.check(params)
    server = algorithm.init(params)
    upload = {"weights": {"a": numbers(5.0, 5.0 - 0.25)}}
    assert float(Near().tempered_log_prob(Assignment(**upload), server)) == -2.5, "it counts in full"
    moved = m_step(algorithm, server, stack([upload]), TreeOptimiser(sgd, server))
    assert moved["weights"]["a"].tolist() == [1 + 0.1 * 0.25, 5 - 0.1]
    with pytest.raises(SettingError, match="Near has no M-step in closed form: give it `solve`, or"):
        Algorithm(Near(), sgd).check(params)
