"""The settings of a run: each at its border, and one step beyond."""

import pytest

from fedprior.core.errors import SettingError
from fedprior.engines.settings import Settings, check_cohort


@pytest.mark.parametrize(
    ("fine", "wrong"),
    [
        *(({name: 1}, {name: 0}) for name in ("rounds", "clients_per_round", "batch_size", "epochs", "evaluate_every")),
        *(({name: 1}, {name: 0}) for name in ("local_steps", "checkpoint_every", "workers")),
        ({"attack": "scale", "attackers": 0.999}, {"attack": "scale", "attackers": 1.0}),
        ({"attack": "scale", "attackers": 0.0}, {"attack": "scale", "attackers": -0.001}),
        ({"attackers": 0.0}, {"attackers": 0.1}),
        ({"seed": 2**63 - 1}, {"seed": 2**63}),
        ({"seed": -(2**63)}, {"seed": -(2**63) - 1}),
        ({"mode": "vectorised"}, {"mode": "vector"}),
        ({"messages": "encode", "mode": "in-turn"}, {"messages": "encode", "mode": "vectorised"}),
        ({"wire": "int8/int4"}, {"wire": "int8/int3"}),
    ],
    ids=str,
)
def test_a_setting_beyond_its_border_is_refused(fine: dict, wrong: dict) -> None:
    Settings(**fine)
    with pytest.raises(SettingError):
        Settings(**wrong)


def test_a_cohort_is_at_most_everybody_and_attackers_are_somebody() -> None:
    check_cohort(Settings(clients_per_round=5), 5)
    with pytest.raises(SettingError, match="only 4 clients"):
        check_cohort(Settings(clients_per_round=5), 4)
    check_cohort(Settings(clients_per_round=5, attack="scale", attackers=0.06), 10)
    with pytest.raises(SettingError, match="nobody"):
        check_cohort(Settings(clients_per_round=5, attack="scale", attackers=0.04), 10)
