"""Model types that were proven: on a small model with random weights, answers over a cached prefix equal those without.

What `contrib/lmcache-transformers/tests/test_walk.py` finds, which walks every configuration class of transformers and
fails where this list says anything else. With transformers 5.23.
"""

from __future__ import annotations

# fmt: off
PROVEN = frozenset(
    (
        "afmoe", "apertus", "arcee", "aria_text", "axk1", "beam", "bert", "bert-generation", "big_bird", "biogpt",
        "bitnet", "bloom", "camembert", "codegen", "cohere", "cohere2", "cohere2_moe", "ctrl", "cwm",
        "data2vec-text", "dbrx", "deepseek_v2", "deepseek_v3", "diffllama", "doge", "dots1", "electra", "ernie",
        "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "falcon", "flex_olmo", "flint", "gemma", "gemma2",
        "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "glm", "glm4", "glm4_moe",
        "glm4_moe_lite", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gpt_oss", "gptj",
        "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "helium", "hrm_text",
        "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3", "iquestcoder", "jais2",
        "jetmoe", "kolibri1", "laguna", "lfm2", "lfm2_moe", "llama", "llama4_text", "longcat_flash",
        "megatron-bert", "mellum", "mimo_v2_flash", "minicpm3", "minimax_m2", "minimax_m3_vl_text", "ministral",
        "ministral3", "mistral", "mixtral", "modernbert-decoder", "mpt", "nanochat", "nemotron", "olmo", "olmo2",
        "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
        "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "seed_oss", "smollm3", "solar_open",
        "stablelm", "starcoder2", "vaultgemma", "xglm", "xlm-roberta", "xlm-roberta-xl", "youtu",
    )
)
# fmt: on
