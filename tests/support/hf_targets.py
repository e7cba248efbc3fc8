"""Random Transformers models of every family that HFTarget runs, and loops over them for its tests."""

import torch
import transformers

from paceline.model.target import ForwardBatch

VOCAB, WIDTH, WINDOW = 61, 32, 8
MAX_LEN = 256
ATTENTION = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
GATED_DELTA = {
    **ATTENTION,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
MAMBA2 = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "state_size": 8,
    "head_dim": 16,
    "num_heads": 4,
}
CONFIGS = {
    "llama": ("LlamaConfig", ATTENTION),
    "qwen3": ("Qwen3Config", {**ATTENTION, "tie_word_embeddings": True}),
    "gpt2": ("GPT2Config", {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": 3, "n_head": 4, "n_positions": 256}),
    "mistral": ("MistralConfig", {**ATTENTION, "sliding_window": WINDOW}),
    "gemma2": ("Gemma2Config", {**ATTENTION, "sliding_window": WINDOW, "final_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3TextConfig", {**ATTENTION, "sliding_window": WINDOW}),
    "granite": ("GraniteConfig", {**ATTENTION, "embedding_multiplier": 3.0, "logits_scaling": 4.0}),
    "qwen3_5": ("Qwen3_5TextConfig", GATED_DELTA),
    "qwen3_next": (
        "Qwen3NextConfig",
        {**GATED_DELTA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
         "shared_expert_intermediate_size": 16},
    ),
    "mamba": ("MambaConfig", {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 3, "state_size": 8}),
    "mamba2": ("Mamba2Config", {**MAMBA2, "expand": 2, "n_groups": 2, "chunk_size": 16}),
    "falcon_h1": (
        "FalconH1Config",
        {**ATTENTION, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8,  # noqa: E501
         "mamba_chunk_size": 16, "embedding_multiplier": 2.0, "lm_head_multiplier": 0.5},
    ),
    "bamba": (  # counts positions from 0 unless told
        "BambaConfig",
        {**ATTENTION, "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16,  # noqa: E501
         "attn_layer_indices": [1]},
    ),
    "jamba": (
        "JambaConfig",
        {**ATTENTION, "mamba_d_state": 8, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2,  # noqa: E501
         "num_experts_per_tok": 1, "use_mamba_kernels": False},
    ),
    "llama4": (
        "Llama4TextConfig",
        {**ATTENTION, "attention_chunk_size": WINDOW, "num_local_experts": 2, "intermediate_size_mlp": 48},
    ),
    "lfm2": (
        "Lfm2Config",
        {**ATTENTION, "layer_types": ["conv", "full_attention", "conv", "full_attention"], "block_auto_adjust_ff_dim": False},  # noqa: E501
    ),
}  # fmt: skip


def build(name: str, seed: int = 0) -> torch.nn.Module:
    config_class, options = CONFIGS[name]
    return build_config(getattr(transformers, config_class)(**options), seed)


def build_config(config, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # the usual 0.02 would leave every position's logits almost alike
            if parameter.ndim == 2:
                parameter.normal_(std=0.15)
    return model


def reference(model, tokens):
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), output_hidden_states=True, use_cache=False)


def feed(target, row, tokens, logits="all"):
    return target.forward(ForwardBatch([row], [target.cache.lengths[row]], [len(tokens)], tokens, logits))


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def speculate(target, row, truth, rng, seen, rounds=8):
    """Verify random blocks, keep a random part of each; the kept tokens are `truth`, the refused ones are noise."""
    for _ in range(rounds):
        at = target.cache.lengths[row]
        count = rng.choice([1, 3, 6])
        num_kept = rng.randint(1, count)
        block = truth[at : at + num_kept] + [rng.randrange(VOCAB) for _ in range(count - num_kept)]
        out = feed(target, row, block)
        target.cache.rollback([row], [at + num_kept])
        assert target.cache.lengths[row] == at + num_kept
        seen.append(
            (at, out.logits_TV[:num_kept].clone(), None if out.taps_TF is None else out.taps_TF[:num_kept].clone())
        )
