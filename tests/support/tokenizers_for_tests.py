"""Small tokenizers built in memory, and chat templates in the shapes that real models use.

    byte_tokenizer()    one token per UTF-8 byte (id = byte value), ChatML template, ends turns with <|im_end|>
    base_tokenizer()    the same, but eos == pad == <|endoftext|> as in a Qwen base model
    bos_tokenizer()     the same bytes, a post-processor that writes <s> first, and a Llama-3-like template
    words_tokenizer()   single characters and the merges "ab", "cd": merging across a boundary can be provoked
    llama2_tokenizer()  in the manner of sentencepiece: spaces are part of words, one is put before a text; <s> first
    gpt2_tokenizer()    byte BPE with merges, words split as GPT-2 does
    merging_tokenizer() the same with the special tokens and a template of `byte_tokenizer`, under other ids

Templates: CHATML, CHATML_GENERATION (with generation tags), QWEN3 (thinking), DEEPSEEK (prompt ends in <think>), LLAMA.
"""

import functools
import json

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_GENERATION = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3: the final assistant turn gets an empty think block, earlier ones do not; enable_thinking=False puts the
# block into the generation prompt as well.
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last and '<think>' not in m.content %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# As DeepSeek-R1: the generation prompt opens <think>, the history never shows it.
DEEPSEEK = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content.split('</think>')[-1] }}"
    "<|im_end|>{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if thinking is not defined or thinking %}<think>\n"
    "{% endif %}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n\n{{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)


def _byte_alphabet() -> list[str]:
    """The printable stand-in of each byte 0..255 in byte-level BPE (GPT-2's table)."""
    keep = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = iter(range(256, 512))
    return [chr(b) if b in keep else chr(next(shifted)) for b in range(256)]


def _byte_backend(vocab: dict[str, int], merges: list[tuple[str, str]], specials: list[str]) -> Tokenizer:
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(specials)
    return backend


def _wrap(backend: Tokenizer, chat_template: str | None, **special: str) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=1_000_000, **special)
    tokenizer.chat_template = chat_template
    return tokenizer


def _bytes_and(specials: list[str]) -> Tokenizer:
    return _byte_backend({c: i for i, c in enumerate(_byte_alphabet())}, [], specials)


def byte_tokenizer(chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """259 ids: byte b is id b; <|endoftext|> 256 (pad), <|im_start|> 257, <|im_end|> 258 (eos). No BOS."""
    backend = _bytes_and(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return _wrap(backend, chat_template, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def base_tokenizer(chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """As a Qwen base model: `byte_tokenizer` whose eos and pad are both <|endoftext|>; turns end with <|im_end|>."""
    backend = _bytes_and(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return _wrap(backend, chat_template, eos_token="<|endoftext|>", pad_token="<|endoftext|>")


def bos_tokenizer(chat_template: str | None = LLAMA, add_eos: bool = False) -> PreTrainedTokenizerFast:
    """<s> 256 (the tokenizer writes it first), </s> 257 (eos; last if `add_eos`), <|im_start|> 258, <|im_end|> 259."""
    backend = _bytes_and(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    single = "<s> $A </s>" if add_eos else "<s> $A"
    template = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 256), ("</s>", 257)])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return _wrap(backend, chat_template, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def words_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes 0..255, merges "ab" 256 and "cd" 257, </s> 258 (eos and pad). No template: plain strings only."""
    vocab = {c: i for i, c in enumerate(_byte_alphabet())} | {"ab": 256, "cd": 257}
    backend = _byte_backend(vocab, [("a", "b"), ("c", "d")], ["</s>"])
    return _wrap(backend, None, eos_token="</s>", pad_token="</s>")


_WORDS = ["Question: What is the capital of France? Answer: Paris", "The answer is 42, not 7.", "two  spaces\nlines"]


@functools.cache
def _trained_merges() -> dict:
    """Vocabulary and merges of a few words, with a token for each byte, a space being a part of the word behind it."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=["▁"], show_progress=False)
    tokenizer.train_from_iterator(_WORDS * 20, trainer)
    return json.loads(tokenizer.to_str())["model"]


def llama2_tokenizer(legacy: bool = True, bos: bool = True, eos: bool = True) -> PreTrainedTokenizerFast:
    """`legacy`: a space is put before every text, of which there is one between special tokens as well."""
    made = _trained_merges()
    merges = [tuple(merge) for merge in made["merges"]]
    backend = Tokenizer(models.BPE(made["vocab"], merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    if legacy:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    undone = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(undone)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    special = {"unk_token": "<unk>", "bos_token": "<s>", "pad_token": "<unk>"} | ({"eos_token": "</s>"} if eos else {})
    return _wrap(backend, None, **special)


def gpt2_tokenizer(add_prefix_space: bool = False) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet,
                                  show_progress=False)  # fmt: skip
    backend.train_from_iterator(_WORDS * 20, trainer)
    return _wrap(backend, None, eos_token="<|endoftext|>", bos_token="<|endoftext|>", pad_token="<|endoftext|>")


def merging_tokenizer(chat_template: str | None = QWEN3) -> PreTrainedTokenizerFast:
    tokenizer = gpt2_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.eos_token, tokenizer.chat_template = "<|im_end|>", chat_template
    return tokenizer


def settled(aligned):
    """Whether no token of the teacher's tokenizer alone could span the beginning of each chunk of an alignment."""
    first = {chunk: position for position, chunk in reversed([*enumerate(aligned.teacher_chunks)])}
    return [first[chunk] == 0 or not aligned.longer[first[chunk] - 1] for chunk in range(aligned.count)]
