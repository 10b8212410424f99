"""Make a Llama of 3.4 million random weights with a byte-level tokenizer and a chat template, for fast tests.

Run by the engine's Python: ``tiny.py FOLDER``. Same bytes every time (fixed seed). It speaks nonsense, but its logits
depend on the whole context, so a wrong KV cache gives other tokens.
"""

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 2048
#: Standard deviation of the weights; the usual 0.02 gives logits that hardly depend on the context.
SPREAD = 0.08
SPECIAL = ("<|bos|>", "<|eos|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>")
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Train a tokenizer on sources of the standard library, which every Python has."""
    texts = [path.read_text(errors="ignore") for path in sorted(Path(os.__file__).parent.glob("*.py"))[:80]]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=SPECIAL[0], eos_token=SPECIAL[1], pad_token=SPECIAL[2], chat_template=TEMPLATE
    )


def model() -> LlamaForCausalLM:
    """Build the model with seeded weights."""
    torch.manual_seed(0)
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=2,
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        for weights in llama.parameters():
            if weights.dim() >= 2:
                weights.normal_(0, SPREAD)
    llama.generation_config.eos_token_id = None
    return llama.to(torch.float32)


def main(folder: str) -> None:
    """Write model and tokenizer into ``folder``."""
    model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1])
