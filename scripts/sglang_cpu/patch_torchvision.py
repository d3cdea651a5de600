"""Let PyPI's torchvision be imported beside a CPU build of torch. Safe to run twice.

The wheel's compiled operators are linked to CUDA and do not load here, so registering their fake versions fails with "operator
does not exist" and takes `import torchvision` down. SGLang imports torchvision for image models only, but always. Declaring
the two operator schemas that are registered at import time is enough: the pure-Python parts then work.
"""

import importlib.util
from pathlib import Path

MARK = "# Declared for a torch without CUDA."
ANCHOR = "import torchvision.extension  # noqa: F401\n"
DECLARATION = f"""
{MARK}
if not torchvision.extension._has_ops():
    for _operator in ("nms", "qnms"):
        torch.library.define(f"torchvision::{{_operator}}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> None:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("torchvision is not installed in this environment")
    path = Path(spec.submodule_search_locations[0]) / "_meta_registrations.py"
    text = path.read_text(encoding="utf-8")
    if MARK in text:
        return
    if ANCHOR not in text:
        raise SystemExit(f"{path}: the line {ANCHOR.strip()!r} is gone; this patch was made for torchvision 0.28.0")
    path.write_text(text.replace(ANCHOR, ANCHOR + DECLARATION, 1), encoding="utf-8")


if __name__ == "__main__":
    main()
