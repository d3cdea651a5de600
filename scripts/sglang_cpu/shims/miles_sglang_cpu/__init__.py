"""Plugin that SGLang loads in each of its processes (entry point `sglang.srt.plugins`). It does something on CPU, or when asked to."""

import importlib
import os


def register():
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        _lora_without_pinned_memory()
        _deterministic_with_torch_native()
    if extension := os.environ.get("MILES_SGLANG_EXTENSION"):  # module:function of the engine that started this server
        module, _, function = extension.partition(":")
        getattr(importlib.import_module(module), function)()


def _lora_without_pinned_memory():
    """SGLang's LoRA code always asks for pinned memory, which needs CUDA's allocator.

    Its two modules get a view of torch whose factories drop that argument. The view is theirs alone: replacing `torch.tensor`
    for everybody changed log-probs without any error.
    """
    import torch

    class TorchWithoutPinning:
        def __getattr__(self, name):
            value = getattr(torch, name)
            if name not in ("arange", "empty", "full", "ones", "tensor", "zeros"):
                return value

            def factory(*args, pin_memory=False, **kwargs):
                return value(*args, **kwargs)

            return factory

    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    for name in ("sglang.srt.lora.layers", "sglang.srt.lora.backend.torch_backend"):
        importlib.import_module(name).torch = TorchWithoutPinning()


def _deterministic_with_torch_native():
    """Per-request seeds need SGLang's deterministic mode, which refuses the one attention backend that runs on CPU and installs
    CUDA kernels. The mode is allowed without the kernels: seeds work, batch invariance is not promised."""
    import sglang.srt.batch_invariant_ops as batch_invariant_ops
    from sglang.srt.arg_groups import choices

    if "torch_native" not in choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
        choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")
    batch_invariant_ops.enable_batch_invariant_mode = lambda *args, **kwargs: None
