"""A whole tiny model on disk: config.json, safetensors, a byte-level tokenizer and a chat template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import tiny
from outpace.weights.safetensors import write_safetensors

CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
CONFIG = tiny.random_config(vocab_size=len(ALPHABET) + len(CONTROLS), max_position_embeddings=256)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>{% endif %}{% endif %}"
)


def write(folder: Path) -> Path:
    """Writes the model and returns its folder."""
    config, arrays = tiny.random_model(vocab_size=CONFIG.vocab_size, max_position_embeddings=256)
    names = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "max_position_embeddings rms_norm_eps rope_theta hidden_act tie_word_embeddings"
    )
    values = {name: getattr(config, name) for name in names.split()}
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(ALPHABET)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(c, special=True) for c in CONTROLS])
    end = tokenizer.token_to_id("<|im_end|>")
    files = {
        "config.json": values | {"model_type": "qwen3", "eos_token_id": end},
        "generation_config.json": {"eos_token_id": end, "do_sample": True, "temperature": 0.9},
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "chat_template": TEMPLATE},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    write_safetensors(folder / "model.safetensors", arrays)
    return folder
