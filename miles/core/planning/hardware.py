"""What a machine can do, as planners need it: nominal figures, equal on every rank, so that all ranks make the same plan."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class HardwareSpec:
    """One device.

    Attributes:
        flops_per_s: of large matrix products.
        layer_s: what forward and backward of a decoder layer cost with hardly a token in them, seconds.
        value_s: and for each entry of its hidden states besides the products: norms, activations, copies.
    """

    name: str
    flops_per_s: float
    layer_s: float
    value_s: float


CPU_CORE = HardwareSpec(name="one x86-64 core, float32", flops_per_s=8e10, layer_s=2e-3, value_s=1e-7)
GPU = HardwareSpec(name="one GPU, bfloat16 (nominal, not measured)", flops_per_s=4e14, layer_s=1e-3, value_s=3e-11)


def hardware_of(device: str, threads: int) -> HardwareSpec:
    """The figures for a `device` type. A CPU is as fast as it has threads."""
    if device != "cpu":
        return GPU
    return replace(CPU_CORE, name=f"{threads} x {CPU_CORE.name}", flops_per_s=threads * CPU_CORE.flops_per_s, value_s=CPU_CORE.value_s / threads)
