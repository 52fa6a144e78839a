"""Models for the references: config.json and random weights as a Hugging Face
folder, and transformers' own model of such a folder. Needs torch."""

import copy
import json
import pathlib

import torch
from safetensors.torch import load_file, save_file

# Published shape of Qwen3-0.6B, and small ones of the same family.
QWEN3_0_6B = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
MIDDLE = QWEN3_0_6B | {"vocab_size": 32000, "num_hidden_layers": 4,
                       "tie_word_embeddings": False}
TINY = {
    "vocab_size": 49152, "hidden_size": 64, "intermediate_size": 192,
    "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True}


def qwen3_config(shape):
    return shape | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False,
        "attention_dropout": 0.0, "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "use_sliding_window": False, "initializer_range": 0.02,
        "bos_token_id": 0, "eos_token_id": 0}


def _empty(folder, dtype, attention):
    """The folder's model on the current default device, weights undefined."""
    from transformers import AutoConfig, AutoModelForCausalLM
    config = AutoConfig.from_pretrained(folder)
    config.use_cache = False
    # The class's own choice of dtype differs between releases of transformers.
    config.dtype = dtype
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return AutoModelForCausalLM.from_config(
            config, attn_implementation=attention)
    finally:
        torch.set_default_dtype(previous)


@torch.no_grad()
def write_random_model(folder, config, seed, device, norm_spread=0.0):
    """BF16 weights: normal with standard deviation 0.02; norms about 1."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    with torch.device("meta"):
        model = _empty(folder, torch.float32, "sdpa")
    generator = torch.Generator(device).manual_seed(seed)
    weights = {}
    for name, parameter in model.named_parameters():  # tied ones once
        values = torch.empty(parameter.shape, device=device)
        values.normal_(generator=generator)
        if parameter.dim() == 1:
            base = 0.0 if name.endswith("bias") else 1.0
            values = base + norm_spread * values
        else:
            values *= 0.02
        weights[name] = values.to(torch.bfloat16).cpu().contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@torch.no_grad()
def load_model(folder, device, dtype, attention="sdpa"):
    """transformers' model with the folder's weights in `dtype`. Rope's inverse
    frequencies are float32, as from_pretrained leaves them."""
    with torch.device(device):
        model = _empty(folder, dtype, attention)
        rotary = model.model.rotary_emb
        fresh = type(rotary)(config=model.config)
    rotary.inv_freq = copy.deepcopy(fresh.inv_freq).float()
    rotary.original_inv_freq = rotary.inv_freq
    weights = load_file(pathlib.Path(folder) / "model.safetensors",
                        device=str(device))
    for name, parameter in model.named_parameters():
        if parameter.shape != weights[name].shape:
            raise RuntimeError(f"{name}: {tuple(weights[name].shape)} in the "
                               f"file, {tuple(parameter.shape)} in the model")
        if parameter.dtype != dtype:
            raise RuntimeError(f"{name} is {parameter.dtype}")
        parameter.copy_(weights[name])
    return model


def save_model(model_state, config, folder):
    """BF16 weights of {name: tensor} under `folder`."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file({name: tensor.to(torch.bfloat16).cpu().contiguous()
               for name, tensor in model_state.items()},
              folder / "model.safetensors", {"format": "pt"})
