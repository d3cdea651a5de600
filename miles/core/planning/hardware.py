"""What a machine can do, as planners need it: nominal figures, equal on every rank, so that all ranks make the same plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HardwareSpec:
    """One device.

    Attributes:
        flops_per_s: of large matrix products. layer_s: what forward and backward of a decoder layer cost with hardly a token in them, seconds.
    """

    name: str
    flops_per_s: float
    layer_s: float


CPU_CORE = HardwareSpec(name="one x86-64 core, float32", flops_per_s=7e10, layer_s=2e-3)
GPU = HardwareSpec(name="one GPU, bfloat16 (nominal, not measured)", flops_per_s=4e14, layer_s=1e-3)


def hardware_of(device: str, threads: int) -> HardwareSpec:
    """The figures for a `device` type. A CPU's flops grow with its threads."""
    if device != "cpu":
        return GPU
    return HardwareSpec(name=f"{threads} x {CPU_CORE.name}", flops_per_s=threads * CPU_CORE.flops_per_s, layer_s=CPU_CORE.layer_s)
