"""Stand-in for SGLang's compiled CPU kernels, in plain PyTorch.

The package index has no CPU build of `sgl_kernel`, and with SGLANG_USE_CPU_ENGINE=1 SGLang imports helpers from it whether it
needs them or not. Three are used while serving and are written out here. The weight-packing operator is left unregistered on
purpose: SGLang then finds no AMX support, and each layer takes its own plain PyTorch path.
"""

import torch

__version__ = "0.0.0"

_SPECULATIVE = frozenset(
    {
        "assign_draft_cache_locs_contiguous_cpu",
        "build_tree_kernel_efficient_cpu",
        "copy_all_layer_kv_cache_cpu",
        "fill_accept_out_cache_loc_cpu",
        "fill_bonus_tokens_cpu",
        "rotate_input_ids_cpu",
        "verify_tree_greedy_cpu",
    }
)


def __getattr__(name):
    """Speculative decoding imports these by name when SGLang starts, and calls them only when it is switched on."""
    if name not in _SPECULATIVE:
        raise AttributeError(f"module 'sgl_kernel' (CPU stand-in) has no attribute {name!r}")

    def missing(*args, **kwargs):
        raise RuntimeError(f"sgl_kernel.{name} exists only in the compiled package: speculative decoding does not run on CPU here")

    return missing


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    """For each request i in turn, `req_to_token[i, start_i:end_i]` takes the next `end_i - start_i` entries of `out_cache_loc`."""
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start


def assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    """The reverse: the cache locations of tokens `start_i:end_i` of each request i, laid end to end in `out_cache_loc`."""
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        out_cache_loc[taken : taken + end - start] = req_to_token[row, start:end].to(out_cache_loc.dtype)
        taken += end - start


# Seeded sampling hashes (seed, position, token) with MurmurHash3, 32 bit (A. Appleby, public domain). torch has little
# arithmetic on unsigned integers, so words live in int64 and are cut to 32 bits after each step.
_WORD = 0xFFFFFFFF


def _times(word, constant):
    """word * constant mod 2^32; in two halves, since a full product of 32-bit words overflows int64."""
    return (word * (constant & 0xFFFF) + ((word * (constant >> 16) & 0xFFFF) << 16)) & _WORD


def _rotated(word, bits):
    return (word << bits | word >> (32 - bits)) & _WORD


def _absorb(state, word):
    word = _times(_rotated(_times(word, 0xCC9E2D51), 15), 0x1B873593)
    return (_rotated(state ^ word, 13) * 5 + 0xE6546B64) & _WORD


def _murmur_hash32(seed, positions, col_indices):
    """uint32 [N, M]: the hash of (low seed word, high seed word, position, column) for seeds [N], positions [N], columns [M]."""
    seed, position, column = (x.view(torch.int64) if x.dtype == torch.uint64 else x.long() for x in (seed, positions, col_indices))
    state = torch.zeros_like(seed)
    for word in (seed, seed >> 32, position):
        state = _absorb(state, word & _WORD)
    state = _absorb(state[:, None], (column & _WORD)[None, :]) ^ 16  # 16 bytes were hashed
    for shift, constant in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = _times(state ^ state >> shift, constant)
    return (state ^ state >> 16).to(torch.uint32)


_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
_library.impl("murmur_hash32_cpu", _murmur_hash32, "CPU")
