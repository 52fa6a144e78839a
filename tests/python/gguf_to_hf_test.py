"""GGUF to Hugging Face: the same function of its input, other names."""

import json

import gguf
import numpy as np
import pytest

from conftest import SPECIAL, make_tokenizer

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS = 12, 3, 1, 4, 8, 2


def rotate_neighbours(x, angles):
    """llama.cpp's rope on [heads * d] values of one position."""
    x = x.reshape(-1, HEAD_DIM // 2, 2)
    even, odd = x[..., 0], x[..., 1]
    return np.stack([even * np.cos(angles) - odd * np.sin(angles),
                     odd * np.cos(angles) + even * np.sin(angles)],
                    -1).reshape(-1, HEAD_DIM)


def rotate_halves(x, angles):
    """Hugging Face's."""
    x = x.reshape(-1, HEAD_DIM)
    low, high = x[:, :HEAD_DIM // 2], x[:, HEAD_DIM // 2:]
    return np.concatenate([low * np.cos(angles) - high * np.sin(angles),
                           high * np.cos(angles) + low * np.sin(angles)], -1)


@pytest.fixture
def gguf_file(tmp_path):
    """make(**changes of metadata) -> (path, tensors as llama.cpp has them)."""

    def make(architecture="llama", pre="smollm", extra=()):
        tokenizer = make_tokenizer()
        vocab = tokenizer.get_vocab()
        tokens = sorted(vocab, key=vocab.get)
        random = np.random.default_rng(3)
        shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
        for layer in range(LAYERS):
            shapes |= {f"blk.{layer}.{name}": shape for name, shape in {
                "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,),
                "attn_q": (HEADS * HEAD_DIM, HIDDEN),
                "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
                "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
                "attn_output": (HIDDEN, HEADS * HEAD_DIM),
                "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN),
                "ffn_down": (HIDDEN, INNER)}.items()}
        shapes |= {name: (HIDDEN,) for name in extra}
        # Exact in BF16, so that nothing but order can differ.
        tensors = {name: random.integers(-128, 128, shape).astype(np.float32)
                   for name, shape in shapes.items()}
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(str(path), architecture)
        writer.add_block_count(LAYERS)
        writer.add_context_length(64)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(INNER)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_rope_dimension_count(HEAD_DIM)
        writer.add_rope_freq_base(100000.0)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([3 if t in SPECIAL else 1 for t in tokens])
        merges = json.loads(tokenizer.to_str())["model"]["merges"]
        writer.add_token_merges([m if isinstance(m, str) else " ".join(m)
                                 for m in merges])
        writer.add_bos_token_id(vocab["<|im_start|>"])
        writer.add_eos_token_id(vocab["<|im_end|>"])
        writer.add_chat_template("{{ messages }}")
        for name, value in tensors.items():
            writer.add_tensor(f"{name}.weight", value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path, tensors

    return make


def read_weights(folder):
    from prepare import safetensors_file
    tensors, metadata = safetensors_file.read(folder / "model.safetensors")
    assert metadata == {"format": "pt"}
    return {name: (bits.astype(np.uint32) << 16).view(np.float32)
            for name, bits in tensors.items()}


def test_weights_are_the_same_function(gguf_file, tmp_path):
    from prepare import gguf_to_hf
    path, source = gguf_file()
    gguf_to_hf.convert(str(path), str(tmp_path / "hf"))
    weights = read_weights(tmp_path / "hf")
    np.testing.assert_array_equal(weights["model.embed_tokens.weight"],
                                  source["token_embd"])
    np.testing.assert_array_equal(weights["model.norm.weight"],
                                  source["output_norm"])
    assert "lm_head.weight" not in weights
    assert len(weights) == 2 + 9 * LAYERS
    random = np.random.default_rng(4)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for ours, theirs in (("self_attn.v_proj", "attn_v"),
                             ("self_attn.o_proj", "attn_output"),
                             ("mlp.gate_proj", "ffn_gate"),
                             ("mlp.up_proj", "ffn_up"),
                             ("mlp.down_proj", "ffn_down"),
                             ("input_layernorm", "attn_norm"),
                             ("post_attention_layernorm", "ffn_norm")):
            np.testing.assert_array_equal(weights[f"{prefix}{ours}.weight"],
                                          source[f"blk.{layer}.{theirs}"])
        # Attention scores, each with its own rope, are what must agree.
        angles = random.uniform(0, 6, (2, HEAD_DIM // 2))
        x = random.normal(size=(2, HIDDEN))

        def scores(q, k, rotate):
            return (rotate(q @ x[0], angles[0])
                    @ rotate(k @ x[1], angles[1]).T)

        np.testing.assert_allclose(
            scores(weights[f"{prefix}self_attn.q_proj.weight"],
                   weights[f"{prefix}self_attn.k_proj.weight"], rotate_halves),
            scores(source[f"blk.{layer}.attn_q"],
                   source[f"blk.{layer}.attn_k"], rotate_neighbours),
            rtol=1e-12)


def test_config_and_tokenizer_come_along(gguf_file, tmp_path):
    from prepare import gguf_to_hf
    from prepare.model_folder import ModelFolder
    path, _ = gguf_file()
    gguf_to_hf.convert(str(path), str(tmp_path / "hf"))
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert (config["head_dim"], config["num_key_value_heads"]) == (4, 1)
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-5, 100000.0)
    model = ModelFolder(str(tmp_path / "hf"))
    assert model.token(model.eos_id) == "<|im_end|>"
    assert model.chat_template is not None
    text = "hello 123 t\n\n<|im_end|>\u6d77"
    encoding = model.tokenizer.encode(text)
    assert model.tokenizer.decode(encoding.ids,
                                  skip_special_tokens=False) == text
    assert "<|im_end|>" in encoding.tokens
    # Digits stand alone, and so take no space along.
    assert ["\u0120", "1", "2", "3", "\u0120t"] == encoding.tokens[1:6]


@pytest.mark.parametrize("changes, expected", [
    ({"architecture": "qwen2"}, "general.architecture"),
    ({"pre": "llama-bpe"}, "wants 'gpt2' / 'smollm'"),
    ({"extra": ("blk.0.attn_q_norm",)}, "not one of a dense Llama"),
    ({"extra": ("rope_freqs",)}, "rope scaling"),
])
def test_other_models_are_refused(gguf_file, tmp_path, changes, expected):
    from prepare import errors, gguf_to_hf
    path, _ = gguf_file(**changes)
    with pytest.raises(errors.InputError, match=expected):
        gguf_to_hf.convert(str(path), str(tmp_path / "hf"))
    assert not (tmp_path / "hf").exists()
    assert not list(tmp_path.glob(".gguf.*"))


def test_rounding_to_bf16_is_to_nearest_even():
    from prepare.gguf_to_hf import to_bf16
    values = np.array([0x3f808000, 0x3f818000, 0x3f808001, 0x3f80ffff,
                       0xbf808000, 0x00000001], np.uint32).view(np.float32)
    assert to_bf16(values).tolist() == [0x3f80, 0x3f82, 0x3f81, 0x3f81,
                                        0xbf80, 0x0000]
    with pytest.raises(ValueError):
        to_bf16(np.array([np.nan]))
