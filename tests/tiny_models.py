"""Tiny models of the transformers library's real classes, with weights that leave no part of the attention unseen."""

from typing import Any

import torch
from torch import Tensor
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, Qwen3Config, Qwen3ForCausalLM

# Seeds whose greedy paths in float16 keep their two best tokens apart by ten times what rounding changes.
SEEDS = {"glm_air": 12, "glm": 120, "qwen3": 80}
SIZES: dict[str, Any] = {
    "vocab_size": 13,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "eos_token_id": None,
    "pad_token_id": None,
}
# One dense layer and one of experts; all experts take part, because a near tie between experts is no matter of ours.
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}


def a_config(kind: str, **changes: Any) -> Any:
    """`glm_air` (biases, half the dims rotate, no QK norm), `glm` (with QK norm) or `qwen3` (QK norm, no bias)."""
    if kind == "qwen3":
        return Qwen3Config(**{**SIZES, **changes})
    return Glm4MoeConfig(**{**SIZES, **EXPERTS, "attention_bias": True, "use_qk_norm": kind == "glm", **changes})


def a_model(kind: str, seed: int = 0, **changes: Any) -> Any:
    """In bfloat16, for inference; biases and norm weights are drawn too."""
    torch.manual_seed(seed)
    config = a_config(kind, **changes)
    model = (Qwen3ForCausalLM if kind == "qwen3" else Glm4MoeForCausalLM)(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
        elif "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    return model.to(torch.bfloat16).eval()


def prompt(batch: int = 2, seq: int = 13) -> Tensor:
    return torch.randint(0, SIZES["vocab_size"], (batch, seq), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def greedy(model: Any, ids: Tensor, steps: int = 64) -> tuple[Tensor, float]:
    """The tokens, and the smallest distance between the two best logits on the way."""
    answer = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=steps,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.stack(answer.logits).float().topk(2, dim=-1).values
    return answer.sequences[:, ids.shape[1] :], float((best[..., 0] - best[..., 1]).min())
