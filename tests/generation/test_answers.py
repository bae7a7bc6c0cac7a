"""Final answers of solutions, their exact match, and which rows can be asked and graded."""

import time
from types import SimpleNamespace

import datasets
import pytest
from accelerate import Accelerator
from tokenizers_for_tests import byte_tokenizer

from hf_posttrain.errors import InputError
from hf_posttrain.generation.exact_match import ExactMatch, exact_match, prompts_with_answers
from hf_posttrain.generation.final_answer import final_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("A 12 pack costs 3 each, so the total is 36", "36"),
        ("Vitamin A 5 times, then an answer 2 lines long: 8", "8"),
        ("A: 7", "7"),
        ("Q: 1+1? A: 2\nQ: 2+2? A: 4", "4"),
        ("The answer is 12.", "12"),
        ("the answer is: -3, of 10", "-3"),
        ("The answer to 3 + 4 is 7", "7"),
        ("Answer: $1,200.00", "1200"),
        ("**Answer:** 5 of 6", "5"),
        ("The answer is **-$4.50** for 2", "-4.5"),
        ("ANSWER: 5 of 6", "5"),
        ("3 + 2 = 5\n#### 5", "5"),
        ("#### $1,000.0 in 2 years", "1000"),
        (r"\boxed{3} of 4", "3"),
        (r"\boxed{x}, the answer is 4", "x"),
        ("#### Paris", "paris"),
        ("Paris", "paris"),
        ("", ""),
        ("#### 12345678901", "12345678901"),
        ("#### 12345678902.0", "12345678902"),
        ("#### 0.10000000000000000000000000001", "0.10000000000000000000000000001"),
        ("#### 1e3", "1000"),
        ("The answer is .5", "0.5"),
        ("the price is $.50", "0.5"),
        ("#### 1e999999999", "Infinity"),
        ("#### New York.\nIt is", "new york"),
        ("#### 1 1/2 hours", "1.5"),
        ("#### 5x", "5x"),
        ("The answer is 3/4.", "0.75"),
        ("so it is -2/6", "-1/3"),
        ("the answer is 1/0", "1/0"),
        ("A: 12:30", "12:30"),
        ("the answer is 2^{10}", "2^10"),
        (r"so 5 \times 10^3", "5*10^3"),
        (r"The answer is \(5\).", "5"),
        (r"The answer is $\frac{\pi}{2}$.", r"\frac{π}{2}"),
        (r"\boxed{1\frac{3}{4}}", "1.75"),
        (r"\boxed{\frac{x+1}{2}}", r"\frac{x+1}{2}"),
        (r"\boxed{\$5{,}000}", "5000"),
        (r"\boxed{5\text{ km}}", "5"),
        (r"\boxed{90^{\circ}}", "90"),
        (r"\boxed{\text{(B)}}", "b"),
        (r"\boxed{(1,2)}", "(1,2)"),
        (r"\boxed{7} and then \boxed{8", "7"),
        ("The answer is 12 - 5 = 7 apples of 12", "7"),
        ("#### 12 - 5 = $7", "7"),
        ("#### x = 3 or x = 4", "x = 3 or x = 4"),
        (r"\boxed{a = 3, b = 4}", "a = 3, b = 4"),
        ("A: 3 * (2 + 2) = 3 * 4 = 12.", "12"),
        (r"\boxed{12 - 5 = 7}", "7"),
        (r"\boxed{x = \frac{1}{2}}", "0.5"),
        ("the answer is $x = 5$, as 6 - 1 = 5 says", "5"),
        (r"\boxed{y = 2x + 1}", "y = 2x + 1"),
        (r"\boxed{x + y = 3}", "x + y = 3"),
        ("the answer is 5 = 2 + 3", "5"),
        ("Yes.", "yes"),
        ("Yes, since 5 > 3", "3"),
        ("(B)", "b"),
        ("C) 12", "c"),
        ("3 May 2020", "3 may 2020"),
        ("the answer is <<5=5>>5.", "5"),
        ("The answer is therefore $7$", "7"),
        ("Answer:\nParis", "paris"),
        ("The answer is $2x+1$.", "2x+1"),
        ("The answer is 7. This answer is correct.", "7"),
        ("We know what the answer is, so 8", "8"),
        ("Answer: She sold 48/2 = 24. In all 72.", "72"),
        ("Answer: The Lord of the Rings", "the lord of the rings"),
    ],
)
def test_final_answer(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"so \boxed{\frac{3}{2}}", r"thus \boxed{\frac{1}{2}}"),
        (r"\boxed{5\sqrt{2}}", r"\boxed{3\sqrt{2}}"),
        (r"\boxed{\sqrt{\frac{1}{2}}}", r"\boxed{\frac{1}{2}}"),
        (r"\boxed{x^{2}+7}", r"\boxed{y^{3}+7}"),
        (r"\boxed{1\frac{1}{2}}", r"\boxed{\frac{11}{2}}"),
        ("at 12:30", "at 11:30"),
        ("The answer is 1 1/2", "The answer is 1 1/3"),
        ("the answer is √2", "the answer is 2"),
        ("#### New York", "#### New Jersey"),
        ("The answer is no, since 5 > 3", "The answer is yes, since 5 > 3"),
        ("(1, 2)", "(3, 2)"),
        ("#### [0, 1)", "#### [0, 1]"),
        (r"\boxed{1,2}", r"\boxed{12}"),
        ("#### 3, 4", "#### 3, 5"),
        ("The answer is 3 May 2020", "The answer is 4 May 2020"),
        ("Answer: 2020-05-03", "Answer: 2020-05-04"),
        ("#### 2 hours 30 minutes", "#### 2 hours 45 minutes"),
        ("the answer is 5 or x", "the answer is 5"),
        ("#### A, C", "#### A, B"),
        ("The answer is C. S. Lewis", "The answer is C"),
        ("#### Apollo 11", "#### Room 11"),
    ],
)
def test_other_answers_that_share_a_number_are_not_equal(one, other):
    assert final_answer(one) != final_answer(other)


ANSWERS = r"""7 | -3 | $1,200.00 | .5 | 1e3 | 50% | 3/4 | 1 1/2 | 12:30 | 2^{10} | 5 \times 10^3 | 1\frac{3}{4}
$\frac{\pi}{2}$ | 2\sqrt{3} | \frac{x+1}{2} | 5 km | 5km | 10 m/s | 5\text{ km} | 2 hours 30 minutes | 3, 4 | 5-10
12 - 5 = 7 | y = 2x + 1 | a = 3, b = 4 | 3+4i | (x + 1)(x - 2) | (1, 2) | [0, 1) | (-∞, 3] | (1,2) \cup (3,4) | \{1, 2\}
3 May 2020 | 3rd of May, 2020 | May 3, 2020 | 2020-05-03 | 3/5/2020 | yes | No | True | A | (B) | B) Paris | C. 12
\text{(D)} | Paris | New York | Paris, France | J. K. Rowling | St. Louis | "To be, or not to be" | the Eiffel Tower
Apollo 11 | O'Hara"""


@pytest.mark.parametrize("answer", [answer for line in ANSWERS.splitlines() for answer in line.split(" | ")])
def test_an_answer_is_the_same_behind_each_mark(answer):
    marked = (
        f"Of 9, the answer is {answer}.", f"#### {answer}", f"\\boxed{{{answer}}}", f"**Answer:** {answer}\n(of 9)",
        f"9. The answer is {answer}, since 5 > 3. So 5 it is.", f"A: {answer}",
    )  # fmt: skip
    assert len({*map(final_answer, marked)}) == 1
    assert final_answer(marked[0]) != "9"


@pytest.mark.parametrize("text", ["1,", "1/", r"\boxed{", "A: *", "$\\a", "1 1/1 ", "3 ", "A: 1 + ", "#### 1 = ",
    "A: a = 1 ", "answer is\n", "A: xx yy zz ", "(1,", "(1,2) ", "A: 1, ", '#### "', "1,22"])  # fmt: skip
def test_long_texts_take_no_time(text):
    began = time.perf_counter()
    final_answer(text * 5000)
    final_answer(text + 20000 * " ")
    final_answer(20000 * " " + text)
    assert time.perf_counter() - began < 1


def test_exact_match_is_the_share_of_equal_final_answers():
    predictions = ["so 36", "The answer is 12.", "A: 7", "none"]
    assert ExactMatch().compute(predictions=predictions, references=["#### 36", "12.0", "8", "5"]) == {
        "exact_match": 0.5
    }


def test_rows_that_can_be_asked_and_graded():
    pair = {"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4]}
    labelled = [{"prompt_ids": [1, 2], "completion_ids": [n], "label": n == 3} for n in (3, 4)]
    assert prompts_with_answers([pair]) == prompts_with_answers(labelled) == ([[1, 2]], [[3]])
    whole, prompt_only = {"prompt_ids": [1], "completion_ids": [2]}, {"prompt_ids": [1, 2], "completion_ids": []}
    for rows in ([whole], [prompt_only], labelled[1:], []):
        with pytest.raises(InputError, match="eval_exact_match requires eval rows with a prompt and an answer"):
            prompts_with_answers(rows)


def test_the_answer_of_the_data_is_the_first_turn_and_whole(caplog):
    """A conversation goes on behind its first answer; an answer that max_length has cut has no final answer."""
    tokenizer, rows = byte_tokenizer(), []
    end = tokenizer.eos_token_id
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    turns = [*encode("1"), end, *encode("3+4="), *encode("7"), end]
    for answer in (turns, encode("first 5, then"), [*encode("2"), end]):
        mask = [1] * 2 + [0] * 4 + [1] * 2 if len(answer) == 8 else [1] * len(answer)
        rows.append({"prompt_ids": encode("1+1="), "completion_ids": answer, "completion_mask": mask})
    trainer = SimpleNamespace(
        terminal_ids=[end], tokenizer=tokenizer, args=SimpleNamespace(eval_max_completion_length=4, eval_batch_size=4),
        accelerator=Accelerator(cpu=True), generate=lambda prompts, *_, **__: [[*encode("1"), end] for _ in prompts],
    )  # fmt: skip
    assert exact_match(trainer, datasets.Dataset.from_list(rows)) == 0.5
    pairs = [{"prompt_ids": row["prompt_ids"], "chosen_ids": row["completion_ids"]} for row in rows[::2]]
    assert exact_match(trainer, datasets.Dataset.from_list(pairs)) == 0.5
    assert "no right answer" not in caplog.text
    # rows without an answer, or with a wrong one, are asked nothing
    rows = [row | {"label": True} for row in rows]
    rows += [rows[0] | {"label": False}, rows[0] | {"completion_ids": [], "completion_mask": []}]
    assert exact_match(trainer, datasets.Dataset.from_list(rows)) == 0.5
    assert "1 of 4 rows have no correct answer, and are left out" in caplog.text
