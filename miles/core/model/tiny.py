"""Makes a small, randomly initialised Qwen3 with a character-level tokenizer: a model to learn on where nothing can be downloaded."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, UNKNOWN, START, END = "<|pad|>", "<|unk|>", "<|im_start|>", "<|im_end|>"
ROLES = ("system", "user", "assistant", "tool")

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tiny_model(
    folder: str | Path,
    *,
    alphabet: str,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int | None = None,
    context: int = 512,
    seed: int = 0,
    pairs: bool = False,
) -> Path:
    """Write an ordinary Hugging Face directory (float32 safetensors, tied embeddings) to `folder` and return it.

    Every character of `alphabet` (and the newline) is one token; any other character is `<|unk|>`. A turn's opening, such as
    `<|im_start|>user` and its newline, is one token too, so that a short task is not mostly template.

    Args:
        intermediate: width of the MLP; None is 4 * hidden.
        context: max_position_embeddings, tokens.
        seed: of the initial weights; equal arguments give equal bytes.
        pairs: two characters of the alphabet that stand side by side are one token: another tokenizer for the same texts.
    Raises:
        ValueError: the alphabet is empty, or the sizes do not divide.
    """
    _check(alphabet, hidden, heads, kv_heads)
    folder = Path(folder)
    tokenizer = character_tokenizer(alphabet, context, pairs=pairs)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate or 4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def character_tokenizer(alphabet: str, context: int, *, pairs: bool = False) -> PreTrainedTokenizerFast:
    """One token a character, by a BPE without merges; the ids of the special tokens come first, then the alphabet in its order, then `pairs`."""
    special = [PAD, UNKNOWN, START, END, *(f"{START}{role}\n" for role in ROLES)]
    merges = list(product(dict.fromkeys(alphabet), repeat=2)) if pairs else []
    vocabulary = {token: index for index, token in enumerate([*special, *dict.fromkeys(alphabet + "\n"), *map("".join, merges)])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token=UNKNOWN, fuse_unk=False))
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, unk_token=UNKNOWN, eos_token=END, model_max_length=context, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _check(alphabet: str, hidden: int, heads: int, kv_heads: int) -> None:
    if not alphabet:
        raise ValueError("alphabet is empty: name the characters that prompts and answers use")
    if hidden % heads or (hidden // heads) % 2:
        raise ValueError(f"hidden = {hidden} over heads = {heads} gives {hidden / heads:g} dimensions a head; it must be an even whole number")
    if heads % kv_heads:
        raise ValueError(f"heads = {heads} is not a multiple of kv_heads = {kv_heads}")
