"""Language models of transformers: decoders, encoders, encoder-decoders, experts, state space."""

from typing import Any

from benchmarks.zoo.batches import causal, masked, masked_translation, sentences, translation
from benchmarks.zoo.configs import hf
from benchmarks.zoo.entry import Draw, Entry


def _of(family: str, draw: Draw, **models: dict[str, Any]) -> tuple[Entry, ...]:
    return tuple(
        Entry(name, family, hf(own.pop("model"), **own), draw) for name, own in models.items()
    )


def _causal(stem: str, **own: Any) -> dict[str, Any]:
    return {"model": f"{stem}ForCausalLM", **own}


DECODERS = _of(
    "decoder", causal,
    gpt2={"model": "GPT2LMHeadModel"},
    gpt_neo=_causal("GPTNeo", attention_types=[[["global", "local"], 1]], window_size=8),
    gpt_neox=_causal("GPTNeoX"),
    gptj=_causal("GPTJ", rotary_dim=4),
    gpt_bigcode=_causal("GPTBigCode"),
    openai_gpt={"model": "OpenAIGPTLMHeadModel"},
    ctrl={"model": "CTRLLMHeadModel", "dff": 64},
    codegen=_causal("CodeGen", rotary_dim=4),
    opt=_causal("OPT", word_embed_proj_dim=32),
    xglm=_causal("XGLM", attention_heads=4),
    biogpt=_causal("BioGpt"),
    bloom=_causal("Bloom"),
    mpt=_causal("Mpt"),
    falcon=_causal("Falcon", new_decoder_architecture=False),
    llama=_causal("Llama"),
    mistral=_causal("Mistral", sliding_window=8),
    qwen2=_causal("Qwen2"),
    qwen3=_causal("Qwen3"),
    gemma=_causal("Gemma"),
    gemma2=_causal("Gemma2", sliding_window=8, query_pre_attn_scalar=8),
    gemma3=_causal("Gemma3", sliding_window=8, query_pre_attn_scalar=8),
    phi=_causal("Phi"),
    phi3=_causal("Phi3"),
    stablelm=_causal("StableLm"),
    persimmon=_causal("Persimmon"),
    olmo=_causal("Olmo"),
    olmo2=_causal("Olmo2"),
    cohere=_causal("Cohere"),
    starcoder2=_causal("Starcoder2"),
    glm=_causal("Glm", partial_rotary_factor=0.5),
    granite=_causal("Granite"),
    nemotron=_causal("Nemotron", head_dim=8, num_key_value_heads=2),
    smollm3=_causal("SmolLM3"),
    exaone4=_causal("Exaone4", sliding_window=8),
    bitnet=_causal("BitNet"),
    diffllama=_causal("DiffLlama"),
    helium=_causal("Helium"),
)  # fmt: skip

EXPERTS = _of(
    "experts", causal,
    mixtral=_causal("Mixtral"),
    qwen2_moe=_causal("Qwen2Moe", shared_expert_intermediate_size=32),
    qwen3_moe=_causal("Qwen3Moe"),
    olmoe=_causal("Olmoe"),
    gpt_oss=_causal("GptOss", sliding_window=8),
    granitemoe=_causal("GraniteMoe"),
    jetmoe=_causal("JetMoe", kv_channels=8, num_key_value_heads=2),
    deepseek_v2=_causal("DeepseekV2", num_experts_per_tok=2, kv_lora_rank=16,
                        q_lora_rank=16, qk_rope_head_dim=8,
                        qk_nope_head_dim=8, v_head_dim=8, num_key_value_heads=4,
                        n_group=1, topk_group=1,
                        first_k_dense_replace=1, n_shared_experts=1),
    deepseek_v3=_causal("DeepseekV3", kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8,
                        qk_nope_head_dim=8, v_head_dim=8, num_key_value_heads=4,
                        n_group=2, topk_group=1,
                        first_k_dense_replace=1, n_shared_experts=1),
    glm4_moe=_causal("Glm4Moe", n_group=1, topk_group=1, first_k_dense_replace=1),
)  # fmt: skip

ENCODERS = (*_of(
    "encoder", masked,
    bert={"model": "BertForMaskedLM"},
    roberta={"model": "RobertaForMaskedLM"},
    distilbert={"model": "DistilBertForMaskedLM"},
    electra={"model": "ElectraForMaskedLM"},
    albert={"model": "AlbertForMaskedLM"},
    mpnet={"model": "MPNetForMaskedLM"},
    deberta={"model": "DebertaForMaskedLM", "relative_attention": True,
             "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 16},
    deberta_v2={"model": "DebertaV2ForMaskedLM", "relative_attention": True,
                "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 16},
    camembert={"model": "CamembertForMaskedLM"},
    convbert={"model": "ConvBertForMaskedLM"},
    squeezebert={"model": "SqueezeBertForMaskedLM"},
    mobilebert={"model": "MobileBertForMaskedLM", "intra_bottleneck_size": 32},
    roformer={"model": "RoFormerForMaskedLM"},
    rembert={"model": "RemBertForMaskedLM", "input_embedding_size": 16,
             "output_embedding_size": 16},
    nystromformer={"model": "NystromformerForMaskedLM", "segment_means_seq_len": 16,
                   "num_landmarks": 16},
    esm={"model": "EsmForMaskedLM", "mask_token_id": 3, "pad_token_id": 0, "vocab_size": 64,
         "position_embedding_type": "rotary"},
    modernbert={"model": "ModernBertForMaskedLM"},
    longformer={"model": "LongformerForMaskedLM", "attention_window": 8},
    big_bird={"model": "BigBirdForMaskedLM", "attention_type": "original_full"},
    xlm={"model": "XLMWithLMHeadModel", "n_words": 64},
    flaubert={"model": "FlaubertWithLMHeadModel", "n_words": 64},
    ernie={"model": "ErnieForMaskedLM"},
    layoutlm={"model": "LayoutLMForMaskedLM"},
    tapas={"model": "TapasForMaskedLM"},
    perceiver={"model": "PerceiverForMaskedLM", "num_latents": 8, "d_latents": 32,
               "max_position_embeddings": 16,
               "num_self_attends_per_block": 2, "num_self_attention_heads": 4,
               "num_cross_attention_heads": 4},
), *_of(
    "encoder", sentences,
    fnet={"model": "FNetForSequenceClassification"},
    funnel={"model": "FunnelForSequenceClassification", "block_sizes": [1, 1], "d_head": 8},
    xlnet={"model": "XLNetForSequenceClassification"},
    canine={"model": "CanineForSequenceClassification", "downsampling_rate": 2,
            "local_transformer_stride": 8, "upsampling_kernel_size": 2},
    reformer={"model": "ReformerForSequenceClassification", "is_decoder": False,
              "axial_pos_shape": [4, 4], "axial_pos_embds_dim": [16, 16],
              "attn_layers": ["local", "local"], "attention_head_size": 8,
              "local_attn_chunk_length": 8, "feed_forward_size": 64},
))  # fmt: skip

TRANSLATORS = (*_of(
    "encoder-decoder", translation,
    t5={"model": "T5ForConditionalGeneration", "relative_attention_num_buckets": 8,
        "decoder_start_token_id": 0},
    mt5={"model": "MT5ForConditionalGeneration"},
    umt5={"model": "UMT5ForConditionalGeneration"},
    bart={"model": "BartForConditionalGeneration"},
    mbart={"model": "MBartForConditionalGeneration"},
    pegasus={"model": "PegasusForConditionalGeneration"},
    pegasus_x={"model": "PegasusXForConditionalGeneration", "block_size": 8},
    marian={"model": "MarianMTModel", "decoder_vocab_size": 64, "decoder_start_token_id": 0},
    m2m_100={"model": "M2M100ForConditionalGeneration"},
    blenderbot={"model": "BlenderbotForConditionalGeneration"},
    led={"model": "LEDForConditionalGeneration", "attention_window": 8,
         "max_encoder_position_embeddings": 32, "max_decoder_position_embeddings": 32},
    bigbird_pegasus={"model": "BigBirdPegasusForConditionalGeneration",
                     "attention_type": "original_full"},
    prophetnet={"model": "ProphetNetForConditionalGeneration", "ngram": 2},
    fsmt={"model": "FSMTForConditionalGeneration", "src_vocab_size": 64, "tgt_vocab_size": 64},
    plbart={"model": "PLBartForConditionalGeneration"},
), *_of(
    "encoder-decoder", masked_translation,
    longt5={"model": "LongT5ForConditionalGeneration", "local_radius": 3,
            "decoder_start_token_id": 0},
    switch={"model": "SwitchTransformersForConditionalGeneration", "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1, "expert_capacity": 64, "decoder_start_token_id": 0},
))  # fmt: skip


STATE_SPACE = _of(
    "state space", causal,
    mamba=_causal("Mamba", state_size=4),
    falcon_mamba=_causal("FalconMamba", state_size=4),
    mamba2=_causal("Mamba2", state_size=8, num_heads=8, head_dim=8, n_groups=2, chunk_size=8),
    jamba=_causal("Jamba", mamba_d_state=4, mamba_dt_rank=4, attn_layer_period=2,
                  attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1),
    bamba=_causal("Bamba", mamba_d_state=8, mamba_n_heads=8, mamba_d_head=8, mamba_chunk_size=8,
                  attn_layer_indices=[1]),
    falcon_h1=_causal("FalconH1", mamba_d_ssm=64, mamba_n_heads=8, mamba_d_head=8,
                      mamba_d_state=8, mamba_chunk_size=8),
    zamba=_causal("Zamba", num_hidden_layers=5, attn_layer_period=2, attn_layer_offset=1,
                  mamba_d_state=4, n_mamba_heads=2, attention_head_dim=16,
                  attention_hidden_size=64),
    rwkv=_causal("Rwkv", attention_hidden_size=32),
    recurrent_gemma=_causal("RecurrentGemma", num_hidden_layers=3, lru_width=32,
                            attention_window_size=8),
    qwen3_next=_causal("Qwen3Next", linear_key_head_dim=8, linear_value_head_dim=8,
                       linear_num_key_heads=2, linear_num_value_heads=4,
                       shared_expert_intermediate_size=32,
                       layer_types=["linear_attention", "full_attention"]),
    xlstm=_causal("xLSTM", num_blocks=2, num_heads=4, qk_dim_factor=0.5, v_dim_factor=1.0,
                  use_cache=False, chunk_size=8),
    lfm2=_causal("Lfm2", layer_types=["conv", "full_attention"], block_ff_dim=64),
)  # fmt: skip
