"""One text in two tokenizers' tokens: chunks, tokens that stand alone, and what has no counterpart."""

import random

import pytest
from tokenizers_for_tests import (
    base_tokenizer,
    byte_tokenizer,
    gpt2_tokenizer,
    llama2_tokenizer,
    settled,
    words_tokenizer,
)

from hf_posttrain.data.align import INCOMPLETE_CHARACTER, Aligner, decode_bytes, shared_ids, token_bytes
from hf_posttrain.errors import InputError

TOKENIZERS = {"byte": byte_tokenizer, "gpt2": gpt2_tokenizer, "llama": llama2_tokenizer}
PAIRS = [(one, other) for one in TOKENIZERS for other in TOKENIZERS if one != other]
TEXTS = ("abcd", "H\u00e9llo w\u00f6rld, 12+30=42 \u20ac", " a b  c\n\n", "\U0001f600 \u4f60\u597d!", "the cat sat")


def aligner(one, other):
    student, teacher = TOKENIZERS[one](), TOKENIZERS[other]()
    return Aligner(student, teacher, [student.eos_token_id], teacher.eos_token_id)


def texts_of(tokenizer, ids, chunks):
    """The bytes of each chunk."""
    found = {}
    names = token_bytes(tokenizer)
    for token, chunk in zip(ids, chunks, strict=True):
        if chunk >= 0:
            found[chunk] = found.get(chunk, b"") + names.get(token, b"")
    return found


@pytest.mark.parametrize(("one", "other"), PAIRS)
@pytest.mark.parametrize("text", TEXTS)
def test_each_chunk_has_the_same_bytes_in_both(one, other, text):
    """Of byte BPE and in the manner of sentencepiece: nothing of a text is left over, and the end is its own chunk."""
    both = aligner(one, other)
    prompt = both.student("a question:")["input_ids"]
    ids = both.student("a question:" + text)["input_ids"][len(prompt) :]
    found = both([*ids, both.student.eos_token_id])
    assert min(found.chunks + found.teacher_chunks) == 0
    assert found.chunks == sorted(found.chunks)
    assert found.teacher_chunks == sorted(found.teacher_chunks)
    assert {*found.chunks} == {*found.teacher_chunks} == {*range(found.count)}
    assert found.ids[-1] == both.teacher.eos_token_id
    mine = texts_of(both.student, ids, found.chunks[:-1])
    assert mine == texts_of(both.teacher, found.ids[:-1], found.teacher_chunks[:-1])
    assert b"".join(mine.values()).decode() == text


def test_by_hand():
    """Str|aw|berry against Straw|b|erry, in small: ab|c against a|bc, and a token that is the same in both."""
    student, teacher = words_tokenizer(), byte_tokenizer()
    both = Aligner(student, teacher, [student.eos_token_id], teacher.eos_token_id)
    ids = student("xabcd", add_special_tokens=False)["input_ids"]
    assert student.convert_ids_to_tokens(ids) == ["x", "ab", "cd"]
    found = both(ids)
    assert found.ids == list(b"xabcd")
    assert (found.chunks, found.teacher_chunks) == ([0, 1, 2], [0, 1, 1, 2, 2])
    assert found.match == [0, -1, -1]
    assert both.teacher_only == []
    assert settled(found) == [True] * 3
    found = Aligner(teacher, student, [258], 258)(list(b"axabcd"))
    assert student.convert_ids_to_tokens(found.ids) == ["a", "x", "ab", "cd"]
    assert found.chunks == [0, 1, 2, 2, 3, 3]
    assert found.match == [0, 1, -1, -1, -1, -1]
    assert settled(found) == [True, False, True, True]  # after a: it may have been ab


@pytest.mark.parametrize(("one", "other"), PAIRS)
@pytest.mark.parametrize("text", TEXTS)
def test_longer_tokens_are_all_that_the_student_lacks_and_that_span_an_end(one, other, text):
    """By a search of the whole vocabulary, from each token on back as far as there is one."""
    both = aligner(one, other)
    ids = both.teacher(text, add_special_tokens=False)["input_ids"] + [both.teacher_eos_id]
    lacking = {
        token: spelt for token, spelt in both.teacher_bytes.items() if spelt not in {*both.student_bytes.values()}
    }
    expected = [[] for _ in ids]
    for end in range(1, len(ids)):
        for start in reversed(range(end)):
            said = b"".join(both.teacher_bytes[token] for token in ids[start:end])
            longer = {token for token, spelt in lacking.items() if spelt.startswith(said) and len(spelt) > len(said)}
            if not longer:
                break
            expected[start].append(longer)
    assert [[{*both.teacher_only[first:last]} for first, last in ranges] for ranges in both.longer(ids)] == expected


def test_no_longer_token_spans_a_special_one():
    both = aligner("byte", "gpt2")
    [a] = both.teacher("a", add_special_tokens=False)["input_ids"]
    assert [len(ranges) for ranges in both.longer([a, a, both.teacher_eos_id, a, a])] == [1, 1, 0, 1, 0]


def test_random_tokens_are_aligned_as_they_were_sampled():
    """Not as the tokenizer would write their text; what is no text at all, or no whole character, has no chunk."""
    both, draw = aligner("gpt2", "llama"), random.Random(0)
    special = {both.student.eos_token_id}
    for _ in range(50):
        ids = [draw.randrange(250) for _ in range(12)]
        found = both(ids)
        text, cuts = decode_bytes(both.student_bytes, ids)
        assert len(found.chunks) == len(cuts) == 12
        whole = found.count == len({c for c in found.chunks if c >= 0})
        assert whole
        for chunk in range(found.count):
            assert chunk in found.teacher_chunks
        assert not special & {*ids} or -1 in found.chunks
        assert len(text) == max(0, *cuts)


def test_special_tokens_within_an_answer_have_no_chunk():
    both = aligner("byte", "gpt2")
    found = both([97, 257, 98, 258])
    assert found.chunks[1] == -1
    assert {found.chunks[0], found.chunks[2], found.chunks[3]} == {0, 1, 2}


def test_bytes_are_written_as_tokenizers_writes_them():
    from tokenizers import pre_tokenizers

    from hf_posttrain.data.align import _byte_characters

    assert {*_byte_characters()} == {*pre_tokenizers.ByteLevel.alphabet()}
    tokenizer = byte_tokenizer()
    every = "".join(map(chr, range(1, 1000)))
    ids = tokenizer(every, add_special_tokens=False)["input_ids"]
    assert b"".join(token_bytes(tokenizer)[i] for i in ids) == every.encode()


def test_shared_ids_stand_for_the_same_bytes():
    for one, other in PAIRS:
        student, teacher = TOKENIZERS[one](), TOKENIZERS[other]()
        spelt = [token_bytes(each) for each in (student, teacher)]
        mine, theirs = shared_ids(*spelt)
        assert len(mine) == len({*mine}) == len({*theirs}) >= 256
        assert all(spelt[0][a] == spelt[1][b] for a, b in zip(mine, theirs, strict=True))
    mine, theirs = shared_ids(token_bytes(byte_tokenizer()), token_bytes(base_tokenizer()))
    assert mine == theirs == [*range(256)]


# ---- what is no common text stays where it is


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_a_rollout_that_ends_within_a_character_is_aligned_up_to_there(one, other):
    both = aligner(one, other)
    ids = both.student("costs 42 \u20ac", add_special_tokens=False)["input_ids"]
    whole = both(ids)
    assert min(whole.chunks) == 0
    if (cut := ids[:-1]) and decode_bytes(both.student_bytes, cut)[0].endswith(
        b"42 \xe2\x82"
    ):  # the character is of several tokens
        found = both(cut)
        inside = found.chunks.count(INCOMPLETE_CHARACTER)
        assert 1 <= inside <= 2
        assert min(found.chunks[:-inside]) >= 0
        assert found.chunks[-inside:] == [INCOMPLETE_CHARACTER] * inside
        assert max(found.teacher_chunks) == max(found.chunks)
    ended = both([*cut, both.student.eos_token_id])  # there it stays, and is no text
    assert INCOMPLETE_CHARACTER not in ended.chunks
    assert ended.chunks[-1] == ended.count - 1


def test_a_text_that_a_tokenizer_reads_as_special_leaves_that_alone_out():
    both = aligner("byte", "llama")
    ids = list(b"before <s> after it")
    found = both(ids)
    left = [n for n, chunk in enumerate(found.chunks) if chunk < 0]
    assert bytes(ids[n] for n in left) in (b"<s>", b"<s> ", b" <s>", b" <s> ", b"")
    assert found.chunks[-1] == found.count - 1


def test_a_normalised_text_says_the_same():
    """e and an accent, which a teacher with NFC writes as one letter."""
    from tokenizers import normalizers

    student, teacher = byte_tokenizer(), gpt2_tokenizer()
    teacher.backend_tokenizer.normalizer = normalizers.NFC()
    both = Aligner(student, teacher, [258], teacher.eos_token_id)
    found = both([*"caf\u0065\u0301 at the end".encode(), 258])
    assert min(found.chunks) == 0
    assert min(found.teacher_chunks) == 0
    assert {*found.chunks} == {*found.teacher_chunks} == {*range(found.count)}
    assert found.count > 5


def test_special_tokens_in_the_midst_cost_no_more_than_themselves():
    both = aligner("byte", "llama")
    ids = [*b"one two", 257, *b" three four", 258]
    found = both(ids)
    assert [n for n, chunk in enumerate(found.chunks) if chunk < 0] == [7]


def test_wordpiece_is_refused():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[UNK]", "[PAD]", *"abcdefghijklmnopqrstuvwxyz0123456789+=", *(f"##{c}" for c in "abc0123456789+=")]
    backend = Tokenizer(models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    teacher = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]")
    with pytest.raises(InputError, match="cannot be aligned with another"):
        Aligner(byte_tokenizer(), teacher, [258], 1)
