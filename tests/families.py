"""Tiny random models of many architectures, for tests."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

COMMON = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SLIDING = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
MIXTURE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "norm_topk_prob": True}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

FAMILIES: dict[str, dict] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 7},
    "phi3": {},
    "olmo2": {},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    "smollm3": {},
    "gemma2": {**SLIDING, "query_pre_attn_scalar": 16},
    "gemma3_text": {**SLIDING, "query_pre_attn_scalar": 16},
    "gpt_oss": {**SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**MIXTURE, "num_experts": 4},
    "deepseek_v3": {**MIXTURE, **LATENT, **ROUTED},
    "glm4_moe": {**MIXTURE, **ROUTED},
    "mimo_v2_flash": {
        **MIXTURE,
        **SLIDING,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "v_head_dim": 12,
    },
    "gpt2": {"n_inner": 96},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
}
REFUSED: dict[str, dict] = {
    "qwen3_next": {
        **MIXTURE,
        "num_experts": 4,
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
    },
    "bloom": {},
}


def tiny_model(family: str, dtype: torch.dtype = torch.float32, **options: object) -> PreTrainedModel:
    """A random model, the same on every call, with weights large enough that its layers matter."""
    known = FAMILIES.get(family, REFUSED.get(family, {}))
    config = CONFIG_MAPPING[family](**{**COMMON, **known, **options})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype)
