"""How llama.cpp's GGUF files spell a decoder's tensors, for loading.py (reading) and export.py (writing).

Source: the tensor names in llama.cpp's gguf-py (tensor_mapping.py) and its converter's order of rotary rows.
"""

from __future__ import annotations

import numpy as np

from ..types import I64
from .names import EMBEDDING, FINAL_NORM, HEAD

TOP = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": HEAD}
BLOCK = {  # blk.N.<key>.weight or .bias -> model.layers.N.<value>
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}  # 3-D: all experts
ROPE_FACTORS = "rope_freqs.weight"


def half_split_order(heads: int, head_dim: int) -> I64:
    """Rows in the half-split rotary order, taken from llama.cpp's interleaved one: its rows 2i and 2i + 1 of a head
    are the pair i and i + head_dim / 2."""
    rows = np.arange(heads * head_dim, dtype=np.int64).reshape(heads, head_dim // 2, 2)
    return rows.transpose(0, 2, 1).reshape(-1)


def interleaved_order(heads: int, head_dim: int) -> I64:
    """The way back: rows in llama.cpp's order, taken from the half-split one."""
    rows = np.arange(heads * head_dim, dtype=np.int64).reshape(heads, 2, head_dim // 2)
    return rows.transpose(0, 2, 1).reshape(-1)
