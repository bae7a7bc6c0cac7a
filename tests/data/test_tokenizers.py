"""The hunt through tokenizers: prompt and completion are the text, and its tokens where none spans the boundary."""

import collections
import itertools

import pytest
import tokenizers_for_tests as tok
from rows_for_tests import raw_row
from test_data import prepare

from hf_posttrain.data import chat
from hf_posttrain.errors import InputError
from hf_posttrain.methods import METHODS

TOKENIZERS = {
    "bytes": tok.byte_tokenizer,
    "bytes, BOS by a post-processor": tok.bos_tokenizer,
    "bytes, BOS and EOS by a post-processor": lambda: tok.bos_tokenizer(add_eos=True),
    "characters with merges": tok.words_tokenizer,
    "byte BPE": tok.gpt2_tokenizer,
    "byte BPE, a space before": lambda: tok.gpt2_tokenizer(add_prefix_space=True),
    "sentencepiece, legacy": tok.llama2_tokenizer,
    "sentencepiece": lambda: tok.llama2_tokenizer(legacy=False),
    "sentencepiece without BOS": lambda: tok.llama2_tokenizer(bos=False),
    "sentencepiece without BOS, not legacy": lambda: tok.llama2_tokenizer(legacy=False, bos=False),
}
PROMPTS = ["Answer:", "Answer: ", "Answer:  ", "Answer:\n", "xa", "The answer is not", "2+2=", "é ",
           "東京", "a\t", "<"]  # fmt: skip
COMPLETIONS = ["Paris", " Paris", "  Paris", "#7", "42", "\nlines", "bcd", "é", " 京", ".", " ", "s",
               "|x", "\n\nx", "🎉 y"]  # fmt: skip


def compared(tokenizer, prompt, completion):
    """equal: the ids are those of the whole text; text: a token would span the boundary, and the text is the same."""
    end = chat.eos_id(tokenizer)
    [(left, right)] = chat.encode_pairs(tokenizer, [prompt], [completion], end)
    [whole], [alone] = chat.encode(tokenizer, [prompt + completion]), chat.encode(tokenizer, [prompt])
    assert left == alone  # what generation sees
    assert right.count(end) == 1
    assert right[-1] == end
    assert tokenizer.decode(left + right[:-1]) == tokenizer.decode(whole)
    return "equal" if left + right[:-1] == whole else "text"


def hunted(names, pairs):
    made = {name: TOKENIZERS[name]() for name in names}
    found = ((name, pair, compared(made[name], *pair)) for name, pair in itertools.product(names, pairs))
    return collections.Counter(result for _, _, result in found)


def test_prompt_and_completion_are_the_whole_text():
    counts = hunted(TOKENIZERS, list(itertools.product(PROMPTS, COMPLETIONS)))
    print(f"{counts.total()} texts, {len(TOKENIZERS)} tokenizers: {dict(counts)}, 0 wrong")
    assert counts.total() == len(TOKENIZERS) * len(PROMPTS) * len(COMPLETIONS)
    assert counts["equal"] > 5 * counts["text"] > 0


@pytest.mark.slow
def test_every_split_of_a_text_is_that_text():
    texts = ["Question: What is the capital of France? Answer: Paris", "two  spaces\n\nlines, é 東京 🎉 42."]
    splits = [(text[:n], text[n:]) for text in texts for n in range(1, len(text))]
    counts = hunted(TOKENIZERS, splits)
    print(f"{counts.total()} splits, {len(TOKENIZERS)} tokenizers: {dict(counts)}, 0 wrong")
    assert counts.total() == len(TOKENIZERS) * len(splits)


@pytest.mark.parametrize("legacy", [True, False])
def test_the_boundary_tells_nothing_of_which_answer_is_chosen(legacy):
    """No space that one answer of a pair gains and the other does not."""
    tokenizer = tok.llama2_tokenizer(legacy)
    prompt, answers = "Question: What is the capital of France? Answer: ", {"chosen": "Paris", "rejected": "#7"}
    made = prepare([{"prompt": prompt, **answers}], "dpo", tokenizer)[0]
    for column, text in answers.items():
        ids = made["prompt_ids"] + made[f"{column}_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == prompt + text


@pytest.mark.parametrize("method", METHODS)
def test_a_tokenizer_without_an_end_is_refused(method):
    with pytest.raises(InputError, match="the tokenizer has no eos_token, so a completion cannot be ended"):
        prepare([raw_row(METHODS[method].rows)], method, tok.llama2_tokenizer(eos=False))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_prompts_within_whole_texts_have_their_own_ids(name):
    """Rendered prompts end alike, after a special token; some end otherwise, and some do not merge alike."""
    tokenizer = TOKENIZERS[name]()
    special = tokenizer.convert_ids_to_tokens(sorted(chat.special_ids(tokenizer)))[-1]
    ends = [f"{special}assistant\n", f"{special}assistant\n ", special, f"{special}x{special} ", "", " "]
    texts = [
        (f"{begin}{special}{question}{end}", completion)
        for begin, question, end in itertools.product(["", "a "], PROMPTS[:6], ends)
        for completion in COMPLETIONS
    ]
    prompts = [prompt for prompt, _ in texts]
    encoded = chat.tokenize(tokenizer, [prompt + completion for prompt, completion in texts])
    assert [*chat.ids_of_prompts(tokenizer, prompts, encoded)] == chat.plain_ids(tokenizer, prompts)


def test_prompts_of_a_template_are_not_tokenized_again(monkeypatch):
    tokenizer = tok.byte_tokenizer()
    prompts = [f"<|im_start|>user\nquestion {n}<|im_end|>\n<|im_start|>assistant\n" for n in range(50)]
    encoded = chat.tokenize(tokenizer, [f"{prompt}answer" for prompt in prompts])
    tokenized = []
    tokenize = chat.tokenize
    monkeypatch.setattr(
        chat, "tokenize", lambda tokenizer, texts: tokenized.extend(texts) or tokenize(tokenizer, texts)
    )
    ids = [*chat.ids_of_prompts(tokenizer, prompts, encoded)]
    assert tokenized == prompts[:1]
    assert ids == chat.plain_ids(tokenizer, prompts)
