"""Make a Qwen3 mixture of eight experts in two layers with random weights, for tests of expert parallelism.

Run by the engine's Python: ``tiny_moe.py FOLDER``. Tokenizer and spread of the weights are those of ``tiny.py``.
"""

import sys

import torch
from tiny import SPREAD, VOCABULARY, tokenizer
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM


def model() -> Qwen3MoeForCausalLM:
    """Build the model with seeded weights."""
    torch.manual_seed(0)
    mixture = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            moe_intermediate_size=128,
            num_experts=8,
            num_experts_per_tok=2,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=4096,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=2,
            tie_word_embeddings=False,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        )
    )
    with torch.no_grad():
        for weights in mixture.parameters():
            if weights.dim() >= 2:
                weights.normal_(0, SPREAD)
    mixture.generation_config.eos_token_id = None
    return mixture.to(torch.float32)


if __name__ == "__main__":
    model().save_pretrained(sys.argv[1])
    tokenizer().save_pretrained(sys.argv[1])
