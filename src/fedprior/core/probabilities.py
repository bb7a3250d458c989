"""Whether a network's probabilities can be believed: Brier score, calibration error, reliability diagram."""

import torch
from torch import Tensor

from fedprior.core.network import IGNORED, Metric, Whole, class_dim, cross_entropy

BINS = 15


def brier(outputs: Tensor, targets: Tensor) -> Tensor:
    """Σ_c (p_c − 1[c = y])² of each example; for a sequence, its mean over the positions."""
    p, targets, counts = _probabilities(outputs, targets)
    scores = p.square().sum(-1) - 2 * p.gather(-1, targets[..., None])[..., 0] + 1
    if targets.dim() == 1:
        return scores
    return (scores * counts).flatten(1).sum(1) / counts.flatten(1).sum(1).clamp(min=1)


def confidences(outputs: Tensor, targets: Tensor) -> Tensor:
    """The largest probability, whether its class is right, and whether the position counts: [examples, …, 3]."""
    p, targets, counts = _probabilities(outputs, targets)
    confidence, said = p.max(-1)
    return torch.stack([confidence.double(), (said == targets).double(), counts.double()], -1)


def _probabilities(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The probabilities with classes last, the targets, and which of them count."""
    dim, counts = class_dim(outputs, targets), targets != IGNORED
    return outputs.movedim(1 if dim is None else dim, -1).softmax(-1), torch.where(counts, targets, 0), counts


def calibration_error(parts: Tensor, weight: Tensor) -> Tensor:
    """Σ_b n_b / n |mean confidence − accuracy| over bins of equally many examples, by confidence."""
    confidence, right, count = binned(parts, weight).unbind(-1)
    return (confidence - right).abs().sum() / count.sum().clamp(min=1)


def binned(parts: Tensor, weight: Tensor) -> Tensor:
    """For each bin, the sums of confidences and of right answers, and the number of examples: [bins, 3].

    Of n examples, sorted by confidence, the i-th is in bin ⌊15 i / n⌋.
    """
    own = weight.reshape(-1, *[1] * (parts.dim() - 2)).expand(parts.shape[:-1]).flatten()
    rows = parts.flatten(0, -2)
    counts = (rows[:, 2] > 0) & (own > 0)
    order = torch.where(counts, rows[:, 0], torch.inf).sort(stable=True).indices
    kept = torch.where(counts[:, None], rows, 0.0)[order]
    until = torch.cat([rows.new_zeros(1, 3), kept.cumsum(0)])
    edges = (torch.arange(BINS + 1, device=rows.device) * counts.sum() + BINS - 1) // BINS
    return until[edges[1:]] - until[edges[:-1]]


def reliability(parts: Tensor, weight: Tensor) -> dict[str, float]:
    """`confidence/1`, `accuracy/1`, …: their means in each bin that has examples, from least to most confident."""
    found: dict[str, float] = {}
    for number, (confidence, right, count) in enumerate(binned(parts, weight).tolist(), 1):
        if count:
            found |= {
                f"confidence/{number}": round(confidence / count, 4),
                f"accuracy/{number}": round(right / count, 4),
            }
    return found


ECE = Whole(confidences, calibration_error)
METRICS: dict[str, Metric | Whole] = {"nll": cross_entropy, "ece": ECE, "brier": brier}
"""What the setting `metrics` knows by name. Add your own: `fedprior.METRICS["mae"] = lambda outputs, targets: …`."""
PROBABILITIES = tuple(METRICS)
"""Those that need a logit for each class."""
