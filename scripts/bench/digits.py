"""The task of the benchmark against TRL: a tiny Qwen3 made here, sums as prompts, and a dense reward that a random model can climb."""

from __future__ import annotations

import json
from pathlib import Path

from miles.data.types import Prompt, Sample

VOCABULARY = 512
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def digit_share(text: str) -> float:
    """Share of the characters that are digits; an empty text has none."""
    return sum(character.isdigit() for character in text) / max(len(text), 1)


async def reward(sample: Sample, *, prompt: Prompt, text: str) -> float:
    """The reward as Miles calls it."""
    return digit_share(text)


def peer_reward(completions: list[list[dict[str, str]]], **columns: object) -> list[float]:
    """The reward as TRL calls it."""
    return [digit_share(completion[0]["content"]) for completion in completions]


def rows() -> list[dict[str, object]]:
    """400 prompts: every sum of two numbers below 20."""
    return [{"prompt": [{"role": "user", "content": f"{a} + {b} ="}], "answer": str(a + b)} for a in range(20) for b in range(20)]


def write_prompts(path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()), encoding="utf-8")
    return path


def write_model(folder: Path, hidden: int, layers: int, seed: int) -> Path:
    """A randomly initialised Qwen3 with a byte-level BPE trained on the prompts: both sides load this directory. float32."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    texts = [f"{row['prompt'][0]['content']}{row['answer']}" for row in rows()]  # type: ignore[index]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=VOCABULARY, special_tokens=SPECIAL)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=hidden // 4,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
