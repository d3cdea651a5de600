"""What becomes of the tensors that one layer saves for its backward."""

from __future__ import annotations

from enum import Enum


class Action(Enum):
    """`KEEP`: all stay. `COMPRESS`: all stay, one of them in 8 bits. `RECOMPUTE`: none stays but the layer's input, from which they are made again."""

    KEEP = "keep"
    COMPRESS = "compress"
    RECOMPUTE = "recompute"
