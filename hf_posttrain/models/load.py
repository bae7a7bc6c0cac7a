"""Models and tokenizers from a `ModelSection` of a recipe; a user's mistake is an InputError of one line.

Weights are read from safetensors files unless trust_remote_code is set.
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
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations import deepspeed as hf_deepspeed
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.utils import is_torchvision_available
from transformers.utils.quantization_config import Mxfp4Config
from transformers.video_processing_utils import BaseVideoProcessor

from ..data import chat
from ..data.images import get_image_reader, attach_image_reader
from ..data.lengths import largest_token_id
from ..errors import InputError, name_hint, path_hint, short_repr
from .adapters import check_adapter_kind
from .config import ModelSection, has_tokenizer, is_local

logger = logging.getLogger(__name__)


def check_model(section: ModelSection) -> PreTrainedConfig:
    """The model's config. Raises InputError where model, adapter or the quantisation package is missing, and for an
    adapter in the model's place.
    """
    if section.quantization != "none" and importlib.util.find_spec("bitsandbytes") is None:
        raise InputError(f"quantization: {section.quantization} needs bitsandbytes: pip install bitsandbytes")
    if section.adapter:
        with as_input_error("adapter", section.adapter):
            check_adapter_kind(peft.PeftConfig.from_pretrained(section.adapter))
    name = section.name_or_path
    if (Path(name) / "adapter_config.json").is_file() and not (Path(name) / "config.json").is_file():
        load_it = f"PeftModel.from_pretrained(base, {name!r}) (to train it further, with is_trainable=True)"
        raise InputError(f"{name} is an adapter: load its base model and pass {load_it} in its place")
    with as_input_error("model", name):
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=section.trust_remote_code)


def is_classifier(config: PreTrainedConfig) -> bool:
    """Is it the config of a model that gives a sequence scores, as a reward model, and has no head for tokens?"""
    return any("ForSequenceClassification" in name for name in config.architectures or ())


# ---- tokenizers


def load_tokenizer(section: ModelSection) -> PreTrainedTokenizerBase:
    """The tokenizer of `section`, with a pad token and its own chat template if given. Raises InputError for none."""
    # an adapter that is continued brings the tokenizer and the template that it was trained with
    own = Path(section.adapter or "")
    name = str(own) if section.adapter and has_tokenizer(own) else section.name_or_path
    with as_input_error("tokenizer", name):
        if section.images:
            tokenizer = attach_image_reader(load_processor(name, section))
        else:
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=section.trust_remote_code)
    # of a folder with config.json alone transformers makes an empty tokenizer
    if Path(name).is_dir() and not has_tokenizer(Path(name)):
        raise InputError(f"folder {name} has no tokenizer (tokenizer.json and tokenizer_config.json)")
    theirs = own / "chat_template.jinja"
    if section.chat_template or (section.adapter and theirs.is_file()):
        tokenizer.chat_template = Path(section.chat_template or theirs).read_text(encoding="utf-8")
    if reader := get_image_reader(tokenizer):
        reader.processor.chat_template = tokenizer.chat_template  # it is what is saved
    return with_pad_token(tokenizer)


def load_processor(name: str, section: ModelSection) -> Any:
    """The processor of a model that sees. Raises what from_pretrained does."""
    options = {"trust_remote_code": section.trust_remote_code}
    config = transformers.AutoConfig.from_pretrained(section.name_or_path, **options)
    known = getattr(transformers, PROCESSOR_MAPPING_NAMES.get(config.model_type, ""), None)
    if known is not None and not is_torchvision_available() and "video_processor" in known.get_attributes():
        made = without_video_processor(known).from_pretrained(name, **options)
        with suppress(OSError):  # it has none
            made.videos, _ = BaseVideoProcessor.get_video_processor_dict(name)
        return made
    return transformers.AutoProcessor.from_pretrained(name, **options)


@functools.cache
def without_video_processor(kind: Any) -> Any:
    """A class of processors whose part for videos is None: it wants torchvision even where no video is read."""

    class PicturesAlone(kind):
        """Its constructor is given None for that part, and has the attribute; what loads and saves it has not. The
        part's config is saved as it was read.
        """

        videos: dict[str, Any] | None = None

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            made = super().__new__(cls)
            if args or kwargs:
                vars(made)["get_attributes"] = kind.get_attributes
            return made

        def __reduce__(self) -> tuple:
            return _new_without_video_processor, (kind,), vars(self)

        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in kind.get_attributes() if name != "video_processor"]

        @classmethod
        def from_args_and_dict(cls, args: Sequence[Any], processor_dict: dict[str, Any], **kwargs: Any) -> Any:
            given = {name: value for name, value in processor_dict.items() if name != "video_processor"}
            return super().from_args_and_dict(args, given, **kwargs)

        def to_dict(self) -> dict[str, Any]:
            return super().to_dict() | ({"video_processor": self.videos} if self.videos else {})

        @property
        def video_processor(self) -> None:
            return None

        @video_processor.setter
        def video_processor(self, _: None) -> None:
            self.__dict__.pop("get_attributes")

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return argument and super().check_argument_for_proper_class(argument_name, argument)

        @classmethod
        def _get_arguments_from_pretrained(cls, *args: Any, **kwargs: Any) -> list[Any]:
            found = list(super()._get_arguments_from_pretrained(*args, **kwargs))
            found.insert(kind.get_attributes().index("video_processor"), None)
            return found

    PicturesAlone.__name__ = PicturesAlone.__qualname__ = kind.__name__
    return PicturesAlone


def _new_without_video_processor(kind: Any) -> Any:
    """A processor without videos that pickle gives its attributes."""
    return object.__new__(without_video_processor(kind))


def with_pad_token(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return the tokenizer itself, with a special turn end and a pad token.

    The pad token is an unused one of its vocabulary, its eos, or what ends a turn of its chat template. Raises
    InputError if there is none of them.
    """
    chat.mark_turn_end(tokenizer)
    # it may be a trained token, since the masks of this package come from lengths, never from the pad id
    if tokenizer.pad_token_id is None:
        spare = [token for token in tokenizer.get_added_vocab() if "pad" in token.lower()]
        tokenizer.pad_token = spare[0] if spare else tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        with suppress(InputError):
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(chat.turn_end_id(tokenizer))
    if tokenizer.pad_token_id is None:
        raise InputError(
            f"the tokenizer {tokenizer.name_or_path or ''} has neither a pad nor an eos token: name one in its"
            " tokenizer_config.json"
        )
    return tokenizer


def check_tokenizer_fits(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, name: str, *rows: Any) -> None:
    """Raises InputError if model `name` of this config lacks an id of the rows, or the tokenizer's bos, eos or pad.
    What that has besides does no harm: the one of Gemma 3 1B has a placeholder for pictures.
    """
    size = config.get_text_config().vocab_size
    used = [tokenizer.bos_token_id, tokenizer.eos_token_id]
    if max(tokenizer.get_vocab().values()) >= size:
        used += map(largest_token_id, rows)
    if (top := max(i for i in [*used, tokenizer.pad_token_id] if i is not None)) >= size:
        raise InputError(
            f"the tokenizer of {name} uses id {top} ({tokenizer.convert_ids_to_tokens(top)!r}), and the model has only "
            f"{size} tokens: model.resize_token_embeddings({top + 1} or more), or another tokenizer"
        )


def sampling_vocab_size(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> int:
    """Ids below this may be drawn: those behind them stand for no token of the tokenizer, or the model lacks them."""
    return min(max(tokenizer.get_vocab().values()) + 1, config.get_text_config().vocab_size)


def check_same_vocabulary(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> None:
    """Raises InputError unless both tokenizers map the same tokens to the same ids. The sizes of the models'
    vocabularies may differ, as padding does; equal sizes prove nothing.
    """
    ours, theirs = ({i: token for token, i in tokenizer.get_vocab().items()} for tokenizer in (student, teacher))
    if differing := sorted(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i)):
        i = differing[0]
        counts = f"{len(ours)} and {len(theirs)} ids, {len(differing)} differ"
        example = f"id {i} is {ours.get(i)!r} for the student, {theirs.get(i)!r} for the teacher"
        raise InputError(
            f"student and teacher have different vocabularies ({counts}; {example}): take one of the same, or"
            " set own_tokenizer: true of the teacher (teacher={'tokenizer': ...} in Python), so that texts are compared"
        )


# ---- models


def load_model(
    section: ModelSection,
    trainable: bool = True,
    device: torch.device | None = None,
    storage: torch.dtype = torch.uint8,
    options: dict[str, Any] | None = None,
) -> PreTrainedModel:
    """The model of `section`, frozen and in eval mode unless `trainable`; a new `lora` is left to the trainer.

    device: where it will run, by default a GPU if there is one. It decides the default dtype; quantised weights are
    placed there, others stay on CPU. storage: of 4-bit weights (`launch.quantised_storage`). options: further arguments
    of `from_pretrained`. `from_scratch` draws weights from torch's global generator. Raises InputError for a model that
    is not there, or that refuses an option.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = check_model(section)
    if is_classifier(config):
        raise InputError(f"model {section.name_or_path}: it is a sequence classifier, and writes no text")
    whole = trainable and section.lora is None and not section.adapter
    options = apply_config_options(config, options or {})
    kwargs = _auto_class_kwargs(section) | {"dtype": weights_dtype(section, config, whole, device)} | options
    name = section.name_or_path
    with as_unknown_option_error(name, config, options), as_input_error("model", name):
        if section.from_scratch:
            kwargs.pop("use_safetensors", None)
            with unsharded_initialization():
                model = _auto_class(section, config).from_config(config, **kwargs)
        else:
            kwargs["config"] = config
            # pickled weights can run code, as a model's own code can
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
                # on GPU such weights must be placed while they are loaded
                kwargs |= {} if device.type == "cpu" else {"device_map": {"": device}}
            # gpt-oss: transformers trains no such weights, and computes with them where kernels are there
            packed = (getattr(config, "quantization_config", None) or {}).get("quant_method") == "mxfp4"
            if packed and section.quantization == "none":
                kwargs["quantization_config"] = Mxfp4Config(dequantize=True)
            model = _auto_class(section, config).from_pretrained(section.name_or_path, **kwargs)
            if packed and section.quantization == "none":  # or plain weights would be saved as if they were packed
                vars(model).pop("_weight_conversions", None)
                for weight in model.parameters():
                    if weight.dtype == torch.bfloat16:  # transformers 5.20 leaves unpacked weights so
                        weight.data = weight.data.to(kwargs["dtype"])
    model = with_saved_adapter(model, section, trainable)
    return model if trainable else model.requires_grad_(False).eval()


def with_saved_adapter(model: Any, section: ModelSection, trainable: bool) -> Any:
    """Return the model with the adapter that its section names, or unchanged where it names none. The model may be on
    the meta device: the adapter's weights are read all the same. Raises InputError where the adapter does not fit.
    """
    if not section.adapter:
        return model
    without_memory = next(model.parameters()).is_meta
    options = {"is_trainable": trainable, "low_cpu_mem_usage": without_memory}
    try:
        with as_input_error("adapter", section.adapter):
            model = peft.PeftModel.from_pretrained(model, section.adapter, **options)
    except RuntimeError as error:
        if "size mismatch" not in str(error):
            raise
        first = str(error)[str(error).index("size mismatch") :].partition("\n")[0]
        raise InputError(f"adapter {section.adapter} does not fit {section.name_or_path}: {first}") from error
    base = Path(str(model.active_peft_config.base_model_name_or_path))
    here = Path(section.name_or_path)
    if base.name != here.name or (base.is_dir() and here.is_dir() and base.resolve() != here.resolve()):
        logger.warning("adapter %s was trained on %s, not on %s", section.adapter, base, section.name_or_path)
    _check_adapter_keys(model, section, without_memory)
    return model


def _check_adapter_keys(model: Any, section: ModelSection, without_memory: bool) -> None:
    """Raises InputError where PEFT has left out weights of an adapter's file, or found none for layers of the base: it
    warns of the one, and says nothing of the other.
    """
    options = {"torch_device": "cpu", "low_cpu_mem_usage": without_memory}
    found = model.load_adapter(section.adapter, model.active_adapter, **options)
    for names, one in ((found.unexpected_keys, "base"), (found.missing_keys, "adapter")):
        if names:
            what = f"the {one} lacks {len(names)} weights, {names[0]} first"
            raise InputError(f"adapter {section.adapter} was not trained on {section.name_or_path}: {what}")


def load_skeleton(section: ModelSection) -> PreTrainedModel:
    """The model of `section` without weights, on the meta device, with its generation config."""
    config = check_model(section)
    with as_input_error("model", section.name_or_path), unsharded_initialization(), torch.device("meta"):
        model = _auto_class(section, config).from_config(config, **_auto_class_kwargs(section))
    if own := load_generation_config(section):
        model.generation_config = own
    return model


def load_generation_config(section: ModelSection) -> transformers.GenerationConfig | None:
    """What `section` has saved of how it generates, if it has."""
    with suppress(OSError):
        return transformers.GenerationConfig.from_pretrained(section.name_or_path)
    return None


def _auto_class(section: ModelSection, config: PreTrainedConfig) -> Any:
    """The auto class of a section's model. Raises InputError where it is to see pictures and cannot."""
    if not section.images:
        if is_vision_only(config):
            sees = f"{section.name_or_path} ({config.model_type}) is a model that sees"
            raise InputError(f"{sees}: set images: true, or in Python pass its processor as processing_class")
        return transformers.AutoModelForCausalLM
    if not _supports_images(config):
        raise InputError(f"images: {section.name_or_path} ({config.model_type}) sees no pictures: set images: false")
    return transformers.AutoModelForImageTextToText


def _supports_images(config: PreTrainedConfig) -> bool:
    return type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def is_vision_only(config: PreTrainedConfig) -> bool:
    """Is a model there with its tower alone, so that it has a processor and no causal LM?"""
    return _supports_images(config) and type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING


def saved_with_vision(config: PreTrainedConfig) -> bool:
    """Return whether the weights are those of a vision-language model, by the class that has saved them.

    The config alone does not say it: that of Qwen3.5 belongs to a causal LM as well.
    """
    known: Any = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), ())
    classes = known if isinstance(known, tuple) else (known,)
    return any(each.__name__ in (config.architectures or ()) for each in classes)


_DONE_ANYWAY = ("low_cpu_mem_usage", "_fast_init")
"""Options of `from_pretrained` that older versions of transformers had, and that ask for what is always done now."""
_PASS_BOTH = "config and tokenizer would be read without it: load model and tokenizer with it and pass both"
_UNREAD = "transformers does not read it any more: leave it out"
_NOT_TAKEN = {
    "subfolder": _PASS_BOTH,
    "config": "pass the fields that differ, or the loaded model",
    "output_loading_info": "a trainer takes the model alone: leave it out",
    "state_dict": "pass the loaded model",
    "load_in_4bit": "pass quantization_config=BitsAndBytesConfig(load_in_4bit=True)",
    "load_in_8bit": "pass quantization_config=BitsAndBytesConfig(load_in_8bit=True)",
    "use_flash_attention_2": "pass attn_implementation='flash_attention_2'",
    **dict.fromkeys(("mirror", "from_tf", "from_flax", "offload_state_dict", "use_auth_token"), _UNREAD),
}
"""Options of `model_init_kwargs` that would be ignored or read in part only, and what to do instead."""
_OF_LOADER = (
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
"""Options that `from_pretrained` takes and does not name in its signature."""


def apply_model_init_kwargs(section: ModelSection, options: Mapping[str, Any], owner: str = "model_init_kwargs") -> dict[str, Any]:
    """Put TRL's `model_init_kwargs` into a section, and return those that it has no field for.

    owner: the option that holds them, for messages. Raises InputError for a dtype that does not exist, and for a
    revision other than main, which config and tokenizer would not be read from.
    """
    left = dict(options)
    if (revision := left.pop("revision", None)) not in (None, "main"):
        mend = f"download it (hf download {section.name_or_path} --revision {revision}), and give that folder"
        raise InputError(f"{owner}: revision={revision!r} cannot be loaded by name: {mend}")
    dtype = left.pop("dtype", left.pop("torch_dtype", None))
    if dtype is not None:
        section.dtype = str(dtype).removeprefix("torch.")  # type: ignore[assignment]
        if section.dtype not in (known := get_args(get_type_hints(ModelSection)["dtype"])):
            raise InputError(f"{owner}: dtype={dtype!r} is none of {', '.join(known)}")
    section.attn_implementation = left.pop("attn_implementation", None) or section.attn_implementation
    section.trust_remote_code = left.pop("trust_remote_code", section.trust_remote_code)
    for name in _DONE_ANYWAY:
        left.pop(name, None)
    if left.get("use_safetensors") is False and not section.trust_remote_code:
        problem = "trust_remote_code=True reads weights that are not safetensors"
        raise InputError(f"{owner}: use_safetensors=False: {problem}")
    usual = dict.fromkeys(_NOT_TAKEN, False)  # values that change nothing
    left = {name: value for name, value in left.items() if value not in (None, "") and value is not usual.get(name)}
    for name, problem in _NOT_TAKEN.items():
        if name in left:
            raise InputError(f"{owner}: {name}={short_repr(left[name])}: {problem}")
    return left


def apply_config_options(config: PreTrainedConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    """Write into the config the options that are fields of it, as transformers does, and return the others."""
    left = dict(options)
    text = config.get_text_config()
    for owner in (config, text):
        for name in [name for name in left if name != "quantization_config" and _is_settable_field(owner, name)]:
            value = left.pop(name)
            own = getattr(owner, name)
            if isinstance(own, PreTrainedConfig) and isinstance(value, Mapping):
                own.update(dict(value))
            else:
                setattr(owner, name, value)
    return left


def _is_settable_field(config: PreTrainedConfig, name: str) -> bool:
    """Return whether a config has a value of this name that can be set; methods and read-only properties cannot."""
    kind = getattr(type(config), name, None)
    read_only = isinstance(kind, property) and kind.fset is None
    return hasattr(config, name) and not read_only and not callable(getattr(config, name))


@contextmanager
def as_unknown_option_error(name_or_path: str, config: PreTrainedConfig, options: Mapping[str, Any]) -> Iterator[None]:
    """Turn the TypeError of an option that neither the loader nor the model reads into a line with the nearest one."""
    try:
        yield
    except TypeError as error:
        found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if found is None or found[1] not in options:
            raise
        loader = inspect.signature(PreTrainedModel.from_pretrained).parameters
        known = {*loader, *_OF_LOADER, *config.to_dict(), *config.get_text_config().to_dict()}
        close = name_hint(found[1], known, list_valid=False)
        problem = f"neither from_pretrained nor the config of {name_or_path} has {found[1]!r}"
        raise InputError(f"model_init_kwargs of {name_or_path}: {problem}{close}") from error


def _auto_class_kwargs(section: ModelSection) -> dict[str, Any]:
    """What from_pretrained and from_config are both given."""
    attention = {} if section.attn_implementation == "auto" else {"attn_implementation": section.attn_implementation}
    return {"trust_remote_code": section.trust_remote_code, **attention}


def weights_dtype(section: ModelSection, config: PreTrainedConfig, whole: bool, device: torch.device) -> torch.dtype:
    """What weights are loaded as. `default`: float32 where all are trained (`whole`), otherwise bfloat16 on GPU and
    float32 on CPU.
    """
    if section.dtype == "default":
        return torch.bfloat16 if device.type != "cpu" and not whole else torch.float32
    if section.dtype == "auto":
        return getattr(config.get_text_config(), "dtype", None) or torch.float32
    return getattr(torch, section.dtype)


@contextmanager
def unsharded_initialization() -> Iterator[None]:
    """Random weights are the same under every engine: ZeRO-3 must not cut them while they are drawn."""
    before = hf_deepspeed._hf_deepspeed_config_weak_ref
    hf_deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        hf_deepspeed._hf_deepspeed_config_weak_ref = before


@contextmanager
def as_input_error(what: str, name: str) -> Iterator[None]:
    """Turns what from_pretrained raises into one line that names the model, and its nearest folder if it is missing."""
    try:
        yield
    except Exception as error:
        # of broken files tokenizers raises Exception itself, and transformers KeyError
        known = OSError | ValueError | ImportError | LookupError | SafetensorError
        if not isinstance(error, known) and type(error) is not Exception:
            raise
        first = str(error).strip().partition("\n")[0].rstrip(".")
        first = f"its files lack {first}" if isinstance(error, LookupError) else first
        if (path := Path(name)).exists():
            raise InputError(f"{what} {name}: {first}") from error
        hub = f"; from the Hub: {first}"
        if is_local(name):
            hub = ""
        elif HF_HUB_OFFLINE:
            hub = ", and with HF_HUB_OFFLINE the hub is not asked"
        raise InputError(f"{what} {name}: no such folder{hub}{path_hint(path)}") from error
