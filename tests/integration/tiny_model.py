"""``python tiny_model.py FOLDER``: write a random 4-layer Qwen3-MoE with a byte-level tokenizer.

Runs in the vLLM environment of the integration tests (torch and transformers).
"""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

END = "<|end|>"


def write(folder: Path) -> None:
    """The tokenizer, the configuration and the weights."""
    vocabulary = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary[END] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END).save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=320,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        max_position_embeddings=512,
        eos_token_id=vocabulary[END],
        bos_token_id=vocabulary[END],
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
