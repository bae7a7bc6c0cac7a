"""Layouts of special tokens in the manner of tokenizers that people train, each as a folder with a tiny model.

LAYOUTS: name -> Layout. `write_layout(layout, folder)` writes config, generation config, weights and tokenizer. The
model answers every prompt of the layout with ANSWER, then with `end`, then with FURTHER, until it is stopped.
"""

# ruff: noqa: E501 (a template's lines are as long as they are)

import functools
import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers_for_tests as tok
import torch
import transformers as tf
from templates_for_tests import FAMILIES, _each
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

QUESTIONS, ANSWERS = ("What is 1?", "And 2?"), ("It's é 7.", "Yes , ok !")
ANSWER, FURTHER = "Yes", "no"
CHATML, LLAMA3, GEMMA, INST = (FAMILIES[name] for name in ("chatml", "llama3", "gemma3", "mistral"))


class Layout(NamedTuple):
    """The files of a tokenizer and a model, and what a server generates with them."""

    imitates: str
    template: str | None
    special: str  # special tokens in the order of their ids, apart by spaces
    said: str  # what a server generates for a turn: its text in place of {}, and the turn's end
    stops: str  # the tokens at which generation stops
    eos: str | None
    pad: str | None = None
    bos: str | None = None
    unk: str | None = None
    base: str = "bytes"  # the tokens of texts, a key of BASES
    last: str | None = None  # `said` of the last turn, where it differs
    generated: str | None = None  # what the model here writes, where it is not `said` of the last turn
    generation: str = ""  # the EOS tokens of generation_config.json
    config: str = ""  # those of config.json
    before: str = ""  # what the tokenizer itself writes before a text
    after: str = ""  # and after it
    settings: dict[str, Any] = {}  # further entries of tokenizer_config.json
    added: dict[str, dict] = {}  # options of added tokens, such as {"<|end|>": {"rstrip": True}}
    spare: int = 0  # ids of the model behind those of the tokenizer
    deserved: tuple[str, ...] = ()  # parts of the warnings that `data`, a check or training give
    refused: str = ""  # a part of the error that all of them give
    bos_not_served: bool = False  # the tokenizer writes a BOS that the template does not, which training adds
    old_files: bool = False  # the template and the list of special tokens as transformers 4 wrote them

    @property
    def writes(self) -> str:
        """What the model writes of a turn."""
        return self.generated or self.last or self.said

    @property
    def end(self) -> str:
        """The token that the model writes after an answer."""
        return self.writes.partition("{}")[2].strip() or str(self.eos)


# ---- tokens of texts


def _bytes(special: list[str]) -> Tokenizer:
    return tok._byte_backend({char: n for n, char in enumerate(tok._byte_alphabet())}, [], special)


def _special_first(special: list[str]) -> Tokenizer:
    """As Mistral's Tekken: the ids of texts begin behind those of special tokens."""
    vocabulary = {text: n for n, text in enumerate([*special, *tok._byte_alphabet()])}
    return tok._byte_backend(vocabulary, [], special)


@functools.cache
def _merged() -> str:
    return tok.gpt2_tokenizer().backend_tokenizer.to_str()


def _merges(special: list[str]) -> Tokenizer:
    """Byte BPE with words; <|endoftext|> has the first id."""
    backend = Tokenizer.from_str(_merged())
    backend.add_special_tokens(special)
    return backend


def _sentencepiece(special: list[str], legacy: bool = True) -> Tokenizer:
    backend = tok.llama2_tokenizer(legacy=legacy, bos=False).backend_tokenizer
    backend.add_special_tokens(special)
    return backend


@functools.cache
def _unigrams() -> str:
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    letters = [*map(chr, range(33, 127)), "é", "▁"]
    trainer = trainers.UnigramTrainer(vocab_size=160, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>",
                                      initial_alphabet=letters, show_progress=False)  # fmt: skip
    backend.train_from_iterator([*tok._WORDS, *QUESTIONS, "".join(letters)] * 20, trainer)
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    return backend.to_str()


def _unigram(special: list[str]) -> Tokenizer:
    """As T5's: words with a space before them, white space squeezed, no token for bytes."""
    backend = Tokenizer.from_str(_unigrams())
    backend.normalizer = normalizers.Replace(" {2,}", " ")
    backend.add_special_tokens(special)
    return backend


def _wordpiece(special: list[str]) -> Tokenizer:
    """As BERT's: letters of ASCII alone, and no white space."""
    letters = [chr(code) for code in range(33, 127)]
    texts = [*special, *letters, *(f"##{letter}" for letter in letters)]
    backend = Tokenizer(models.WordPiece({text: n for n, text in enumerate(texts)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(special)
    return backend


BASES = {
    "bytes": _bytes, "special first": _special_first, "merges": _merges, "sentencepiece": _sentencepiece,
    "sentencepiece, not legacy": functools.partial(_sentencepiece, legacy=False), "unigram": _unigram,
    "wordpiece": _wordpiece,
}  # fmt: skip


def tokenizer_of(layout: Layout) -> tf.PreTrainedTokenizerFast:
    """Return the tokenizer as `PreTrainedTokenizerFast` builds it."""
    named = {f"{name}_token": getattr(layout, name) for name in ("bos", "eos", "pad", "unk")}
    special = dict.fromkeys([*layout.special.split(), *(text for text in named.values() if text)])
    backend = BASES[layout.base]([text for text in special if text not in layout.added])
    for text, options in layout.added.items():
        backend.add_tokens([AddedToken(text, **options)])
    if layout.before or layout.after:
        texts = {text for text in (layout.before, layout.after) if text}
        single = f"{layout.before} $A {layout.after}".strip()
        numbers = [(text, backend.token_to_id(text)) for text in texts]
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=numbers)
    return tf.PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=100_000, **named)


# ---- folders


def write_layout(layout: Layout, folder: Path) -> None:
    """Write the files of a layout."""
    tokenizer = tokenizer_of(layout)
    tokenizer.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", **layout.settings}
    if layout.old_files:
        settings["chat_template"] = layout.template
        names = {name: text for name, text in settings.items() if name in ("bos_token", "eos_token", "pad_token")}
        (folder / "special_tokens_map.json").write_text(json.dumps(names))
    elif layout.template:
        (folder / "chat_template.jinja").write_text(layout.template)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    model = answering(layout, folder)
    model.generation_config = tf.GenerationConfig(eos_token_id=_ids(tokenizer, layout.generation))
    model.save_pretrained(folder)
    if not layout.generation:
        (folder / "generation_config.json").unlink()


def _ids(tokenizer: Any, texts: str) -> Any:
    """The ids of tokens as a config has them: a list, a number or None."""
    ids = tokenizer.convert_tokens_to_ids(texts.split())
    return ids if len(ids) > 1 else ids[0] if ids else None


def prompt_of(tokenizer: Any, turns: list[dict[str, str]] | str) -> str:
    """The prompt's text by transformers alone."""
    if isinstance(turns, str):
        return turns
    return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)


def answering(layout: Layout, folder: Path) -> tf.LlamaForCausalLM:
    """A model whose next token depends on the last one alone: see the top."""
    tokenizer = tf.AutoTokenizer.from_pretrained(folder)
    turns = [{"role": "user", "content": QUESTIONS[0]}] if layout.template else QUESTIONS[0]
    asked = prompt_of(tokenizer, turns)
    texts = asked, asked + layout.writes.format(ANSWER), FURTHER
    before, whole, further = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    chain = whole[len(before) - 1 :]
    chain += [token for token in further if token not in chain][:2]
    assert whole[: len(before)] == before, layout.imitates
    assert len({*chain}) == len(chain), (layout.imitates, tokenizer.convert_ids_to_tokens(chain))

    size = len(tokenizer) + layout.spare
    config = tf.LlamaConfig(
        vocab_size=size, hidden_size=64, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512, tie_word_embeddings=False,
        bos_token_id=None, pad_token_id=None,
        eos_token_id=_ids(tokenizer, layout.config or ("" if layout.refused else layout.eos or "")),
    )  # fmt: skip
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(config).float()
    with torch.no_grad():
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embedding.normal_()
        head.normal_(std=0.001)
        for last, following in itertools.pairwise(chain):
            if max(last, following) < size:
                head[following] += embedding[last] / 2
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    return model


# ---- the layouts


def _family(name: str, imitates: str, **changes: Any) -> Layout:
    """The layout of a family of templates with what its tokenizers have besides."""
    family = FAMILIES[name]
    own = {"template": family.template, "special": family.special, "said": family.said, "last": family.last}
    return Layout(imitates, **own | {"eos": family.eos, "bos": family.bos, "stops": family.eos} | changes)


_EOT = "<|endoftext|>"
_IM = f"{_EOT} <|im_start|> <|im_end|>"
_PHI = _each("<|{{ m.role }}|>\n{{ m.content }}<|end|>\n", "<|assistant|>\n").replace(
    "{% endif %}", "{% else %}{{ eos_token }}{% endif %}"
)
_ZEPHYR = FAMILIES["zephyr"].template
_FALCON = _each("{% if m.role == 'assistant' %}Falcon: {{ m.content }}{{ eos_token }}\n{% else %}User: {{ m.content }}\n"
                "{% endif %}", "Falcon:")  # fmt: skip
_NEMOTRON = _each("<extra_id_1>{{ m.role | capitalize }}\n{{ m.content }}\n", "<extra_id_1>Assistant\n",
                  "<extra_id_0>System\n\n")  # fmt: skip
_SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful AI.<|im_end|>\n{% endif %}"

LAYOUTS = {
    "smollm2": Layout(
        "SmolLM2: BOS is what opens a turn, EOS is PAD", _SYSTEM + CHATML.template, _IM, "{}<|im_end|>",
        "<|im_end|>", "<|im_end|>", "<|im_end|>", "<|im_start|>", _EOT, "merges"),
    "qwen2.5": _family(
        "qwen2.5", "Qwen2.5: no BOS, several EOS, a vocabulary that is padded", special=_IM, eos="<|im_end|>",
        pad=_EOT, stops=f"<|im_end|> {_EOT}", generation=f"<|im_end|> {_EOT}", spare=37, base="merges"),
    "qwen2.5 base": _family(
        "qwen2.5", "Qwen2.5, base: EOS is PAD and no turn ends with it", special=_IM, eos=_EOT, pad=_EOT,
        stops=f"<|im_end|> {_EOT}", generation=_EOT, spare=37),
    "qwen3": _family(
        "qwen3", "Qwen3: an empty thought in the last answer", special=_IM, pad=_EOT,
        stops=f"<|im_end|> {_EOT}", generation=f"<|im_end|> {_EOT}", spare=5, generated="{}<|im_end|>"),
    "llama3": Layout(
        "Llama 3.1: three EOS, no PAD, cleaned-up spaces, reserved tokens", LLAMA3.template,
        "<|begin_of_text|> <|end_of_text|> <|reserved_special_token_0|> <|start_header_id|> <|end_header_id|> "
        "<|eom_id|> <|eot_id|>", "{}<|eot_id|>", "<|eot_id|> <|end_of_text|> <|eom_id|>", "<|eot_id|>", None,
        "<|begin_of_text|>", generation="<|end_of_text|> <|eom_id|> <|eot_id|>",
        settings={"clean_up_tokenization_spaces": True}, before="<|begin_of_text|>"),
    "llama3.2, pad": Layout(
        "Llama 3.2 of Unsloth: a PAD of its own, EOS in config.json alone",
        LLAMA3.template,
        "<|begin_of_text|> <|end_of_text|> <|finetune_right_pad_id|> <|start_header_id|> <|end_header_id|> "
        "<|eom_id|> <|eot_id|>", "{}<|eot_id|>", "<|eot_id|> <|end_of_text|> <|eom_id|>", "<|eot_id|>",
        "<|finetune_right_pad_id|>", "<|begin_of_text|>", config="<|end_of_text|> <|eom_id|> <|eot_id|>"),
    "llama2": _family(
        "llama2", "Llama 2: bytes as a fallback, UNK, no PAD, BOS before each question", unk="<unk>",
        base="sentencepiece", before="<s>", generation="</s>", said=" {} </s>",
        generated=" {}</s>"),
    "mistral": _family(
        "mistral", "Mistral 7B v0.3: no PAD, [INST] as tokens", unk="<unk>", base="sentencepiece, not legacy",
        generation="</s>", before="<s>"),
    "mistral, pad is unk": _family(
        "mistral", "Mistral with PAD = UNK, as many fine-tunes", unk="<unk>", pad="<unk>", base="sentencepiece",
        generation="</s>", special=""),
    "tekken": _family(
        "mistral7", "Mistral Small: Tekken, whose special tokens have the first ids", unk="<unk>", pad="<pad>",
        base="special first", special="<unk> <s> </s> [INST] [/INST] <pad> [SYSTEM_PROMPT] [/SYSTEM_PROMPT]",
        generation="</s>", before="<s>"),
    "gemma2": _family(
        "gemma", "Gemma 2: tokenizer and template write the BOS; turns do not end with EOS", special=
        "<pad> <eos> <bos> <unk> <start_of_turn> <end_of_turn>", pad="<pad>", unk="<unk>",
        stops="<end_of_turn> <eos>", generation="<eos> <end_of_turn>", before="<bos>",
        base="special first"),
    "gemma1": _family(
        "gemma", "Gemma 1: tokens for turns, white space and markup that are not special", special=
        "<pad> <eos> <bos> <unk>", pad="<pad>", unk="<unk>", stops="<end_of_turn> <eos>", generation="<eos>",
        before="<bos>", base="special first", added={text: {"special": False, "normalized": False} for text in
        ("<start_of_turn>", "<end_of_turn>", "\n\n", "<table>")}),
    "gemma3": _family(
        "gemma3", "Gemma 3 1B: the tokenizer has a placeholder that the model lacks", special=
        "<pad> <eos> <bos> <unk> <start_of_turn> <end_of_turn>", pad="<pad>", unk="<unk>", spare=-1,
        added={"<image_soft_token>": {"special": True}}, stops="<end_of_turn> <eos>",
        generation="<eos> <end_of_turn>", before="<bos>"),
    "phi3": Layout(
        "Phi-3: EOS after the last turn's end, added tokens that swallow white space", _PHI, "",
        "{}<|end|>", f"<|end|> {_EOT} <|assistant|>", _EOT, _EOT, "<s>", "<unk>", "sentencepiece",
        added={_EOT: {"special": True}} | {text: {"special": True, "rstrip": True} for text in
               ("<|assistant|>", "<|system|>", "<|end|>", "<|user|>")},
        generation=f"{_EOT} <|assistant|> <|end|>"),
    "phi3, not special": Layout(
        "Phi-3 as first published: the end of a turn is not special, the EOS after the last one is", _PHI, "",
        "{}<|end|>", f"<|end|> {_EOT}", _EOT, _EOT, "<s>", "<unk>", "sentencepiece",
        added={_EOT: {"special": True}} | {text: {"special": False, "normalized": False} for text in
               ("<|assistant|>", "<|system|>", "<|end|>", "<|user|>")}, generation=_EOT),
    "phi4": _family(
        "phi4", "Phi-4: one token for BOS and UNK, another for PAD", special=f"{_IM} <|im_sep|> <|dummy_85|>",
        bos=_EOT, unk=_EOT, pad="<|dummy_85|>", stops=f"<|im_end|> {_EOT}", generation=f"{_EOT} <|im_end|>"),
    "gpt2": _family(
        "alpaca", "GPT-2 with a template of plain text: one token for BOS, EOS and UNK, no PAD", eos=_EOT, bos=_EOT,
        unk=_EOT, stops=_EOT, base="merges", last="{}" + _EOT, said="{}"),
    "gpt-neox": _family(
        "alpaca", "GPT-NeoX with a template of plain text: white space as added tokens", eos=_EOT, bos=_EOT, unk=_EOT,
        pad="<|padding|>", stops=_EOT, last="{}" + _EOT, said="{}",
        added={text: {"special": False} for text in ("\n\n", "  ")}),
    "one stop is not special": _family(
        "chatml", "a generation config with an EOS that is not special", special=_IM, pad=_EOT,
        stops="<|im_end|> <|call|>", generation="<|call|> <|im_end|>", added={"<|call|>": {"special": False}}),
    "olmo2": _family(
        "olmo2", "OLMo 2: one token for BOS, EOS and UNK, another for PAD", special=f"{_EOT} <|pad|>", unk=_EOT,
        pad="<|pad|>", base="merges", generation=_EOT),
    "falcon": Layout(
        "Falcon: speakers as plain text", _FALCON, ">>TITLE<< <|pad|>", " {}" + _EOT, _EOT, _EOT, "<|pad|>",
        base="merges", generation=_EOT),
    "deepseek3": _family(
        "deepseek3", "DeepSeek V3: bars of full width, EOS is PAD, tokens that are not special",
        special="<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜>", pad="<｜end▁of▁sentence｜>", before="<｜begin▁of▁sentence｜>",
        added={text: {"special": False, "normalized": False} for text in ("<｜User｜>", "<｜Assistant｜>")},
        generation="<｜end▁of▁sentence｜>"),
    "glm4": _family(
        "glm4", "GLM-4: the next header ends an answer, and EOS the last one", pad=_EOT, stops=
        f"{_EOT} <|user|> <|observation|>", generation=f"{_EOT} <|user|> <|observation|>", generated="{}<|user|>"),
    "command-r": _family(
        "cohere", "Command R: tokens for turns, PAD first", special="<PAD> <UNK> <|START|> <|USER|> <|CHATBOT|> "
        "<|SYSTEM|>", pad="<PAD>", unk="<UNK>", base="special first", generation="<|END|>",
        before="<BOS>"),
    "granite": _family(
        "granite", "Granite: one token for BOS, EOS, PAD and UNK", bos="<|end_of_text|>", pad="<|end_of_text|>",
        unk="<|end_of_text|>", generation="<|end_of_text|>"),
    "internlm2": _family(
        "chatml", "InternLM2: EOS is PAD, turns end otherwise, BOS by the template", special="<|im_start|> <|im_end|>",
        template="{{ bos_token }}" + CHATML.template, eos="</s>", pad="</s>", bos="<s>", unk="<unk>",
        base="sentencepiece", stops="<|im_end|> </s>", generation="</s> <|im_end|>"),
    "yi": _family(
        "chatml", "Yi: a BOS that is never written, PAD is UNK", special="<|im_start|> <|im_end|>",
        bos="<s>", pad="<unk>", unk="<unk>", base="sentencepiece, not legacy",
        settings={"add_bos_token": False, "add_eos_token": False}, generation="<|im_end|>"),
    "stablelm": _family(
        "zephyr", "StableLM 2: one token for BOS, EOS and PAD, which ends questions too", eos=_EOT, bos=_EOT, pad=_EOT,
        unk=_EOT, said="{}" + _EOT, base="merges", generation=_EOT, stops=_EOT),
    "zephyr": _family(
        "zephyr", "Zephyr: BOS by the tokenizer alone, EOS is PAD", bos="<s>", pad="</s>", unk="<unk>",
        base="sentencepiece, not legacy", before="<s>", bos_not_served=True, generation="</s>"),
    "vicuna": _family(
        "vicuna", "Vicuna: speakers as plain text, PAD is UNK", bos="<s>", pad="<unk>", unk="<unk>",
        base="sentencepiece", before="<s>", bos_not_served=True),
    "gpt-oss": _family(
        "gptoss", "gpt-oss: other ends for earlier answers, the last one and calls", pad=_EOT, special=
        f"<|startoftext|> {_EOT} <|start|> <|message|> <|channel|> <|end|> <|call|> <|return|>", bos="<|startoftext|>",
        stops=f"<|return|> {_EOT} <|call|>", generation=f"<|return|> {_EOT} <|call|>"),
    "nemotron": Layout(
        "Nemotron Mini: the next header ends an answer", _NEMOTRON, "<extra_id_0> <extra_id_1>", "{}",
        "</s> <extra_id_1>", "</s>", None, "<s>", "<unk>", "sentencepiece, not legacy", last="{}</s>",
        generation="</s> <extra_id_1>", generated="{}<extra_id_1>"),
    "hermes": _family(
        "chatml", "OpenHermes: the end of a turn is an added token that is not special", special="",
        eos="<|im_end|>", bos="<s>", unk="<unk>", pad="</s>", base="sentencepiece",
        added={text: {"special": False, "normalized": False} for text in ("<|im_end|>", "<|im_start|>")},
        before="<s>", bos_not_served=True, stops="<|im_end|>"),
    "end that is not special": _family(
        "chatml", "ChatML added to a base model by hand: tokens that are not special, EOS of the base", special=_EOT,
        eos=_EOT, pad=_EOT, stops=f"<|im_end|> {_EOT}", generation=_EOT,
        added={text: {"special": False, "normalized": True} for text in ("<|im_start|>", "<|im_end|>")}),
    "no eos": _family(
        "chatml", "a tokenizer without EOS, which the generation config has", special=_IM, eos=None, pad=_EOT,
        stops="<|im_end|>", generation="<|im_end|>"),
    "neither eos nor pad": _family(
        "chatml", "a tokenizer with neither EOS nor PAD", special=_IM, eos=None, stops="<|im_end|>",
        generation="<|im_end|>"),
    "pad is bos": _family(
        "chatml", "PAD is BOS", special=_IM + " <s>", template="{{ bos_token }}" + CHATML.template, bos="<s>",
        pad="<s>"),
    "unk is eos": _family(
        "chatml", "Qwen 1: one token for EOS, PAD and UNK; the template's end besides", special=_IM, eos=_EOT, pad=_EOT,
        unk=_EOT, stops=f"<|im_end|> {_EOT}", old_files=True),
    "t5": Layout(
        "T5-like: unigrams, an EOS that the tokenizer appends, PAD first, no template", None, "", "{}</s>", "</s>",
        "</s>", "<pad>", None, "<unk>", "unigram", after="</s>"),
    "opt": Layout(
        "OPT: BOS is EOS, written by the tokenizer before each text; no template", None, "</s> <pad>", "{}</s>",
        "</s>", "</s>", "<pad>", "</s>", "</s>", before="</s>"),
    "wordpiece": Layout(
        "BERT-like: no token for unknown letters, [CLS] before and [SEP] after each text",
        _each("{% if m.role == 'user' %}{{ m.content }} [SEP] {% else %}{{ m.content }} [EOS] {% endif %}", ""),
        "[PAD] [UNK] [CLS] [SEP] [EOS]", "{} [EOS]", "[EOS]", "[EOS]", "[PAD]", None, "[UNK]", "wordpiece",
        before="[CLS]", after="[SEP]", bos_not_served=True,
        deserved=("hold the unknown token",)),
    "kimi": _family(
        "kimi", "Kimi: special tokens as roles, PAD and EOS of their own", special="[BOS] [EOS] [PAD] [UNK] " +
        FAMILIES["kimi"].special, bos="[BOS]", eos="[EOS]", pad="[PAD]", unk="[UNK]", stops="<|im_end|> [EOS]",
        generation="<|im_end|>"),
    "exaone": _family(
        "exaone", "EXAONE: tokens that swallow white space on the left", special="[PAD] [BOS]", pad="[PAD]", bos="[BOS]",
        added={text: {"special": True, "lstrip": True} for text in ("[|system|]", "[|user|]", "[|assistant|]",
               "[|endofturn|]")}, generation="[|endofturn|]"),
    "lfm2": _family(
        "lfm2", "LFM2: tags around what assistants write, PAD of its own", special=f"<|pad|> {_IM}", pad="<|pad|>",
        before="<|startoftext|>", generation="<|im_end|>"),
    "token beyond the model": _family(
        "chatml", "tokens that were added without resizing the model", special=_IM, pad=_EOT, spare=-1,
        refused="resize_token_embeddings"),
    "pad beyond the model": _family(
        "chatml", "a PAD that was added without resizing the model", special=_IM + " [PAD]", pad="[PAD]", spare=-1,
        refused="resize_token_embeddings"),
}  # fmt: skip
