"""Judges: functions, a small reward model, a teacher, and a server that answers badly."""

import copy
import itertools
import json
import random
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from models_for_tests import SMALL, tiny_model
from tokenizers_for_tests import CHATML, bos_tokenizer, byte_tokenizer, merging_tokenizer
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from hf_posttrain.errors import InputError
from hf_posttrain.generation import completions_client as http
from hf_posttrain.generation.completions_client import ServerError
from hf_posttrain.rounds.judges import make_judge
from hf_posttrain.rounds.judges.config import JudgeSection, expand_judge, judge_problems
from hf_posttrain.rounds.judges.models import RewardModel
from hf_posttrain.rounds.judges.question import Question, make_question
from hf_posttrain.rounds.judges.server import ServerJudge, pairs_to_compare, parse_verdict

CHAT = [{"role": "user", "content": "Say hi."}]


def judged(questions, tokenizer=None, **section):
    with make_judge(JudgeSection(**section), tokenizer) as judge:
        return judge.score(questions)


# ---- functions


def longer(prompts, completions, references):
    return [len(text) for text in completions]


def picky(prompts, completions, references):
    return [None if text == "a" else 1 for text in completions]


def forgetful(prompts, completions, references):
    pass


def short(prompts, completions, references):
    return [1.0] * (len(completions) - 1)


def broken(prompts, completions, references):
    return [1.0, float("nan")]


def narrow(prompts, completions):
    return [1.0] * len(completions)


def test_exact_match_compares_final_answers():
    questions = [Question("2+2=", ["4", "#### 4", "5"], "It is 4.\n#### 4"), Question("", ["7"], "7")]
    assert judged(questions) == [[1.0, 1.0, 0.0], [1.0]]
    with pytest.raises(InputError, match="rows with an answer"):
        judged([Question("2+2=", ["4"])])


def test_a_function_is_called_once_with_texts():
    questions = [Question(CHAT, ["a", "abc"]), Question(CHAT, [])]
    assert judged(questions, by="function", name="test_judges:longer") == [[1.0, 3.0], []]
    assert judged([Question(CHAT, ["a", "b"])], by="function", name="test_judges:picky") == [[None, 1.0]]  # abstains
    for name, said in {
        "forgetful": "returned None. It must return a finite number or None for each of 2 completions",
        "short": "returned 1 numbers. It must return a finite",
        "broken": "returned nan for 'b'. It must return a finite number",
        "narrow": "got an unexpected keyword argument 'references'. It must take",
    }.items():  # fmt: skip
        with pytest.raises(InputError, match=said):
            judged([Question(CHAT, ["a", "b"])], by="function", name=f"test_judges:{name}")
    with pytest.raises(InputError, match="nowhere"):
        judged(questions, by="function", name="nowhere:at_all")


def test_a_question_is_made_of_a_prepared_row():
    tokenizer = byte_tokenizer()
    row = {"prompt_ids": [257, 65], "completion_ids": [66, 258]}
    row["asked"] = json.dumps({"prompt": CHAT, "tools": [{"name": "t"}]})
    question = make_question(row, [[67, 68, 258], [69]], tokenizer, [258])
    assert (question.prompt, question.text, question.answers, question.reference) == (CHAT, "Say hi.", ["CD", "E"], "B")
    assert (question.stopped, question.template_options) == ([True, False], {"tools": [{"name": "t"}]})
    assert make_question(row | {"asked": '{"prompt": null}'}, [[67]], tokenizer, [258]).prompt == "A"
    assert make_question(row | {"label": False}, [[67]], tokenizer, [258]).reference is None


# ---- models


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    """A folder with a sequence classifier of one label, and the classifier."""
    folder = tmp_path_factory.mktemp("reward")
    torch.manual_seed(3)
    model = Qwen3ForSequenceClassification(Qwen3Config(**SMALL, num_labels=1)).float().eval()
    with torch.no_grad():
        model.score.weight.mul_(30)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder), model


def test_a_reward_model_reads_the_whole_conversation_in_its_own_template(reward_model):
    folder, model = reward_model
    answers = ["Hi", "Hello there, friend", "Go away"]
    questions = [Question(CHAT, answers), Question("2+2=", ["4"])]
    for size in (1, 16):
        scores, [plain] = judged(questions, by="model", name=folder, batch_size=size)
        tokenizer = byte_tokenizer()
        for answer, score in zip(answers, scores, strict=True):
            turns = [*CHAT, {"role": "assistant", "content": answer}]
            ids = tokenizer.apply_chat_template(turns, return_dict=True, return_tensors="pt")["input_ids"]
            assert score == pytest.approx(model(input_ids=ids).logits.item(), abs=1e-5)
        ids = tokenizer(f"2+2=4{tokenizer.eos_token}", return_tensors="pt")["input_ids"]
        assert plain == pytest.approx(model(input_ids=ids).logits.item(), abs=1e-5)
    assert len(set(scores)) == 3


def test_a_reward_model_that_was_trained_judges_as_it_was_taught(tmp_path):
    """Bradley-Terry on pairs of which the better answer has more of the letter a; asked about others."""
    draw, tokenizer, asked = random.Random(0), byte_tokenizer(), [{"role": "user", "content": "Go"}]
    torch.manual_seed(0)
    model = Qwen3ForSequenceClassification(Qwen3Config(**SMALL, num_labels=1)).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def text():
        return "".join(draw.choice("abcd") for _ in range(6))

    def rewards(answers):
        chats = [[*asked, {"role": "assistant", "content": answer}] for answer in answers]
        ids = tokenizer.apply_chat_template(chats, return_dict=True, return_tensors="pt", padding=True)
        return model(**ids).logits[:, 0]

    for _ in range(60):
        pairs = [sorted((text(), text()), key=lambda answer: answer.count("a")) for _ in range(32)]
        pairs = [(worse, better) for worse, better in pairs if worse.count("a") < better.count("a")]
        worse, better = map(rewards, zip(*pairs, strict=True))
        torch.nn.functional.softplus(worse - better).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    questions, hits = [Question(asked, [text() for _ in range(8)]) for _ in range(20)], []
    for question, scores in zip(questions, judged(questions, by="model", name=str(tmp_path)), strict=True):
        counts = [answer.count("a") for answer in question.answers]
        both = itertools.combinations(zip(counts, scores, strict=True), 2)
        hits += [(one > other) == (n > m) for (n, one), (m, other) in both if n != m]
    assert sum(hits) > 0.95 * len(hits) > 300


def test_a_model_with_several_labels_is_no_judge(tmp_path):
    Qwen3ForSequenceClassification(Qwen3Config(**SMALL, num_labels=2)).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"has 2 labels\. A reward model must have one label"):
        make_judge(JudgeSection("model", str(tmp_path)))


def test_a_model_of_another_kind_is_no_judge(teachers, reward_model):
    """What has no head for scores would be given a random one."""
    with pytest.raises(InputError, match=r"is Qwen3ForCausalLM\. A reward model must be a sequence classifier"):
        make_judge(JudgeSection("model", teachers[0]))
    with pytest.raises(InputError, match=r"is a sequence classifier\. A teacher must be a causal LM\. Set by: model"):
        make_judge(JudgeSection("teacher", reward_model[0]), byte_tokenizer())


def test_a_reward_model_sees_tools_and_reads_a_bos_once(tmp_path):
    said = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = bos_tokenizer("{{ bos_token }}{{ tools | length if tools else 0 }}" + said)
    judge = object.__new__(RewardModel)
    judge.tokenizer = tokenizer
    options = {"tools": [{"name": "t"}, {"name": "u"}]}
    [(_, chat), (_, plain)] = judge.tokens([Question(CHAT, ["a"], template_options=options), Question("<s>p", ["b"])])
    assert tokenizer.decode(chat) == "<s>2Say hi.a"
    assert tokenizer.decode(plain) == "<s>pb</s>"  # an answer that ended


def test_a_broken_reward_model_is_told(reward_model, tmp_path):
    _, model = reward_model
    broken = copy.deepcopy(model)
    torch.nn.init.constant_(broken.score.weight, float("nan"))
    broken.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(InputError, match="gives the score nan"):
        judged([Question("p", ["a"])], by="model", name=str(tmp_path))


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """Folders of a model with the student's tokenizer, and with another."""
    found = []
    for name, tokenizer in (("same", byte_tokenizer()), ("other", merging_tokenizer(CHATML))):
        folder = tmp_path_factory.mktemp(name)
        tiny_model(seed=5, vocab_size=600).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        found.append(str(folder))
    return found


def mean_logp(model, prompt, answer):
    """Of the answer's tokens behind the prompt, slowly."""
    with torch.no_grad():
        logps = model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0].log_softmax(-1)
    return logps[len(prompt) - 1 : -1].gather(1, torch.tensor(answer)[:, None]).mean().item()


def test_a_teacher_scores_the_tokens_that_were_sampled(teachers):
    model, prompt, answers = tiny_model(seed=5, vocab_size=600), [257, 70, 71], [[72, 73, 258], [74], [75, 76]]
    question = Question("FG", ["HI", "J", "KL"], prompt_ids=prompt, answer_ids=answers)
    expected = [mean_logp(model, prompt, ids) for ids in answers]
    for size in (1, 16):
        [scores] = judged([question], byte_tokenizer(), by="teacher", name=teachers[0], batch_size=size)
        assert scores == pytest.approx(expected, abs=1e-5)


def test_a_teacher_with_other_tokens_reads_texts_in_its_own_template(teachers):
    model, tokenizer = tiny_model(seed=5, vocab_size=600), merging_tokenizer(CHATML)
    question = Question(CHAT, ["Hi", ""], prompt_ids=[1, 2], answer_ids=[[3], [4]])
    [[score, empty]] = judged([question], byte_tokenizer(), by="teacher", name=teachers[1])
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert score == pytest.approx(mean_logp(model, prompt, [*tokenizer("Hi")["input_ids"], tokenizer.eos_token_id]))
    assert empty is None
    # an answer that was cut has no end to score
    cut = Question(CHAT, ["Hi"], stopped=[False])
    [[score]] = judged([cut], byte_tokenizer(), by="teacher", name=teachers[1])
    assert score == pytest.approx(mean_logp(model, prompt, tokenizer("Hi")["input_ids"]))


# ---- a server


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send(200, {"data": [{"id": "judge-7b"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((body, self.headers.get("Authorization")))
        refused = self.server.refuse(body)
        status, content = refused or self.server.answer(body["messages"][0]["content"])
        self.send(status, {"choices": [{"message": {"content": content}}]} if status == 200 else content)

    def send(self, status, content):
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args):
        pass


@contextmanager
def serving(answer):
    """A server with OpenAI's protocol that answers as `answer(text)` -> (status, content) says."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.answer, server.asked, server.daemon_threads = answer, [], True
    server.refuse = lambda body: None
    server.handle_error = lambda *_: None  # whoever asked has left
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def shown(text):
    """The two answers of a question, in order."""
    first = text.partition("[Answer 1]\n")[2].partition("\n\n[Answer 2]\n")
    return first[0], first[2].partition("\n\nReply")[0]


def by_length(text):
    """The longer one is better."""
    first, second = shown(text)
    return 200, f'I think {{"better": {1 if len(first) > len(second) else 2}}}'


def test_a_key_goes_to_no_server_that_others_can_read_of(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    urls = ("http://judge.example", "https://judge.example", "http://localhost:8000")
    headers = [ServerJudge(JudgeSection("url", url)).server.pool.headers for url in urls]
    assert headers == [{}, {"Authorization": "Bearer secret"}, {"Authorization": "Bearer secret"}]


def test_a_model_with_one_temperature_is_asked_without(monkeypatch):
    refused = (400, {"error": {"message": "Unsupported value: 'temperature' does not support 0"}})
    with serving(by_length) as server:
        server.refuse = lambda body: refused if "temperature" in body else None
        assert judged([Question("p", ["a", "ab"])], by="url", name=server.url) == [[0.0, 1.0]]


def test_answers_are_compared_in_both_orders(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with serving(by_length) as server:
        [scores] = judged([Question(CHAT, ["a", "abc", "ab"], "Hi")], by="url", name=server.url)
    assert scores == [0.0, 1.0, 0.5]
    assert len(server.asked) == 6  # three pairs, twice
    assert {key for _, key in server.asked} == {"Bearer secret"}
    assert {body["model"] for body, _ in server.asked} == {"judge-7b"}
    text = server.asked[0][0]["messages"][0]["content"]
    assert "Say hi." in text
    assert "[The right answer]\nHi\n" in text


def test_a_judge_that_favours_a_place_says_nothing():
    with serving(lambda text: (200, '{"better": 1}')) as server:
        assert judged([Question("p", ["a", "b"])], by="url", name=server.url) == [[0.5, 0.5]]


def test_equal_answers_are_not_compared():
    with serving(by_length) as server:
        assert judged([Question("p", ["a", "a"])], by="url", name=server.url) == [[0.5, 0.5]]
        assert not server.asked


def test_an_own_question_and_model():
    with serving(lambda text: (200, '{"better": 2}' if text == "p? a | b" else '{"better": 1}')) as server:
        section = {"question": "{{ prompt }}? {{ first }} | {{ second }}", "served_model": "other"}
        assert judged([Question("p", ["a", "b"])], by="url", name=server.url, **section) == [[0.0, 1.0]]
        assert server.asked[0][0]["model"] == "other"


def test_wrong_json_is_asked_once_more_and_then_left_out(caplog):
    def odd(text):  # of pairs with a bad answer it never says anything of the form
        return (200, "no idea, {better: perhaps}") if "bad" in shown(text) else by_length(text)

    with serving(odd) as server:
        [scores] = judged([Question("p", ["a", "ab", "bad"])], by="url", name=server.url)
    assert scores == [0.0, 1.0, None]
    assert len(server.asked) == 2 + 4 * 2
    assert "2 of 3 comparisons were not made" in caplog.text


def test_a_refusal_or_a_slow_answer_is_no_comparison():
    def odd(text):
        if "slow" in shown(text):
            time.sleep(1.5)
        return (400, {"error": {"message": "too long"}}) if "bad" in shown(text) else by_length(text)

    questions = [Question("p", ["a", "ab"]), Question("p", ["bad", "ab"]), Question("p", ["slow", "ab"])]
    with serving(odd) as server:
        found = judged(questions, by="url", name=server.url, timeout=0.3)
    assert found == [[0.0, 1.0], [None, None], [None, None]]
    with serving(odd) as server, pytest.raises(ServerError, match=r"took too long.*\. Raise timeout"):
        judged([Question("p", ["slow", "ab"]) for _ in range(3)], by="url", name=server.url, timeout=0.2)


def test_a_server_that_judges_nothing_ends_in_a_line():
    with serving(lambda text: (200, "as an AI")) as server, pytest.raises(ServerError) as caught:
        judged([Question("p", ["a", "b"]) for _ in range(3)], by="url", name=server.url)
    assert "made no comparison of the answers to 3 prompts" in str(caught.value)
    assert "as an AI" in str(caught.value)
    with pytest.raises(ServerError, match="no server answers"):
        judged([Question("p", ["a", "b"])], by="url", name="http://127.0.0.1:9")


def test_prompts_that_a_server_refuses_do_not_end_it(caplog):
    """Nor a piece of nothing else, where others were judged; nor the first that is asked of after a resume."""
    refused, fine = [Question("p", ["bad", "ab", "bad"]) for _ in range(4)], Question("p", ["a", "ab"])
    odd = lambda text: (400, {"error": {"message": "filtered"}}) if "bad" in shown(text) else by_length(text)  # noqa: E731
    with serving(odd) as server:
        judge = make_judge(JudgeSection("url", server.url))
        for questions in (refused[:2], [fine], refused):
            found = judge.score(questions)
            assert found == [[0.0, 1.0] if question is fine else [0.5, None, 0.5] for question in questions]
        assert "8 of 8 comparisons were not made, the last: judge" in caplog.text
        with pytest.raises(ServerError, match="filtered"):
            make_judge(JudgeSection("url", server.url)).score(refused)


def test_a_server_that_is_gone_or_wants_another_key_ends_it(monkeypatch):
    """The latter at once, the former after completions_client.RETRIES; what was judged before is in its pieces."""
    monkeypatch.setattr(http, "RETRIES", http.RETRIES.new(total=2, backoff_factor=0.1))
    with serving(by_length) as server:
        server.refuse = lambda body: (401, {"error": {"message": "wrong key"}})
        with pytest.raises(ServerError, match=r"401 .*wrong key.*\. Set OPENAI_API_KEY to the key of the server"):
            judged([Question("p", [*map(str, range(40))])], by="url", name=server.url)
        assert len(server.asked) < 100  # of 160
        judge = make_judge(JudgeSection("url", server.url, served_model="m"))
    with pytest.raises(ServerError, match="no server answers"), judge:
        judge.score([Question("p", ["a", "b"])])


def test_a_question_that_cannot_be_rendered_is_said_in_a_line():
    with serving(by_length) as server, pytest.raises(InputError, match="judge: question: ZeroDivisionError: division"):
        judged([Question("p", ["a", "b"])], by="url", name=server.url, question="{{ first }} {{ second }} {{ 1 / 0 }}")


def test_each_answer_meets_as_many_others():
    for count in range(2, 9):
        for opponents in (1, 2, 4, 20):
            pairs = [*pairs_to_compare(["x"] * count, opponents)]
            assert len({*pairs}) == len(pairs)
            met = [sum(n in pair for pair in pairs) for n in range(count)]
            assert max(met) - min(met) <= 1
            assert min(met) >= min(opponents, count - 1)
    assert [*pairs_to_compare(["x"], 4)] == []


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        ('{"better": 1}', 1), ('First {"better": 2}, no: {"better": 0}.', 0), ('```json\n{"better": "2"}\n```', 2),
        ('{"better": 3}', None), ('{"worse": 1}', None), ("1", None), (None, None), ('{"better": null}', None),
    ],
)  # fmt: skip
def test_verdicts(said, verdict):
    assert parse_verdict(said) == verdict


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"by": "model"}, "name is missing. Set it to the folder or Hub name of a reward model"),
        ({"by": "exact_match", "name": "x"}, "name='x' is not valid with by: exact_match"),
        ({"by": "function", "name": "x"}, "'x' is not package.module:name"),
        ({"by": "function", "name": "localhost:8000"}, "For a server write http://localhost:8000"),
        ({"by": "url", "name": "localhost:8000"}, "must be a URL"),
        ({"by": "model", "name": "x", "question": "{{ first }} {{ second }}"}, "question is only valid with by: url"),
        ({"by": "url", "name": "http://x", "question": "{{ first }}"}, "must contain both"),
        ({"by": "url", "name": "http://x", "question": "{{ first }} {{ second }} {{ promt }}"}, "mean 'prompt'?"),
        ({"by": "model", "name": "x", "opponents": 2}, "opponents is only valid with by: url"),
        ({"by": "teacher", "name": "x", "timeout": 5.0}, "timeout is only valid with by: url"),
        ({"by": "url", "name": "http://x", "question": "{{ first }} {{ second"}, "the Jinja template is not valid"),
        ({"by": "url", "name": "http://x", "opponents": 0}, "must be at least 1"),
    ],
)
def test_sections_that_contradict_themselves(section, said):
    assert any(said in problem for _, problem in judge_problems(JudgeSection(**section)))


def test_short_forms():
    assert expand_judge("exact_match") == {"by": "exact_match"}
    assert expand_judge("mine:f") == {"by": "function", "name": "mine:f"}
    assert expand_judge(longer) == {"by": "function", "name": "test_judges:longer"}
    assert expand_judge("http://x:1") == {"by": "url", "name": "http://x:1"}
    assert expand_judge({"by": "model"}) == {"by": "model"}
