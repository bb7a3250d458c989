"""Why a setting of a run would have no effect beside the others; "" if it has one.

`run` has the settings and, beside them, the algorithm, the network, how many clients there are and whether they have
test examples.
"""

from typing import Any

from fedprior.core.choices import ATTACKS, directions
from fedprior.core.options import either
from fedprior.core.schedules import Curve


def overruled(run: Any) -> str:
    """`epochs`."""
    return (
        f"local_steps={run.local_steps} says how long a client trains; leave out one of them" if run.local_steps else ""
    )


def not_coded(run: Any) -> str:
    """`entropy`."""
    whole = any(name.startswith("int") for name in directions(run.wire))
    return "" if whole else f"only int8 and int4 have such a code, and the wire is {run.wire}"


def without_norms(run: Any) -> str:
    """`statistics`."""
    return "" if run.network.norms else "the network has no BatchNorm"


def not_reported(run: Any) -> str:
    """`report_statistics`."""
    if run.statistics == "local" and run.report_statistics == "final":
        return "with statistics=local a client always keeps those of its final model"
    none = "with statistics=batch there are none to report" if run.statistics == "batch" else ""
    return without_norms(run) or none


def not_pooled(run: Any) -> str:
    """`statistics_momentum`."""
    return without_norms(run) or (
        "" if run.statistics == "shared" else "the server has them with statistics=shared only"
    )


def too_late(schedule: str, rounds: int) -> str:
    """A schedule whose warm-up never ends."""
    warmup = Curve.parse(schedule).warmup
    return f"its warmup={warmup} is as long as the run, which has rounds={rounds}" if warmup >= rounds else ""


def fixed(optimisers: Any) -> str:
    """A schedule of optimisers without a rate."""
    return "Rprop chooses its own steps" if any(one.name == "Rprop" for one in optimisers.values()) else ""


def no_rate(run: Any) -> str:
    """`lr_schedule`."""
    return fixed(run.algorithm.local) or too_late(run.lr_schedule, run.rounds)


def no_server_rate(run: Any) -> str:
    """`server_lr_schedule`."""
    if run.algorithm.server is None:
        return (
            f"the M-step of {run.algorithm.name} has no learning rate; give it a server_optimiser, such as "
            "SGD(lr=1.0), which is the mean"
        )
    return fixed(run.algorithm.server) or too_late(run.server_lr_schedule, run.rounds)


def unjudged(run: Any) -> str:
    """`patience` and `keep`, which judge evaluations."""
    own = run.by != "auto" and not run.by.lstrip("-").startswith(("global_", "local_"))
    return (
        ""
        if run.tested or own
        else "it needs test examples, (x, y, test_x, test_y) for each client, and there are none"
    )


def nobody_unseen(run: Any) -> str:
    """`unseen`."""
    if not run.tested:
        return unjudged(run)
    return "" if round(run.unseen * run.clients) else f"of {run.clients} clients that is none; give a larger share"


def nothing_judged(run: Any) -> str:
    """`by`."""
    return "" if run.patience or run.keep == "best" else "it is what patience and keep=best judge by; give one of them"


def nobody(run: Any) -> str:
    """`attackers`."""
    if run.attack == "none":
        return f"there is no attack; give attack={either(ATTACKS)}"
    return "" if round(run.attackers * run.clients) else f"of {run.clients} clients that is none; give a larger share"


def public(run: Any) -> str:
    """`delta`, and whatever only a private run has."""
    return (
        ""
        if run.epsilon is not None or run.noise_multiplier is not None
        else "the run is not private; give epsilon, its budget, or noise_multiplier"
    )


def not_clipped(run: Any) -> str:
    """`clip_quantile`."""
    return "" if run.clip is not None or not public(run) else "nothing is clipped; give clip, the first round's"


def private(run: Any) -> str:
    """`bound`."""
    return "" if public(run) else "the run is private, and clip bounds every upload"


def unused_attack(run: Any) -> str:
    """`attack`."""
    return "" if run.attackers else "there are no attackers; give their share, as attackers=0.2"
