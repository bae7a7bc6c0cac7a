"""KD and OPD by a teacher with a tokenizer of its own: the losses of chunks by their definition."""

import collections
import math

import numpy as np
import pytest
import torch
from models_for_tests import tiny_model
from plain_for_tests import token_logps
from tokenizers_for_tests import byte_tokenizer, gpt2_tokenizer, llama2_tokenizer, settled
from training_for_tests import assert_same_step, fake_generate, fix_rollouts, one_step, trainer_for
from vllm_for_tests import Serving

from hf_posttrain.data.align import Aligner, shared_ids, token_bytes
from hf_posttrain.errors import InputError
from hf_posttrain.losses.divergence import forward_kl, reverse_kl
from hf_posttrain.models.config import TeacherSection
from hf_posttrain.teachers.cross_tokenizer import MIN_SHARED_MASS, CrossTokenizerTeacher, start_probability
from hf_posttrain.teachers.eos import MergedEOS

ROWS = [
    {"prompt": "Question: capital of France? ", "completion": "Answer: Paris"},
    {"prompt": "What is 42? ", "completion": "The answer is 42, not 7."},
    {"prompt": "two  spaces: ", "completion": "two  spaces\nlines"},
    {"prompt": "Say: ", "completion": "zzz QKQ the zz"},  # with tokens that stand alone in both
]
OTHERS = {"gpt2": gpt2_tokenizer, "llama": llama2_tokenizer}


@pytest.fixture(params=list(OTHERS))
def other(request, tmp_path):
    """(folder of the teacher's tokenizer, the tokenizer, the teacher)"""
    tokenizer = OTHERS[request.param]()
    tokenizer.save_pretrained(tmp_path / "other")
    teacher = tiny_model(seed=9, vocab_size=520, eos_token_id=tokenizer.eos_token_id)
    with torch.no_grad():  # mostly, but not everywhere, on tokens that both have
        shared = {*shared_ids(token_bytes(byte_tokenizer()), token_bytes(tokenizer))[1], tokenizer.eos_token_id}
        teacher.get_output_embeddings().weight[:] *= 1.6
        teacher.get_output_embeddings().weight[[n for n in range(520) if n not in shared]] = 0
    teacher.config.save_pretrained(tmp_path / "other")
    return str(tmp_path / "other"), tokenizer, teacher


counts = collections.Counter()
"""How many chunks of `by_definition` were compared in full."""


def tiny_student():
    """It hardly uses ids that its tokenizer lacks."""
    model = tiny_model()
    with torch.no_grad():
        model.get_output_embeddings().weight[259:] = 0
    return model


def expect_few_longer_tokens(teacher, tokenizer):
    """Make tokens that the student lacks unlikely where their first byte is even."""
    mine, theirs = {*token_bytes(byte_tokenizer()).values()}, token_bytes(tokenizer)
    bias = torch.zeros(520)
    bias[[token for token, spelt in theirs.items() if spelt not in mine and spelt[0] % 2 == 0]] = -12.0
    teacher.get_output_embeddings().bias = torch.nn.Parameter(bias)


def renormalised(logps, ids):
    return torch.log_softmax(logps[:, ids], -1)


def reached_by_definition(logps, ids, mine, theirs):
    """The probability that each token of the teacher begins where it does: of all ways to continue the text of the
    answer from each earlier place, by tokens that the student lacks, in float64 and token by token."""
    lacking = {token: spelt for token, spelt in theirs.items() if spelt not in {*mine.values()}}
    found = []
    for end in range(len(ids)):
        against = 0.0
        for start in reversed(range(end)):
            text = b"".join(theirs.get(token, b"?") for token in ids[start:end])
            longer = [token for token, spelt in lacking.items() if spelt.startswith(text) and spelt != text]
            if not longer:
                break
            path = sum(logps[place, ids[place]].double() for place in range(start, end))
            against += sum((logps[start, token].double() - path).exp() for token in longer)
        found.append(1 / (1 + against))
    return found


def by_definition(student, teacher, tokenizer, prompt, their_prompt, answer, function, on_data, kd_coef=None):
    """The summed loss of an answer, token by token, with a loop over chunks."""
    mine = byte_tokenizer()
    found = Aligner(mine, tokenizer, [258], tokenizer.eos_token_id)(answer)
    q, p = token_logps(student, prompt, answer), token_logps(teacher, their_prompt, found.ids).detach()
    own, theirs = q[range(len(answer)), answer], p[range(len(found.ids)), found.ids]
    shared, of_teacher = shared_ids(token_bytes(mine), token_bytes(tokenizer))
    shared, of_teacher = [*shared, 258], [*of_teacher, tokenizer.eos_token_id]
    total, gaps = 0.0, []
    probs = reached_by_definition(p, found.ids, token_bytes(mine), token_bytes(tokenizer))
    for chunk in range(found.count):
        a = [n for n, c in enumerate(found.chunks) if c == chunk]
        b = [n for n, c in enumerate(found.teacher_chunks) if c == chunk]
        gaps.append((own[a].sum() - theirs[b].sum()).detach())
    for chunk in range(found.count):
        a = [n for n, c in enumerate(found.chunks) if c == chunk]
        b = [n for n, c in enumerate(found.teacher_chunks) if c == chunk]
        masses = [q[n, shared].exp().sum() for n in a] + [probs[n] * p[n, of_teacher].exp().sum() for n in b]
        one_to_one = len(a) == len(b) == 1 and function is not None
        counts["left by what the teacher says"] += (
            one_to_one and min(masses) < MIN_SHARED_MASS and probs[b[0]] < MIN_SHARED_MASS
        )
        if one_to_one and min(masses) >= MIN_SHARED_MASS:
            counts["alone"] += 1
            counts["taken by what the teacher says"] += not settled(found)[chunk]
            total = total + function(renormalised(q[a], shared), renormalised(p[b], of_teacher)).sum()
        elif on_data:
            pair = [torch.stack([x, torch.log1p(-x.exp())])[None] for x in (own[a].sum(), theirs[b].sum())]
            total = total + function(*pair).sum()
        else:
            # what the chunk and those around it cost
            moving = sum(gaps[max(chunk - 1, 0) : chunk + 2]) * own[a].sum()
            total = total + (moving if function is None else moving + (gaps[chunk] - moving).detach())
    for n, chunk in enumerate(found.chunks):
        if chunk < 0 and not on_data:  # what the teacher cannot say
            gap = (own[n] + 14.0).detach()
            moving = gap * own[n]
            total = total + (moving if function is None else moving + (gap - moving).detach())
    if kd_coef is not None:
        total = kd_coef * total - (1 - kd_coef) * own.sum()
    return total


@pytest.mark.parametrize("loss_type", ["reverse_kl", "policy_gradient"])
def test_opd_by_its_definition(loss_type, other, tmp_path, monkeypatch):
    """Rollouts of random bytes and of words, each token's part summed by a loop."""
    folder, tokenizer, teacher = other
    words = [[*row["completion"].encode(), 258] for row in ROWS]

    def generate(model, prompts, *args, **kwargs):
        return [*words, *fake_generate(None, prompts[len(words) :], 30, [258])]

    fix_rollouts(monkeypatch)
    monkeypatch.setattr("hf_posttrain.generation.rollout.generate", generate)
    config = {"loss_type": loss_type, "per_device_train_batch_size": 8, "max_completion_length": 30, "max_length": 200,
              "teacher": {"tokenizer": folder}}  # fmt: skip
    counts.clear()
    rows, student = ROWS + ROWS, tiny_student()
    trainer = trainer_for("opd", tiny_student(), rows, tmp_path, second=teacher, **config)
    prepared = trainer.train_dataset
    loss, gradients = one_step("opd", student, rows, tmp_path, second=teacher, **config)
    answers = generate(None, prepared["prompt_ids"])
    total, count = 0.0, 0
    function = None if loss_type == "policy_gradient" else reverse_kl
    for row, answer in zip(prepared, answers, strict=True):
        assert row["teacher_prompt_ids"] == tokenizer(tokenizer_text(row))["input_ids"]
        given = row["prompt_ids"], row["teacher_prompt_ids"], answer
        total = total + by_definition(student, teacher, tokenizer, *given, function, on_data=False)
        count += len(answer)
    value = total / count
    value.backward()
    expected = {name: weight.grad for name, weight in student.named_parameters()}
    assert loss == pytest.approx(value.item(), rel=1e-4)
    assert_same_step((0.0, gradients), (0.0, expected), relative=1e-4)
    assert (counts["alone"] > 0) == (loss_type == "reverse_kl")


def tokenizer_text(row):
    return byte_tokenizer().decode(row["prompt_ids"])


def test_kd_by_its_definition(other, tmp_path):
    """Both parts, with gradients: chunks of several tokens by the divergence of two outcomes."""
    folder, tokenizer, teacher = other
    expect_few_longer_tokens(teacher, tokenizer)
    config = {"per_device_train_batch_size": 4, "teacher": {"tokenizer": folder}, "kd_coef": 0.7}
    trainer = trainer_for("kd", tiny_student(), ROWS, tmp_path, second=teacher, **config)
    student, prepared = tiny_student(), trainer.train_dataset
    counts.clear()
    step = one_step("kd", student, ROWS, tmp_path, second=teacher, **config)
    total, count = 0.0, 0
    for row in prepared:
        given = row["prompt_ids"], row["teacher_prompt_ids"], row["completion_ids"]
        total = total + by_definition(student, teacher, tokenizer, *given, forward_kl, True, kd_coef=0.7)
        count += len(row["completion_ids"])
    loss = total / count
    loss.backward()
    assert_same_step(step, (loss.item(), {n: w.grad for n, w in student.named_parameters()}), relative=1e-4)
    trainer.train()
    [log] = [log for log in trainer.state.log_history if "loss" in log]
    assert 0 < log["align/in_full"] < log["align/one_to_one"] < 1
    assert log["align/in_full"] == pytest.approx(counts["alone"] / count)
    assert counts["taken by what the teacher says"] > 0, counts
    assert counts["left by what the teacher says"] > 0, counts
    assert log["align/unaligned"] == 0


def test_the_probability_of_a_beginning_is_that_of_a_loop_in_float64():
    """Of places with longer tokens of up to four tokens, without any, and after a token of probability 0."""
    draw = torch.Generator().manual_seed(0)
    own = -8 * torch.rand(40, generator=draw)
    longer = -8 * torch.rand(40, 4, generator=draw)
    longer[torch.rand(40, 4, generator=draw) < 0.6] = -torch.inf
    own[17], longer[16:18, 0] = -torch.inf, torch.tensor([-torch.inf, -3.0])
    expected = []
    for place in range(40):
        path, against = torch.tensor(0.0, dtype=torch.float64), 0.0
        for depth in range(min(place, 4)):
            path = path + own[place - 1 - depth].double()
            if longer[place - 1 - depth, depth] > -torch.inf:
                against += (longer[place - 1 - depth, depth].double() - path).exp()
        expected.append(1 / (1 + torch.as_tensor(against, dtype=torch.float64)))
    found = start_probability(own, longer)
    assert found.tolist() == pytest.approx(torch.stack(expected).tolist(), rel=1e-5)
    assert 0 == found[18] < found.min() + 1e-9
    assert found[0] == 1.0
    assert start_probability(own, longer[:, :0]).tolist() == [1.0] * 40


@pytest.mark.parametrize("size", [-5.0, -20.0, -40.0, -95.0])
def test_a_token_that_longer_ones_compete_with_is_never_taken_for_certain(size):
    """However small both are: a longer token e^2 times as probable leaves 0.119."""
    teacher = CrossTokenizerTeacher.__new__(CrossTokenizerTeacher)
    teacher.teacher_only = torch.tensor([1, 2, 3])
    logps = torch.full((2, 6), -100.0)
    logps[:, 4], logps[:, 1], logps[:, 0], logps[:, 2] = math.log(0.6), math.log(0.4), size, size + 2
    longer = teacher.longer_logps(logps, torch.tensor([[[1, 2]], [[0, 0]]]))
    found = start_probability(torch.tensor([size, -0.1]), longer)[1].item()
    assert found == pytest.approx(0.1192, abs=1e-3) if size > -25 else found < 0.1192 + 1e-3


def test_longer_tokens_are_summed_as_in_a_loop_and_those_without_a_logit_have_no_probability():
    teacher = gpt2_tokenizer()
    teacher.add_tokens(["a longer one"])  # beyond the head
    aligner = Aligner(byte_tokenizer(), teacher, [258], teacher.eos_token_id)
    eos, ends = MergedEOS(torch.tensor([258])), [teacher.eos_token_id]
    across = CrossTokenizerTeacher(None, aligner, eos, ends, torch.device("cpu"))
    size, count = max(aligner.teacher_only), len(aligner.teacher_only)
    logps = torch.log_softmax(4 * torch.randn(3, size, generator=torch.Generator().manual_seed(0)), -1)
    ranges = torch.tensor([[[0, count], [2, 3]], [[0, 0], [5, 9]], [[count - 1, count], [0, 0]]])
    expected = torch.zeros(3, 2, dtype=torch.float64)
    for (row, depth), _ in np.ndenumerate(expected.numpy()):
        first, last = ranges[row, depth].tolist()
        tokens = [token for token in aligner.teacher_only[first:last] if token < size]
        expected[row, depth] = logps[row, tokens].double().exp().sum().log()
    torch.testing.assert_close(across.longer_logps(logps, ranges).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", ["opd", "kd"])
def test_equal_tokenizers_give_the_ordinary_loss_exactly(method, tmp_path, monkeypatch):
    fix_rollouts(monkeypatch)
    byte_tokenizer().save_pretrained(tmp_path / "same")
    config = {"max_length": 100} | ({"kd_coef": 0.5} if method == "kd" else {})
    plain = one_step(method, tiny_model(), ROWS, tmp_path, second=tiny_model(seed=9), **config)
    across = one_step(method, tiny_model(), ROWS, tmp_path, second=tiny_model(seed=9),
                      teacher={"tokenizer": str(tmp_path / "same")}, **config)  # fmt: skip
    assert across[0] == plain[0]
    assert all(torch.equal(gradient, plain[1][name]) for name, gradient in across[1].items())


@pytest.mark.parametrize("method", ["opd", "kd"])
def test_a_served_teacher_with_its_own_tokenizer_is_as_a_local_one(method, other, tmp_path, monkeypatch):
    """OPD by the policy gradient; KD by two outcomes for each chunk, where the local one has more for lone tokens."""
    folder, _, teacher = other
    fix_rollouts(monkeypatch)
    config = {"teacher": {"tokenizer": folder}, "max_length": 200} | (
        {"loss_type": "policy_gradient", "max_completion_length": 20} if method == "opd" else {})  # fmt: skip
    with Serving(teacher) as server:
        section = TeacherSection(url=server.url, name_or_path=folder)
        served = one_step(method, tiny_student(), ROWS, tmp_path, second=section, **config)
    local = one_step(method, tiny_student(), ROWS, tmp_path, second=teacher, **config)
    if method == "opd":
        assert_same_step(served, local, relative=1e-4)
    else:
        assert 0 < served[0] < local[0]


@pytest.mark.parametrize(
    ("method", "config", "message"),
    [
        (
            "opd",
            {"teacher": {"tokenizer": "x", "top_k": 5}},
            "teacher.top_k cannot be combined .* aligned with the student",
        ),
        (
            "opd",
            {"loss_type": "policy_gradient", "reward": {"function": "exact_match"}, "num_generations": 2},
            "reward cannot be combined with a teacher with its own tokenizer",
        ),
        ("opd", {"rollouts": "replay"}, "requires tokens that the current policy sampled"),
        ("opd", {"rollouts": "frozen"}, "requires tokens that the current policy sampled"),
        ("opd", {"teacher": {"names": "maths"}}, "teacher.names must be a list of texts or null, not 'maths'"),
        ("kd", {"teacher": {"names": [1]}}, r"teacher.names must be a list of texts or null, not \[1\]"),
        ("kd", {"temperature": 2.0}, "temperature=2 cannot be combined with a teacher with its own tokenizer"),
        ("kd", {"completion_only_loss": False}, "reads another text before the answer"),
        ("kd", {"teacher": {"names": ["a"], "tokenizer": {"a": "x"}}}, "several teachers cannot be combined"),
    ],
)
def test_contradictions_are_refused(method, config, message, tmp_path):
    config = {"teacher": {"tokenizer": "x"}} | config
    with pytest.raises(InputError, match=message):
        trainer_for(method, tiny_model(), ROWS, tmp_path, second=tiny_model(), **config)


def test_another_tokenizer_that_nobody_asked_for_is_refused(other, tmp_path):
    folder, _, teacher = other
    teacher.save_pretrained(folder)
    with pytest.raises(InputError, match="student and teacher have different vocabularies"):
        trainer_for("opd", tiny_model(), ROWS, tmp_path, second=folder, max_length=200)


@pytest.mark.parametrize("method", ["kd", "opd"])
def test_the_teacher_reads_each_batch_once(method, other, tmp_path, monkeypatch):
    folder, _, teacher = other
    fix_rollouts(monkeypatch)
    trainer = trainer_for(method, tiny_student(), ROWS, tmp_path, second=teacher, teacher={"tokenizer": folder},
                          max_length=200)  # fmt: skip
    trainer.check_scoring(trainer.model)
    calls = []
    teacher.get_input_embeddings().register_forward_hook(lambda *_: calls.append(1))
    monkeypatch.setattr(trainer, "check_scoring", lambda model: None)
    trainer.train()
    assert len(calls) == 1


@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
@pytest.mark.parametrize("method", ["kd", "opd"])
def test_a_student_may_have_more_tokens_than_its_teacher(method, layout, tmp_path, monkeypatch):
    """As a Gemma student of a SmolLM2 teacher: the student's ids are not the teacher's to read."""
    tokenizer = gpt2_tokenizer()
    byte_tokenizer().save_pretrained(tmp_path / "teacher")
    options = {"tokenizer": tokenizer, "teacher": {"tokenizer": str(tmp_path / "teacher")}, "layout": layout,
               "max_steps": 2,
               "learning_rate": 1e-3}  # fmt: skip
    options |= {"max_completion_length": 12} if method == "opd" else {}
    student, teacher = tiny_model(vocab_size=520), tiny_model(seed=9, vocab_size=260)
    rows = [row | {"completion": row["completion"] + " the end"} for row in ROWS]
    trainer = trainer_for(method, student, rows, tmp_path, second=teacher, **options)
    assert max(max(row["prompt_ids"]) for row in trainer.train_dataset) >= 260
    trainer.train()
    assert trainer.state.log_history[0]["loss"] > 0
    with pytest.raises(InputError, match="the tokenizer of Qwen3ForCausalLM uses id 258"):
        trainer_for(method, student, rows, tmp_path, second=tiny_model(seed=9, vocab_size=258), **options)
