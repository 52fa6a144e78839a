"""Makes a Hugging Face folder from a GGUF file of the Llama architecture.

For the quickstart's model: dense Llama, byte-level BPE with the "smollm"
pre-tokenizer, any quantisation that the gguf package reads. Weights become
BF16. Everything else is an error, not a guess.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile

import gguf
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from . import safetensors_file
from .errors import InputError

_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_CONTROL_TOKEN = 3  # llama.cpp's token type


def convert(path, folder):
    """Writes `folder`, which must not exist; complete or absent."""
    try:
        reader = gguf.GGUFReader(path)
    except (OSError, ValueError) as error:
        raise InputError(path, f"not a GGUF file: {error}") from None
    fields = _Fields(path, reader)
    config = _config(fields, reader)
    parent = os.path.dirname(os.path.abspath(folder))
    os.makedirs(parent, exist_ok=True)
    temporary = tempfile.mkdtemp(dir=parent, prefix=".gguf.")
    try:
        _write_json(temporary, "config.json", config)
        _write_json(temporary, "generation_config.json",
                    {key: config[key] for key in
                     ("bos_token_id", "eos_token_id", "pad_token_id")})
        _write_tokenizer(temporary, fields)
        safetensors_file.write(
            os.path.join(temporary, "model.safetensors"),
            _tensors(path, reader, config), {"format": "pt"})
        os.chmod(temporary, 0o755)
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class _Fields:

    def __init__(self, path, reader):
        self.path = path
        self._fields = reader.fields

    def get(self, name, default=None):
        field = self._fields.get(name)
        return default if field is None else field.contents()

    def want(self, name):
        value = self.get(name)
        if value is None:
            raise InputError(self.path, "is missing", field=name)
        return value


def _config(fields, reader):
    architecture = fields.want("general.architecture")
    if architecture != "llama":
        raise InputError(fields.path, f"is '{architecture}', wants 'llama'",
                         field="general.architecture")
    names = {tensor.name for tensor in reader.tensors}
    if "rope_freqs.weight" in names or fields.get("llama.rope.scaling.type"):
        raise InputError(fields.path, "rope scaling is not converted")
    heads = fields.want("llama.attention.head_count")
    hidden = fields.want("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": fields.want("llama.feed_forward_length"),
        "num_hidden_layers": fields.want("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv",
                                          heads),
        "head_dim": fields.get("llama.rope.dimension_count", hidden // heads),
        "max_position_embeddings": fields.want("llama.context_length"),
        # float32 in the file; the decimal that was meant.
        "rms_norm_eps": _decimal(
            fields.want("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _decimal(fields.get("llama.rope.freq_base", 10000.0)),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in names,
        "vocab_size": len(fields.want("tokenizer.ggml.tokens")),
        "bos_token_id": fields.want("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.want("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "bfloat16",
    }


def _decimal(value):
    return float(f"{float(value):.6g}")


def _tensors(path, reader, config):
    heads = {"attn_q": config["num_attention_heads"],
             "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for tensor in reader.tensors:
        name = _OUTER.get(tensor.name)
        kind = None
        if name is None:
            block, number, kind = (tensor.name.split(".") + ["", "", ""])[:3]
            if (block != "blk" or kind not in _TENSORS
                    or not tensor.name.endswith(f"{kind}.weight")):
                raise InputError(path, "tensor is not one of a dense Llama",
                                 field=tensor.name)
            name = f"model.layers.{number}.{_TENSORS[kind]}.weight"
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        values = values.reshape([int(n) for n in reversed(tensor.shape)])
        if kind in heads:
            values = _halves_from_pairs(values, heads[kind])
        tensors[name] = to_bf16(values)
    return tensors


def _halves_from_pairs(rows, heads):
    """llama.cpp rotates neighbours (2i, 2i + 1), Hugging Face rotates (i,
    i + d/2): the rows of q and k are in another order."""
    half = rows.shape[0] // heads // 2
    return (rows.reshape(heads, half, 2, -1).swapaxes(1, 2)
            .reshape(rows.shape))


def to_bf16(values):
    """Bits, rounded to nearest even; finite values only."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    if ((bits & 0x7f800000) == 0x7f800000).any():
        raise ValueError("a weight is not finite")
    return ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _write_tokenizer(folder, fields):
    model = fields.want("tokenizer.ggml.model")
    pre = fields.want("tokenizer.ggml.pre")
    if (model, pre) != ("gpt2", "smollm"):
        raise InputError(fields.path, f"is '{model}' / '{pre}', wants 'gpt2' /"
                         " 'smollm'", field="tokenizer.ggml.model / pre")
    tokens = fields.want("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1))
              for merge in fields.want("tokenizer.ggml.merges")]
    tokenizer = tokenizers.Tokenizer(models.BPE(
        vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([
        tokenizers.AddedToken(token, normalized=False, special=True)
        for token, kind in zip(tokens,
                               fields.want("tokenizer.ggml.token_type"))
        if kind == _CONTROL_TOKEN])
    tokenizer.save(os.path.join(folder, "tokenizer.json"))

    def named(key):
        number = fields.get(f"tokenizer.ggml.{key}_token_id")
        return None if number is None else tokens[number]

    _write_json(folder, "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": named("bos"),
        "eos_token": named("eos"),
        "unk_token": named("unknown"),
        "pad_token": named("padding"),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields.want("llama.context_length"),
        "chat_template": fields.want("tokenizer.chat_template"),
    })


def _write_json(folder, name, value):
    with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")


def main():
    parser = argparse.ArgumentParser(prog="gguf_to_hf",
                                     description=__doc__.partition("\n")[0])
    parser.add_argument("gguf")
    parser.add_argument("folder")
    options = parser.parse_args()
    try:
        convert(options.gguf, options.folder)
    except InputError as error:
        print(f"gguf_to_hf: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
