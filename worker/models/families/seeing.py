"""Models that see or hear as well: the decoder of their text is one of our families.

The text is served; the tower, which makes embeddings of images or sounds, is left unread.
"""

from collections.abc import Mapping

_NO_WINDOW: Mapping[str, object] = {"sliding_window": None, "layer_types": None}
# A text's own `model_type` -> the family whose layers it has, and what its configuration leaves
# out. Rotations by three numbers a place (M-RoPE) are those by one where the three are equal, as
# they are in text.
TEXT_FAMILIES: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "glm4v_moe_text": ("glm4_moe", {"use_qk_norm": False, "num_mtp_layers": 0}),
    "glm4v_text": ("glm4", {"attention_bias": True}),
    "paddleocr_vl_text": ("llama", {"attention_bias": False, "mlp_bias": False}),
    "qwen2_5_omni_text": ("qwen2", {}),
    "qwen2_5_vl_text": ("qwen2", {}),
    "qwen2_vl_text": ("qwen2", {}),
    "qwen3_vl_text": ("qwen3", _NO_WINDOW),
}
# transformers' `model_type` of the whole model, whose text was compared with transformers' module.
SEEING = frozenset(
    {
        "deepseek_vl", "deepseek_vl_hybrid", "exaone4_5", "gemma3", "glm46v", "glm4v", "glm4v_moe",
        "glmasr", "glmga", "got_ocr2", "granite_speech", "granite_speech_plus", "idefics2",
        "idefics3", "internvl", "janus", "kimi_k25", "lighton_ocr", "llava", "llava_next",
        "llava_next_video", "llava_onevision", "mistral3", "ovis2", "paddleocr_vl", "paligemma",
        "pp_chart2table", "qianfan_ocr", "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_audio",
        "qwen2_vl", "qwen3_asr", "qwen3_vl", "smolvlm", "video_llama_3", "video_llava", "vipllava",
        "voxtral",
    }
)  # fmt: skip
