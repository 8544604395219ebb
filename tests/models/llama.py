"""A tiny random Llama as transformers itself writes it, with a byte tokenizer next to it: what inference tests read."""

import json
from pathlib import Path

from tests.models.names import interleaved, native_name

BOS, EOS = 256, 257  # behind the 256 bytes
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def write(folder: Path, *, chat_template: str | None = None, **numbers):
    """Write an HF folder and return its model; `numbers` are LlamaConfig's. Weights are large (std 0.2) on purpose."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    defaults = {
        "vocab_size": 301,  # more rows than tokens, and odd: no tp cuts it evenly
        "hidden_size": 32,
        "intermediate_size": 90,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "rope_theta": 10000.0,
        "rope_scaling": SCALING,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**defaults | numbers)).eval()
    model.save_pretrained(folder)
    write_tokenizer(folder, chat_template=chat_template)
    return model


def write_meta(folder: Path, model) -> None:
    """The model of `write` as Meta releases one: consolidated.00.pth, params.json. Needs `rope_scaling=None`."""
    import torch

    config, state = model.config, model.state_dict()
    heads = {"wq": config.num_attention_heads, "wk": config.num_key_value_heads}
    meta = {}
    for theirs, weight in state.items():
        name = native_name(theirs)
        rotated = heads.get(name.split(".")[-2])
        meta[name] = (interleaved(weight, rotated) if rotated else weight).contiguous()
    numbers = {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "vocab_size": config.vocab_size,
        "norm_eps": config.rms_norm_eps,
        "rope_theta": 10000.0,
    }
    folder.mkdir(parents=True)
    torch.save(meta, folder / "consolidated.00.pth")
    (folder / "params.json").write_text(json.dumps(numbers))
    write_tokenizer(folder)


def ids_of(text: str) -> list[int]:
    """A text's tokens behind begin-of-text: its bytes, counted in the order of the letters that stand for them."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    letters = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0] if text else ""
    return [alphabet.index(letter) for letter in letters]


def write_tokenizer(folder: Path, *, chat_template: str | None = None) -> None:
    """tokenizer.json of the 256 bytes and two special tokens, the first before each text as in Llama 3's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", BOS)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
