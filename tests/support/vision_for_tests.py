"""Tiny models that see, with processors, in the manner of six families; and real pictures.

seeing(kind) -> (model, tokenizer with what reads pictures), kind one of KINDS
pictures()   -> paths of photographs that matplotlib ships, of several sizes
"""

import functools
from importlib.util import find_spec
from pathlib import Path

import matplotlib
import torch
import transformers as tf
from packaging.version import Version
from tokenizers_for_tests import _bytes_and, _wrap
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.utils import is_torchvision_available

from hf_posttrain.data.images import attach_image_reader
from hf_posttrain.models.load import without_video_processor

KINDS = ("qwen3_vl", "qwen3_5", "gemma3", "gemma4", "idefics3", "smolvlm")
if Version(tf.__version__) < Version("5.24") and not find_spec("torchvision"):  # which its processor wants there
    KINDS = tuple(kind for kind in KINDS if kind != "gemma4")
SPECIAL = {
    "qwen": "<|endoftext|> <|im_start|> <|im_end|> <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>",
    "gemma3": "<pad> <bos> <start_of_turn> <end_of_turn> <start_of_image> <end_of_image> <image_soft_token> <|video|>",
    "idefics3": "<pad> <|im_start|> <end_of_utterance> <fake_token_around_image> <image> <global-img> <row_1_col_1> "
                "<row_1_col_2> <row_2_col_1> <row_2_col_2>",
}  # fmt: skip
AUDIO = {"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"}
SPECIAL["gemma4"] = " ".join([SPECIAL["gemma3"], *AUDIO.values()])
PLACE = {
    "gemma4": "<image_soft_token>", "qwen": "<|vision_start|><|image_pad|><|vision_end|>", "gemma3": "<start_of_image>",
    "idefics3": "<image>",
}  # fmt: skip
GEMMA = "<start_of_turn>", "<end_of_turn>\n"
TURN = {"qwen": ("<|im_start|>", "<|im_end|>\n"), "gemma3": GEMMA, "gemma4": GEMMA,
        "idefics3": ("<|im_start|>", "<end_of_utterance>\n")}  # fmt: skip
TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 300, "max_position_embeddings": 2048,
}  # fmt: skip


def template(family):
    """ChatML, or Gemma's turns, with contents as text or parts."""
    begin, end = TURN[family]
    bos = "{{ bos_token }}" if family.startswith("gemma") else ""
    content = ("{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'image' %}"
               f"{PLACE[family]}{{% else %}}{{{{ p.text }}}}{{% endif %}}{{% endfor %}}{{% endif %}}")  # fmt: skip
    opened = f"{{% if add_generation_prompt %}}{begin}assistant\n{{% endif %}}"
    return f"{bos}{{% for m in messages %}}{begin}{{{{ m.role }}}}\n{content}{end}{{% endfor %}}{opened}"


def family_of(kind):
    """Kinds of a family have one tokenizer and template."""
    return {"qwen3_vl": "qwen", "qwen3_5": "qwen", "smolvlm": "idefics3"}.get(kind, kind)


def tokenizer_of(family):
    special = SPECIAL[family].split()
    end = TURN[family][1].strip()
    names = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    names |= AUDIO if family == "gemma4" else {}
    more = {"bos_token": "<bos>", "extra_special_tokens": names} if family.startswith("gemma") else {}
    return _wrap(_bytes_and(special), template(family), eos_token=end, pad_token=special[0], **more)


def processor_of(kind):
    family = family_of(kind)
    tokenizer = tokenizer_of(family)
    if family == "qwen":
        images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 1024})
        if is_torchvision_available():
            parts = images, tokenizer, tf.Qwen3VLVideoProcessor(patch_size=4, merge_size=2)
            return tf.Qwen3VLProcessor(*parts, chat_template=tokenizer.chat_template)
        return without_video_processor(tf.Qwen3VLProcessor)(images, tokenizer, chat_template=tokenizer.chat_template)
    if kind == "gemma3":
        images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16}, do_pan_and_scan=False)
        return tf.Gemma3Processor(images, tokenizer, chat_template=tokenizer.chat_template, image_seq_length=4)
    if kind == "gemma4":
        images = Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70, pooling_kernel_size=2)
        parts = tf.Gemma4AudioFeatureExtractor(), images, tokenizer, None
        return without_video_processor(tf.Gemma4Processor)(*parts, chat_template=tokenizer.chat_template)
    tiles = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
    options = {"image_seq_len": 4, "chat_template": tokenizer.chat_template}
    if kind == "smolvlm":
        return without_video_processor(tf.SmolVLMProcessor)(
            SmolVLMImageProcessorPil(**tiles), tokenizer, None, **options
        )
    return tf.Idefics3Processor(Idefics3ImageProcessorPil(**tiles), tokenizer, **options)


@functools.cache
def config_of(kind):
    tokenizer = tokenizer_of(family_of(kind))
    token = lambda text: tokenizer.convert_tokens_to_ids(text)  # noqa: E731
    if kind.startswith("qwen"):
        ids = {f"{name}_token_id": token(f"<|{name}_pad|>") for name in ("image", "video")}
        ids |= {f"vision_{name}_token_id": token(f"<|vision_{name}|>") for name in ("start", "end")}
        vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 4,
                  "out_hidden_size": 32, "num_position_embeddings": 64}  # fmt: skip
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
        text = TEXT | {"rope_parameters": rope}
        if kind == "qwen3_vl":
            return tf.Qwen3VLConfig(text_config=text, vision_config=vision | {"deepstack_visual_indexes": [0]}, **ids)
        text |= {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_key_head_dim": 8,
                 "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                 "rope_parameters": rope | {"partial_rotary_factor": 1.0}}  # fmt: skip
        return tf.Qwen3_5Config(text_config=text, vision_config=vision, **ids)
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
              "image_size": 16, "patch_size": 4}  # fmt: skip
    if kind == "gemma4":
        kinds = ["sliding_attention", "full_attention"] * 2
        text = TEXT | {"sliding_window": 12, "layer_types": kinds, "use_bidirectional_attention": "vision",
                       "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "global_head_dim": 8,
                       "vocab_size_per_layer_input": 300}  # fmt: skip
        more = {"pooling_kernel_size": 2, "num_key_value_heads": 4, "head_dim": 8, "position_embedding_size": 512}
        named = {"image": "<image_soft_token>", "boi": "<start_of_image>", "eoi": "<end_of_image>",
                 "video": "<|video|>", "audio": "<|audio|>"}  # fmt: skip
        ids = {f"{name}_token_id": token(text) for name, text in named.items()}
        return tf.Gemma4Config(text_config=text, vision_config=vision | more, **ids)
    if kind == "gemma3":
        kinds = ["sliding_attention", "full_attention"] * 2
        text = TEXT | {"sliding_window": 12, "query_pre_attn_scalar": 8, "layer_types": kinds}
        ids = {"image_token_index": "<image_soft_token>", "image_token_id": "<image_soft_token>",
               "boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>"}  # fmt: skip
        ids = {name: token(text) for name, text in ids.items()}
        return tf.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **ids)
    text = {"model_type": "llama", **TEXT}
    made = tf.SmolVLMConfig if kind == "smolvlm" else tf.Idefics3Config
    return made(text_config=text, vision_config=vision, scale_factor=2, image_token_id=token("<image>"))


def seeing(kind, seed=0, scale=1.0):
    """(a float32 model in eval mode, its tokenizer)"""
    torch.manual_seed(seed)
    model = tf.AutoModelForImageTextToText.from_config(config_of(kind)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
                if not parameter.any():  # what joins Gemma 3's tower to its language model begins at 0
                    parameter.normal_(std=0.1)
    return model.eval(), attach_image_reader(processor_of(kind))


def pictures():
    """A portrait and a wide logo."""
    folder = Path(matplotlib.__file__).parent / "mpl-data"
    return [str(folder / "sample_data" / "grace_hopper.jpg"), str(folder / "sample_data" / "logo2.png")]
