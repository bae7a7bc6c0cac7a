"""Loading of models and tokenizers from a `ModelSection` of a recipe.

Mistakes of the user are raised as InputError with a message of one line. Weights are read from safetensors files unless
`trust_remote_code` is set.
"""

import functools
import importlib.util
import inspect
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, get_args, get_type_hints

import peft
import torch
import transformers
from huggingface_hub.constants import HF_HUB_OFFLINE
from safetensors import SafetensorError
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.integrations import deepspeed as hf_deepspeed
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.utils import is_torchvision_available
from transformers.utils.quantization_config import Mxfp4Config
from transformers.video_processing_utils import BaseVideoProcessor

from ..data import chat
from ..data.images import attach_image_reader, get_image_reader
from ..data.lengths import largest_token_id
from ..engines.launch import SHARDING_FIX
from ..errors import InputError, name_hint, path_hint, short_repr
from .adapters import check_adapter_kind, without_needless_warnings
from .config import OFFLINE_FIX, ModelSection, RewardModelSection, has_tokenizer, is_local, unreadable_weights

logger = logging.getLogger(__name__)


def check_model(section: ModelSection) -> PreTrainedConfig:
    """Return the config of the model, after checks that its files and packages exist.

    Raises:
        InputError: If the model, its adapter or the quantization package is missing, or if the model is an adapter.
    """
    if section.quantization != "none" and importlib.util.find_spec("bitsandbytes") is None:
        raise InputError(
            f"quantization: {section.quantization} requires bitsandbytes. Install it with pip install bitsandbytes"
        )
    if section.adapter:
        with as_input_error("adapter", section.adapter):
            adapter = peft.PeftConfig.from_pretrained(section.adapter)
            check_adapter_kind(adapter)
        if section.head == "score" and adapter.task_type != "SEQ_CLS":
            problem = (
                f"adapter {section.adapter} has task_type {adapter.task_type}, not SEQ_CLS as that of a reward model"
            )
            raise InputError(f"{problem}. Merge it into its base first (hf-posttrain merge), and train that model")
        if section.head == "language" and adapter.task_type == "SEQ_CLS":
            problem = f"adapter {section.adapter} is that of a reward model, which cannot generate text"
            raise InputError(f"{problem}. Use the adapter of a language model")

    name = section.name_or_path
    if (Path(name) / "adapter_config.json").is_file() and not (Path(name) / "config.json").is_file():
        raise InputError(
            f"{name} is an adapter. Load its base model and pass PeftModel.from_pretrained(base, {name!r}) instead (to "
            "train it further, with is_trainable=True)"
        )
    with as_input_error("model", name):
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=section.trust_remote_code)


def with_head(section: ModelSection, config: PreTrainedConfig) -> ModelSection:
    """Return the section as that of a reward model if the model is a sequence classifier."""
    return RewardModelSection(**vars(section)) if is_classifier(config) else section


def is_classifier(config: PreTrainedConfig) -> bool:
    """Return whether the model is a sequence classifier, such as a reward model, without a language modeling head."""
    return any("ForSequenceClassification" in name for name in config.architectures or ())


# ---- tokenizers


def load_tokenizer(section: ModelSection) -> PreTrainedTokenizerBase:
    """Return the tokenizer of `section`, with a pad token and the chat template of the section, if it has one.

    Raises:
        InputError: If the model has no tokenizer.
    """
    # an adapter that is continued has its own tokenizer and chat template, with which it was trained
    adapter_folder = Path(section.adapter or "")
    name = str(adapter_folder) if section.adapter and has_tokenizer(adapter_folder) else section.name_or_path
    with as_input_error("tokenizer", name):
        if section.images:
            tokenizer = attach_image_reader(load_processor(name, section))
        else:
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=section.trust_remote_code)

    # for a folder that has config.json alone, transformers returns an empty tokenizer
    if Path(name).is_dir() and not has_tokenizer(Path(name)):
        raise InputError(f"folder {name} has no tokenizer (tokenizer.json and tokenizer_config.json)")

    adapter_template = adapter_folder / "chat_template.jinja"
    if section.chat_template or (section.adapter and adapter_template.is_file()):
        set_chat_template(tokenizer, section.chat_template or adapter_template)
    elif reader := get_image_reader(tokenizer):
        reader.processor.chat_template = tokenizer.chat_template  # the processor is saved
    return with_pad_token(tokenizer)


def set_chat_template(tokenizer: PreTrainedTokenizerBase, file: str | Path) -> None:
    """Set the chat template of a tokenizer, and of the processor that it belongs to, to the text of a file."""
    tokenizer.chat_template = Path(file).read_text(encoding="utf-8")
    if reader := get_image_reader(tokenizer):
        reader.processor.chat_template = tokenizer.chat_template  # the processor is saved


def load_processor(name: str, section: ModelSection) -> ProcessorMixin:
    """Return the processor of a vision-language model. Errors of `from_pretrained` are not converted."""
    options = {"trust_remote_code": section.trust_remote_code}
    config = transformers.AutoConfig.from_pretrained(section.name_or_path, **options)
    processor_class = getattr(transformers, PROCESSOR_MAPPING_NAMES.get(config.model_type, ""), None)
    if (
        processor_class is not None
        and not is_torchvision_available()
        and "video_processor" in processor_class.get_attributes()
    ):
        processor = without_video_processor(processor_class).from_pretrained(name, **options)
        with suppress(OSError):  # the model has no config of a video processor
            processor.videos, _ = BaseVideoProcessor.get_video_processor_dict(name)
        return processor
    return transformers.AutoProcessor.from_pretrained(name, **options)


@functools.cache
def without_video_processor(processor_class: Any) -> Any:
    """Return a subclass of a processor class whose video processor is None.

    A video processor requires torchvision, even if no video is read.
    """

    class ImagesOnly(processor_class):
        """A processor whose constructor takes None for the video processor.

        Code that loads and saves processors does not see that attribute. The config of the video processor is saved as
        it was read.
        """

        videos: dict[str, Any] | None = None

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            processor = super().__new__(cls)
            if args or kwargs:
                vars(processor)["get_attributes"] = processor_class.get_attributes
            return processor

        def __reduce__(self) -> tuple:
            return _new_without_video_processor, (processor_class,), vars(self)

        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in processor_class.get_attributes() if name != "video_processor"]

        @classmethod
        def from_args_and_dict(cls, args: Sequence[Any], processor_dict: dict[str, Any], **kwargs: Any) -> Any:
            image_dict = {name: value for name, value in processor_dict.items() if name != "video_processor"}
            return super().from_args_and_dict(args, image_dict, **kwargs)

        def to_dict(self) -> dict[str, Any]:
            return super().to_dict() | ({"video_processor": self.videos} if self.videos else {})

        @property
        def video_processor(self) -> None:
            return None

        @video_processor.setter
        def video_processor(self, _: None) -> None:
            self.__dict__.pop("get_attributes")

        def check_argument_for_proper_class(self, argument_name: str, argument: object) -> object:
            return argument and super().check_argument_for_proper_class(argument_name, argument)

        @classmethod
        def _get_arguments_from_pretrained(cls, *args: Any, **kwargs: Any) -> list[Any]:
            arguments = list(super()._get_arguments_from_pretrained(*args, **kwargs))
            arguments.insert(processor_class.get_attributes().index("video_processor"), None)
            return arguments

    ImagesOnly.__name__ = ImagesOnly.__qualname__ = processor_class.__name__
    return ImagesOnly


def _new_without_video_processor(processor_class: Any) -> Any:
    """Return a processor without a video processor and without attributes, which pickle restores."""
    return object.__new__(without_video_processor(processor_class))


def with_pad_token(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return the same tokenizer, with the end of a turn as a special token and with a pad token.

    The pad token is an unused one of its vocabulary, its eos token, or the end of a turn in its chat template.

    Raises:
        InputError: If the tokenizer has none of these tokens.
    """
    chat.mark_turn_end(tokenizer)
    # the pad token may be one that is trained, since masks in this package come from lengths, never from the pad id
    if tokenizer.pad_token_id is None:
        unused = [token for token in tokenizer.get_added_vocab() if "pad" in token.lower()]
        tokenizer.pad_token = unused[0] if unused else tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        with suppress(InputError):
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(chat.turn_end_id(tokenizer))
    if tokenizer.pad_token_id is None:
        raise InputError(
            f"the tokenizer {tokenizer.name_or_path or ''} has neither a pad nor an eos token. Set one in its"
            " tokenizer_config.json"
        )
    return tokenizer


def check_tokenizer_fits(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, name: str, *rows: Any) -> None:
    """Check that the model has an embedding for each id in the rows, and for the bos, eos and pad token.

    Other tokens of the tokenizer are not checked, since they do no harm. For example the tokenizer of Gemma 3 1B has a
    placeholder for images.

    Args:
        tokenizer: The tokenizer.
        config: Config of the model.
        name: Name of the model in the message.
        rows: Data sets of prepared rows.

    Raises:
        InputError: If an id is outside of the vocabulary of the model.
    """
    size = config.get_text_config().vocab_size
    used_ids = [tokenizer.bos_token_id, tokenizer.eos_token_id]
    if max(tokenizer.get_vocab().values()) >= size:
        used_ids += map(largest_token_id, rows)
    largest = max(i for i in [*used_ids, tokenizer.pad_token_id] if i is not None)
    if largest >= size:
        raise InputError(
            f"the tokenizer of {name} uses id {largest} ({tokenizer.convert_ids_to_tokens(largest)!r}), but the model "
            f"has only {size} tokens. Call model.resize_token_embeddings({largest + 1} or more), or use another "
            "tokenizer"
        )


def sampling_vocab_size(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> int:
    """Return the number of ids that may be sampled: those that both the tokenizer and the model have."""
    return min(max(tokenizer.get_vocab().values()) + 1, config.get_text_config().vocab_size)


def check_same_vocabulary(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> None:
    """Check that both tokenizers map the same tokens to the same ids.

    The vocabulary sizes of the models may differ by padding, and equal sizes would prove nothing.

    Raises:
        InputError: If an id has different tokens.
    """
    student_tokens, teacher_tokens = (
        {i: token for token, i in tokenizer.get_vocab().items()} for tokenizer in (student, teacher)
    )
    all_ids = student_tokens.keys() | teacher_tokens.keys()
    differing = sorted(i for i in all_ids if student_tokens.get(i) != teacher_tokens.get(i))
    if differing:
        i = differing[0]
        counts = f"{len(student_tokens)} and {len(teacher_tokens)} ids, {len(differing)} differ"
        example = f"id {i} is {student_tokens.get(i)!r} for the student, {teacher_tokens.get(i)!r} for the teacher"
        raise InputError(
            f"student and teacher have different vocabularies ({counts}; {example}). Use a teacher with the student's "
            "vocabulary, or to align texts set own_tokenizer: true of the teacher (teacher={'tokenizer': ...} in "
            "Python)"
        )


# ---- models


def load_model(
    section: ModelSection,
    trainable: bool = True,
    device: torch.device | None = None,
    storage: torch.dtype = torch.uint8,
    options: dict[str, Any] | None = None,
) -> PreTrainedModel:
    """Return the model of `section`. A new adapter (`lora`) is not added here but by the trainer.

    With `from_scratch` the weights are random, from torch's global generator.

    Args:
        section: The model and how it is loaded.
        trainable: Whether the model is trained. Otherwise it is frozen and in eval mode.
        device: Device on which the model will run, by default a GPU if there is one. It decides the default dtype.
            Quantized weights are placed on it, others stay on CPU.
        storage: Dtype in which 4-bit weights are stored (`launch.quantized_storage`).
        options: Further arguments of `from_pretrained`.

    Raises:
        InputError: If the model does not exist or does not support an option.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = check_model(section)
    check_head(section, config)

    trains_all_weights = trainable and section.lora is None and not section.adapter
    options = apply_config_options(config, options or {})
    dtype = weights_dtype(section, config, trains_all_weights, device)
    kwargs = _auto_class_kwargs(section) | {"dtype": dtype} | options
    name = section.name_or_path
    with as_unknown_option_error(name, config, options), as_input_error("model", name):
        if section.from_scratch:
            kwargs.pop("use_safetensors", None)
            with unsharded_initialization():
                model = _auto_class(section, config).from_config(config, **kwargs)
        else:
            kwargs["config"] = config
            # pickled weights can run code, as the code of a model can
            kwargs.setdefault("use_safetensors", None if section.trust_remote_code else True)
            if section.quantization != "none":
                kwargs["quantization_config"] = transformers.BitsAndBytesConfig(
                    load_in_4bit=section.quantization == "4bit",
                    load_in_8bit=section.quantization == "8bit",
                    bnb_4bit_quant_type="nf4",
                    bnb_4bit_use_double_quant=True,
                    bnb_4bit_compute_dtype=kwargs["dtype"],
                    bnb_4bit_quant_storage=storage,
                )
                # on a GPU, quantized weights must be placed while they are loaded
                kwargs |= {} if device.type == "cpu" else {"device_map": {"": device}}

            # gpt-oss: transformers does not train MXFP4 weights, and computes with them where it has the kernels
            is_mxfp4 = (getattr(config, "quantization_config", None) or {}).get("quant_method") == "mxfp4"
            dequantize = is_mxfp4 and section.quantization == "none"
            if dequantize:
                kwargs["quantization_config"] = Mxfp4Config(dequantize=True)
            with _without_report_of_new_head(section):
                model = _auto_class(section, config).from_pretrained(section.name_or_path, **kwargs)
            if dequantize:
                # otherwise the dequantized weights would be saved as if they were packed
                vars(model).pop("_weight_conversions", None)
                for weight in model.parameters():
                    if weight.dtype == torch.bfloat16:  # transformers 5.20 leaves dequantized weights in this dtype
                        weight.data = weight.data.to(kwargs["dtype"])
    model = with_saved_adapter(model, section, trainable)
    return model if trainable else model.requires_grad_(False).eval()


def with_saved_adapter(model: PreTrainedModel, section: ModelSection, trainable: bool) -> Any:
    """Return the model with the saved adapter of its section, or the model itself if the section has none.

    The model may be on the meta device. The weights of the adapter are read in any case.

    Raises:
        InputError: If the adapter does not fit the model.
    """
    if not section.adapter:
        return model
    on_meta = next(model.parameters()).is_meta
    options: dict[str, Any] = {"is_trainable": trainable, "low_cpu_mem_usage": on_meta}
    try:
        with as_input_error("adapter", section.adapter), without_needless_warnings():
            policy = peft.PeftModel.from_pretrained(model, section.adapter, **options)
    except RuntimeError as error:
        if "size mismatch" not in str(error):
            raise
        mismatch = str(error)[str(error).index("size mismatch") :].partition("\n")[0]
        raise InputError(f"adapter {section.adapter} does not fit {section.name_or_path}: {mismatch}") from error

    trained_on = Path(str(policy.active_peft_config.base_model_name_or_path))
    base = Path(section.name_or_path)
    different_folders = trained_on.is_dir() and base.is_dir() and trained_on.resolve() != base.resolve()
    if trained_on.name != base.name or different_folders:
        logger.warning("adapter %s was trained on %s, not on %s", section.adapter, trained_on, section.name_or_path)
    _check_adapter_keys(policy, section, on_meta)
    return policy


def _check_adapter_keys(policy: peft.PeftModel, section: ModelSection, on_meta: bool) -> None:
    """Raise InputError if the weights in the file of an adapter and the layers of the base do not match.

    PEFT warns of weights that it ignored, and does not report layers without weights.
    """
    options: dict[str, Any] = {"torch_device": "cpu", "low_cpu_mem_usage": on_meta}
    result = policy.load_adapter(str(section.adapter), policy.active_adapter, **options)
    for keys, place in ((result.unexpected_keys, "base"), (result.missing_keys, "adapter")):
        if keys:
            raise InputError(
                f"adapter {section.adapter} was not trained on {section.name_or_path}. The {place} lacks {len(keys)} "
                f"weights, {keys[0]} first. Use the base model that the adapter was trained on"
            )


def load_skeleton(section: ModelSection) -> PreTrainedModel:
    """Return the model of `section` on the meta device, without weights but with its generation config."""
    config = check_model(section)
    check_head(section, config)
    with as_input_error("model", section.name_or_path), unsharded_initialization(), torch.device("meta"):
        model = _auto_class(section, config).from_config(config, **_auto_class_kwargs(section))
    if generation_config := load_generation_config(section):
        model.generation_config = generation_config
    return model


def check_head(section: ModelSection, config: PreTrainedConfig) -> None:
    """Set the number of labels of a reward model. Raise InputError if a model cannot have the head of its section."""
    name = section.name_or_path
    if section.head == "language":
        if is_classifier(config):
            fix = "Use a language model"
            raise InputError(f"model {name} is a sequence classifier and cannot generate text. {fix}")
    elif is_classifier(config) and config.num_labels != 1:
        raise InputError(f"model {name} has {config.num_labels} labels. A reward model must have one label")
    elif type(config) not in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        problem = f"model {name} ({config.model_type}) has no sequence classifier in transformers"
        raise InputError(f"{problem}. Use another model as a reward model")
    else:
        config.num_labels = 1


@contextmanager
def _without_report_of_new_head(section: ModelSection) -> Iterator[None]:
    """Log the new score layer of a reward model in one line, in place of transformers' report of missing weights."""
    if section.head == "language":
        yield
        return

    def is_relevant(record: logging.LogRecord) -> bool:
        """Return whether a record is not a report about the head alone, and log the new layer instead."""
        rows = re.findall(r"^(\S+) +\| +(?:\x1b\[\d+m)?(\w+)", record.getMessage(), re.M)
        keys = {key for key, status in rows if status in ("MISSING", "UNEXPECTED")}
        if "LOAD REPORT" not in record.getMessage() or not all(re.match(r"(score|lm_head)\.", key) for key in keys):
            return True
        if not section.adapter:  # which has the score layer
            logger.info("%s: the score layer is new, since this is a language model", section.name_or_path)
        return False

    report = logging.getLogger("transformers.modeling_utils")
    report.addFilter(is_relevant)
    try:
        yield
    finally:
        report.removeFilter(is_relevant)


def load_generation_config(section: ModelSection) -> transformers.GenerationConfig | None:
    """Return the saved generation config of the model, or None if it has none."""
    with suppress(OSError):
        return transformers.GenerationConfig.from_pretrained(section.name_or_path)
    return None


def _auto_class(section: ModelSection, config: PreTrainedConfig) -> Any:
    """Return the auto class of a model. Raise InputError if `images` does not match what the model supports."""
    if section.images and not _supports_images(config):
        raise InputError(
            f"images: {section.name_or_path} ({config.model_type}) does not support images. Set images: false"
        )
    if section.head == "score":
        return transformers.AutoModelForSequenceClassification
    if not section.images:
        if is_vision_only(config):
            raise InputError(
                f"{section.name_or_path} ({config.model_type}) is a vision-language model. Set images: true, or in "
                "Python pass its processor as processing_class"
            )
        return transformers.AutoModelForCausalLM
    return transformers.AutoModelForImageTextToText


def _supports_images(config: PreTrainedConfig) -> bool:
    return type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def is_vision_only(config: PreTrainedConfig) -> bool:
    """Return whether a model exists only with its vision encoder, so that it has a processor and no causal LM class."""
    return _supports_images(config) and type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING


def saved_with_vision(config: PreTrainedConfig) -> bool:
    """Return whether the weights belong to a vision-language model, by the class that has saved them.

    The type of the config does not show it. For example the config of Qwen3.5 belongs to a causal LM as well.
    """
    classes: Any = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), ())
    classes = classes if isinstance(classes, tuple) else (classes,)
    saved_by = config.architectures or ()
    return any(model_class.__name__ in saved_by for model_class in classes) or (
        is_classifier(config) and _supports_images(config)
    )


_NO_EFFECT_KWARGS = ("low_cpu_mem_usage", "_fast_init")
"""Arguments of `from_pretrained` in older versions of transformers, for behavior that is now always on."""
_PASS_BOTH = "Load model and tokenizer with it and pass both, since config and tokenizer would be read without it"
_REMOVED = "transformers no longer reads it. Remove it"
_UNSUPPORTED_KWARGS = {
    "subfolder": _PASS_BOTH,
    "config": "Pass the fields that differ, or the loaded model",
    "output_loading_info": "A trainer takes the model alone. Remove it",
    "state_dict": "Pass the loaded model",
    "load_in_4bit": "Pass quantization_config=BitsAndBytesConfig(load_in_4bit=True)",
    "load_in_8bit": "Pass quantization_config=BitsAndBytesConfig(load_in_8bit=True)",
    "use_flash_attention_2": "Pass attn_implementation='flash_attention_2'",
    **dict.fromkeys(("tp_plan", "tp_size", "distributed_config", "device_mesh"), f"Remove it. {SHARDING_FIX}"),
    **dict.fromkeys(("mirror", "from_tf", "from_flax", "offload_state_dict", "use_auth_token"), _REMOVED),
}
"""Entries of `model_init_kwargs` that would be ignored or read only in part, and the fix for each."""
_UNDECLARED_KWARGS = (
    "dtype",
    "device_map",
    "quantization_config",
    "attn_implementation",
    "experts_implementation",
    "max_memory",
    "variant",
    "trust_remote_code",
    "tp_plan",
    "key_mapping",
    "use_kernels",
)
"""Arguments that `from_pretrained` takes but that are not in its signature."""


def apply_model_init_kwargs(
    section: ModelSection, kwargs: Mapping[str, Any], owner: str = "model_init_kwargs"
) -> dict[str, Any]:
    """Write TRL's `model_init_kwargs` into a section, and return the entries for which it has no field.

    Args:
        section: The section to write into.
        kwargs: Arguments of `from_pretrained`.
        owner: Name of the option in messages.

    Raises:
        InputError: For a dtype that does not exist, an unsupported argument, and a revision other than main, since
            config and tokenizer would not be read from it.
    """
    remaining = dict(kwargs)
    if (revision := remaining.pop("revision", None)) not in (None, "main"):
        raise InputError(
            f"{owner}: revision={revision!r} cannot be loaded by name. Download it (hf download {section.name_or_path} "
            f"--revision {revision}) and use its folder"
        )

    dtype = remaining.pop("dtype", remaining.pop("torch_dtype", None))
    if dtype is not None:
        section.dtype = str(dtype).removeprefix("torch.")  # type: ignore[assignment]
        if section.dtype not in (known := get_args(get_type_hints(ModelSection)["dtype"])):
            raise InputError(f"{owner}: dtype={dtype!r} must be one of {', '.join(known)}")
    section.attn_implementation = remaining.pop("attn_implementation", None) or section.attn_implementation
    section.trust_remote_code = remaining.pop("trust_remote_code", section.trust_remote_code)
    for name in _NO_EFFECT_KWARGS:
        remaining.pop(name, None)
    if remaining.get("use_safetensors") is False and not section.trust_remote_code:
        raise InputError(
            f"{owner}: use_safetensors=False requires trust_remote_code=True, since other weight files can run code"
        )

    defaults = dict.fromkeys(_UNSUPPORTED_KWARGS, False)
    remaining = {
        name: value for name, value in remaining.items() if value not in (None, "") and value is not defaults.get(name)
    }
    for name, fix in _UNSUPPORTED_KWARGS.items():
        if name in remaining:
            raise InputError(f"{owner}: {name}={short_repr(remaining[name])} is not supported. {fix}")
    return remaining


def apply_config_options(config: PreTrainedConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    """Write the options that are fields of the config into it, as transformers does, and return the others."""
    remaining = dict(options)
    text_config = config.get_text_config()
    for owner in (config, text_config):
        for name in [name for name in remaining if name != "quantization_config" and _is_settable_field(owner, name)]:
            value = remaining.pop(name)
            current = getattr(owner, name)
            if isinstance(current, PreTrainedConfig) and isinstance(value, Mapping):
                current.update(dict(value))
            else:
                setattr(owner, name, value)
    return remaining


def _is_settable_field(config: PreTrainedConfig, name: str) -> bool:
    """Return whether a config has a value of this name that can be set, unlike methods and read-only properties."""
    attribute = getattr(type(config), name, None)
    read_only = isinstance(attribute, property) and attribute.fset is None
    return hasattr(config, name) and not read_only and not callable(getattr(config, name))


@contextmanager
def as_unknown_option_error(name_or_path: str, config: PreTrainedConfig, options: Mapping[str, Any]) -> Iterator[None]:
    """Convert the TypeError for an option that neither loader nor model reads into an InputError with a hint."""
    try:
        yield
    except TypeError as error:
        match = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if match is None or match[1] not in options:
            raise
        loader = inspect.signature(PreTrainedModel.from_pretrained).parameters
        known = {*loader, *_UNDECLARED_KWARGS, *config.to_dict(), *config.get_text_config().to_dict()}
        hint = name_hint(match[1], known, list_valid=False)
        problem = f"neither from_pretrained nor the config of {name_or_path} has {match[1]!r}"
        raise InputError(f"model_init_kwargs of {name_or_path}: {problem}{hint}") from error


def _auto_class_kwargs(section: ModelSection) -> dict[str, Any]:
    """Return the arguments that from_pretrained and from_config share."""
    attention = {} if section.attn_implementation == "auto" else {"attn_implementation": section.attn_implementation}
    return {"trust_remote_code": section.trust_remote_code, **attention}


def weights_dtype(
    section: ModelSection, config: PreTrainedConfig, trains_all_weights: bool, device: torch.device
) -> torch.dtype:
    """Return the dtype in which weights are loaded.

    `default` means float32 if all weights are trained, otherwise bfloat16 on a GPU and float32 on CPU.
    """
    if section.dtype == "default":
        return torch.bfloat16 if device.type != "cpu" and not trains_all_weights else torch.float32
    if section.dtype == "auto":
        return getattr(config.get_text_config(), "dtype", None) or torch.float32
    return getattr(torch, section.dtype)


@contextmanager
def unsharded_initialization() -> Iterator[None]:
    """Keep ZeRO-3 from sharding weights while they are initialized, so that they are the same under every engine."""
    before = hf_deepspeed._hf_deepspeed_config_weak_ref
    hf_deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        hf_deepspeed._hf_deepspeed_config_weak_ref = before


@contextmanager
def as_input_error(kind: str, name: str) -> Iterator[None]:
    """Convert errors of `from_pretrained` into an InputError with the source, and a similar folder if it is missing.

    Args:
        kind: Kind of the source, such as "model" or "adapter".
        name: Folder or hub name.
    """
    try:
        yield
    except Exception as error:
        # for broken files tokenizers raises Exception itself, and transformers KeyError
        known = OSError | ValueError | ImportError | LookupError | SafetensorError
        if not isinstance(error, known) and type(error) is not Exception:
            raise
        first_line = str(error).strip().partition("\n")[0].rstrip(".")
        problem = f"its files lack {first_line}" if isinstance(error, LookupError) else first_line
        if "trust_remote_code=True" in str(error):
            problem += ". Set trust_remote_code to true if you trust the code"
        if kind in ("model", "adapter") and isinstance(error, OSError | SafetensorError):
            problem = unreadable_weights(name) or problem
        # transformers raises OSError for files that are missing, here and on the Hub
        if (path := Path(name)).exists() or not (isinstance(error, OSError) or is_local(name)):
            raise InputError(f"{kind} {name}: {problem}") from error
        hint = path_hint(path)
        hub = f"; from the Hub: {problem}"
        if is_local(name):
            hub = ""
        elif HF_HUB_OFFLINE:
            hub = ", and HF_HUB_OFFLINE disables the hub"
            hint = hint or OFFLINE_FIX
        elif "connect to" in problem:
            hint = hint or ". Check the network, or use the folder of a model"
        raise InputError(f"{kind} {name}: no such folder{hub}{hint}") from error
