"""How rounds run: clients in turn, or runs stacked together."""

from typing import Protocol

from fedprior.core.dropout import recurrent
from fedprior.core.errors import DivergedError, SettingError
from fedprior.engines import ranks
from fedprior.engines.loop.round import InTurn, Simulation
from fedprior.engines.server_state import Record
from fedprior.engines.stacked.together import Together


class Engine(Protocol):
    """Drives one or several simulations, round by round."""

    def step(self, evaluate: bool) -> list[Record | DivergedError]:
        """Run one round of each."""

    def sync(self) -> None:
        """Bring the simulations up to date, so that they can be saved."""


def engine(simulations: list[Simulation], mode: str) -> Engine:
    """The engine of a mode. In turn, it drives one simulation at a time."""
    if mode == "in-turn":
        (simulation,) = simulations
        return InTurn(simulation)
    return Together(simulations, capture=mode == "captured")


def mode_of(wanted: str, messages: str, simulation: Simulation) -> str:
    """The requested mode, or the fastest that the device, the messages and the optimisers allow."""
    algorithm, on_gpu = simulation.algorithm, simulation.root.device.type == "cuda"
    optimisers = [*algorithm.local.values(), *(algorithm.server or {}).values()]
    stuck = [f"{optimiser} counts its steps on the host" for optimiser in optimisers if not optimiser.capturable]
    stuck += [] if algorithm.prior.captured else ["its M-step waits for the device"]
    if simulation.settings.private:
        return "in-turn"
    if wanted != "in-turn" and not algorithm.vectorises:
        if wanted == "auto":
            return "in-turn"
        raise SettingError(
            "an optimiser does not act element by element, so clients must train in turn: set mode=in-turn"
        )
    if wanted != "in-turn" and (kind := recurrent(simulation.network.module)):
        if wanted == "auto":
            return "in-turn"
        raise SettingError(f"torch cannot vectorise a {kind}, so clients must train in turn: set mode=in-turn")
    if wanted == "captured" and (not on_gpu or stuck or ranks.count() > 1):
        why = "there is no CUDA device" if not on_gpu else "several ranks share it"
        why = stuck[0] if on_gpu and stuck else why
        raise SettingError(f"a round cannot be captured: {why}; use mode=vectorised")
    if wanted != "auto":
        return wanted
    if not on_gpu or messages == "encode":
        return "in-turn"
    return "vectorised" if stuck or ranks.count() > 1 else "captured"
