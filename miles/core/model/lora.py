"""Low-rank adapters through peft: put on a model, switched off, read under the names of peft's own files, and merged into the weights.

    LoRA:  W' = W + s B A            s = alpha / rank, rsLoRA: alpha / sqrt(rank)
    DoRA:  W' = m * (W + s B A) / |W + s B A|, norms over each row, m learned (Liu et al. 2024, arXiv:2402.09353)

Experts that lie fused in one parameter have an A and a B each, and those of a layer lie in one file tensor: A [X r, I], B [O, r X].

peft is imported when adapters are put on, and by nothing else of the product.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from miles.core.model.config import LoraConfig

_NAME = "default"
_PREFIX = "base_model.model."
_PARTS = ("lora_A", "lora_B", "lora_magnitude_vector")


def add_adapters(model: PreTrainedModel, config: LoraConfig, seed: int) -> None:
    """Freeze `model` and put adapters on its linear layers, in their dtype. Their A is drawn from `seed`, their B is 0: nothing changes yet.
    They have their values also where the model has no weights as yet, which peft would not give them.

    Call before layers are made batch-invariant, checkpointed or sharded.

    Raises:
        ValueError: peft is not installed, or a target is no linear layer of the model.
    """
    try:
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise ValueError(f"[lora] needs peft, which is not installed: pip install peft ({error})") from error
    targets = target_names(model, config)
    experts = _fused_experts(model)
    if config.dora and experts.keys() & set(targets):
        raise ValueError(f"lora.dora = true with lora.targets = {config.targets}: experts have no DoRA in peft; leave one of them out")
    with torch.random.fork_rng(devices=[]):
        layers, parameters = [n for n in targets if n not in experts or n in _linears(model)], [experts[n] for n in targets if n in experts]
        inject_adapter_in_model(_peft_config(config, layers, parameters), model)
        model.requires_grad_(False)
        torch.manual_seed(seed)
        for own, parameter in list(model.named_parameters()):
            if _peft_name(own) is not None:
                module, _, last = own.rpartition(".")
                model.get_submodule(module)._parameters[last] = nn.Parameter(_begun(own, parameter).to(model.dtype))


def twin(base: PreTrainedModel) -> PreTrainedModel:
    """Another model over the parameters of `base`, which is to have no adapters: adapters put on the one are not on the other, and the weights
    that both freeze are in memory once."""
    assert not adapter_tensors(base)
    return copy.deepcopy(base, {id(parameter): parameter for parameter in base.parameters()})


def target_names(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """The last parts of the names of the layers that get adapters, sorted. Raises ValueError for one that there is not."""
    linears = _linears(model)
    known = linears | _fused_experts(model).keys()
    for name in config.targets:
        if name not in known:
            raise ValueError(f"lora.targets has {name!r}, which is no linear layer of {type(model).__name__}; there are {', '.join(sorted(known))}")
    return sorted(config.targets or linears)


def _linears(model: PreTrainedModel) -> set[str]:
    head = model.get_output_embeddings()
    return {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head}


def _fused_experts(model: PreTrainedModel) -> dict[str, str]:
    """Parameters of all experts of a layer at once, [X, O, I], by their own names: `down_proj` -> `experts.down_proj`, as peft finds them."""
    names = [name.split(".") for name, parameter in model.named_parameters() if parameter.ndim == 3]
    return {own: f"{module}.{own}" for *_, module, own in names if module == "experts"}


def adapted_experts(model: nn.Module) -> dict[str, str]:
    """Of modules in memory that put an adapter on fused experts, the parameter's name in a model without adapters."""
    found = {name: module.parameter_name for name, module in model.named_modules() if type(module).__name__ == "ParamWrapper"}
    return {name: f"{name.replace('.base_layer', '')}.{parameter}" for name, parameter in found.items()}


def adapter_tensors(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapters' parameters under the names of peft's files; empty for a model without."""
    return {name: parameter for own, parameter in model.named_parameters() if (name := _peft_name(own)) is not None}


def base_name(own: str) -> str | None:
    """The checkpoint's name of a parameter of a model with adapters; None for an adapter's own. Without adapters a name stays as it is."""
    return None if _peft_name(own) is not None else own.replace(".base_layer", "")


def adapters_of(tensors: Mapping[str, Any], experts: Mapping[str, str] = MappingProxyType({})) -> dict[str, dict[str, Any]]:
    """`tensors` under peft's names, by the name of the weight that they change and by their part: `lora_A`, `lora_B`, `lora_magnitude_vector`.
    `experts`: as `adapted_experts` says."""
    found: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        module, _, part = name.removesuffix(".weight").rpartition(".")
        module = module.removeprefix(_PREFIX)
        found.setdefault(experts.get(module, f"{module}.weight"), {})[part] = tensor
    return found


def merged(weight_OI: Tensor, parts: Mapping[str, Tensor], scaling: float) -> Tensor:
    """The weight W' with its adapter in it, in the dtype of `weight_OI`, computed in float32 (float64 where that is one's dtype).

    Args:
        weight_OI: or of fused experts, [X, O, I].
        parts: `lora_A` [rank, I], `lora_B` [O, rank] and, for DoRA, `lora_magnitude_vector` [O]; of X experts [X rank, I] and [O, rank X].
    """
    dtype = torch.promote_types(weight_OI.dtype, torch.float32)
    if weight_OI.ndim == 3:
        experts, outputs, inputs = weight_OI.shape
        a_XRI = parts["lora_A"].to(dtype).view(experts, -1, inputs)
        b_XOR = parts["lora_B"].to(dtype).view(outputs, -1, experts).permute(2, 0, 1)
        return (weight_OI.to(dtype) + b_XOR @ a_XRI * scaling).to(weight_OI.dtype)
    whole_OI = weight_OI.to(dtype) + (parts["lora_B"].to(dtype) @ parts["lora_A"].to(dtype)) * scaling
    if "lora_magnitude_vector" in parts:
        whole_OI *= (parts["lora_magnitude_vector"].to(dtype) / whole_OI.norm(dim=1))[:, None]
    return whole_OI.to(weight_OI.dtype)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model is its base inside, on this thread and without gradients.

    peft's own switch also turns `requires_grad` of the adapters off and on, behind the back of FSDP2, whose parameters they are.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], config: LoraConfig, targets: list[str], base: str, parameters: Sequence[str] = ()) -> None:
    """`adapter_model.safetensors` and `adapter_config.json` in a folder that is there, as `peft.PeftModel.from_pretrained` and SGLang read them."""
    from safetensors.torch import save_file

    described = asdict(_peft_config(config, targets, parameters)) | {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True, "target_modules": targets,
    }  # fmt: skip
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps({k: v for k, v in described.items() if k != "runtime_config"}, indent=2) + "\n", encoding="utf-8")


def _begun(own: str, parameter: Tensor) -> Tensor:
    """What an adapter's parameter begins with; DoRA's magnitudes are the weights' own."""
    if ".lora_A." in own:
        return nn.init.kaiming_uniform_(torch.empty(parameter.shape), a=math.sqrt(5))
    return torch.zeros(parameter.shape) if ".lora_B." in own else parameter.detach()


def _peft_config(config: LoraConfig, targets: list[str], parameters: Sequence[str] = ()) -> Any:
    from peft import LoraConfig as PeftConfig

    return PeftConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=0.0,
        target_modules=list(targets),
        target_parameters=list(parameters) or None,
        use_rslora=config.rslora,
        use_dora=config.dora,
    )


def _peft_name(own: str) -> str | None:
    """`....lora_A.default.weight` in memory is `base_model.model.....lora_A.weight` in a file, DoRA's magnitude without `.weight`."""
    stem, _, last = own.removesuffix(f".{_NAME}.weight").rpartition(".")
    if last not in _PARTS or not own.endswith(f".{_NAME}.weight"):
        return None
    return f"{_PREFIX}{stem}.{last}" + ("" if last == "lora_magnitude_vector" else ".weight")
