"""What some settings can be, by name."""

from fedprior.core.errors import SettingError

MODES = ("in-turn", "vectorised", "captured")
ATTACKS = ("sign-flip", "scale", "constant", "backdoor")
PRECISIONS = ("float32", "float16", "bfloat16", "int8", "int4")


def directions(wire: str) -> tuple[str, str]:
    """The precision down and up: `int4` is the same for both, `int8/int4` is one for each."""
    down, slash, up = wire.partition("/")
    for name in (down, up) if slash else (down,):
        if name not in PRECISIONS:
            hint = f"; did you mean messages={wire}?" if wire in ("auto", "encode", "count") else ""
            raise SettingError(f"wire must be {', '.join(PRECISIONS)}, or two of them as DOWN/UP, got {wire!r}{hint}")
    return down, up or down
