"""Registry of the training methods. The rest of the package reads all facts about a method from its `Method` here.

The algorithm of a method is in the module with its name, as a Config and a Trainer with `examples` and `losses`. The
base class `PostTrainer` implements `compute_loss` and `prediction_step` through `losses`. This module can be imported
without torch.
"""

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from ..data.row_schema import PREFERENCE, PROMPTS, REWARD_PAIRS, SUPERVISED, UNPAIRED
from ..rollouts.options import REWARD, ROLLOUTS, SAMPLERS, TOKEN_WEIGHTS, sampler_problems
from ..teachers.options import TEACHER
from ..trainer.limits import COEFFICIENT, COUNT, FRACTION, FRACTION_BELOW_ONE, POSITIVE
from ..trainer.method_spec import Method, Paper
from . import rules

if TYPE_CHECKING:
    from ..trainer.base import PostTrainer
    from ..trainer.config import PostTrainConfig

_PREFERENCE_SYMPTOMS = {
    "no_learning": "Raise train.learning_rate (model.lora requires about ten times that of full training), and leave"
    " model.dtype at its default, because weights that are stored in bf16 hardly change",
    "label_leak": "Check data.train for properties that reveal the label, such as the length, the template, missing end"
    " tokens, or one model that wrote all good answers and another that wrote all bad ones",
}

_ROWS = (
    Method(
        "sft",
        "supervised fine-tuning",
        SUPERVISED,
        "tokens",
        key_metrics={"mean_token_accuracy": "accuracy"},
        loss_papers={"dft": "wu2025generalization", "eaft": "diao2026entropy"},
        rules=(rules.sft_problems, rules.text_weight_problems),
        sequence_parallel=True,
    ),
    Method(
        "dpo",
        "direct preference optimization",
        PREFERENCE,
        "examples",
        second="reference",
        key_metrics={"rewards/accuracies": "accuracy", "rewards/margins": "margin"},
        paper=Paper(
            "rafailov2023direct",
            "2305.18290",
            2023,
            "Direct Preference Optimization: Your Language Model is Secretly a Reward Model",
            "Rafael Rafailov and Archit Sharma and Eric Mitchell and Stefano Ermon and Christopher D. Manning"
            " and Chelsea Finn",
        ),
        loss_papers={
            "ipo": "azar2023general",
            "ipo_sum": "azar2023general",
            "hinge": "zhao2023slic",
            "robust": "chowdhury2024provably",
            "exo_pair": "ji2024towards",
            "nca_pair": "chen2024noise",
            "bco_pair": "jung2024binary",
            "sigmoid_norm": "lambert2024tulu",
            "discopop": "lu2024discovering",
            "sppo_hard": "wu2024selfplay",
            "apo_zero": "doosterlinck2024anchored",
            "apo_down": "doosterlinck2024anchored",
            "simpo": "meng2024simpo",
            "orpo": "hong2024orpo",
        },
        limits={
            "label_smoothing": FRACTION_BELOW_ONE,
            "beta": POSITIVE,
            "nll_coef": COEFFICIENT,
            "simpo_gamma": COEFFICIENT,
            "discopop_tau": POSITIVE,
            "ld_alpha": FRACTION,
            "precompute_ref_batch_size": COUNT,
            "ref_model_mixup_alpha": FRACTION,
            "ref_model_sync_steps": COUNT,
        },
        rules=(
            rules.dpo_loss_problems,
            rules.dpo_smoothing_problems,
            rules.dpo_divergence_problems,
            rules.reference_sync_problems,
        ),
        symptoms=_PREFERENCE_SYMPTOMS
        | {
            "chosen_falling": "Set train.nll_coef (0.1 to 5), which keeps the chosen answers likely, and lower"
            " train.learning_rate",
        },
    ),
    Method(
        "kto",
        "Kahneman-Tversky optimization",
        UNPAIRED,
        "examples",
        second="reference",
        key_metrics={"rewards/margins": "margin", "kl": "KL"},
        paper=Paper(
            "ethayarajh2024kto",
            "2402.01306",
            2024,
            "KTO: Model Alignment as Prospect Theoretic Optimization",
            "Kawin Ethayarajh and Winnie Xu and Niklas Muennighoff and Dan Jurafsky and Douwe Kiela",
        ),
        loss_papers={"bco": "jung2024binary", "apo_zero_unpaired": "doosterlinck2024anchored"},
        limits={
            "beta": POSITIVE,
            "precompute_ref_batch_size": COUNT,
            "ref_model_mixup_alpha": FRACTION,
            "ref_model_sync_steps": COUNT,
        },
        rules=(rules.kto_problems, rules.reference_sync_problems),
        symptoms=_PREFERENCE_SYMPTOMS
        | {
            "chosen_falling": "Lower train.undesirable_weight, which reduces the probability of all answers, and"
            " train.learning_rate",
            "kl_zero": "Raise train.gradient_accumulation_steps or train.per_device_train_batch_size (the KL is the"
            " mean over an optimizer step), lower train.undesirable_weight, or set"
            " train.loss_type=apo_zero_unpaired, which does not use the KL",
        },
    ),
    Method(
        "cpo",
        "contrastive preference optimization",
        PREFERENCE,
        "examples",
        key_metrics={"rewards/accuracies": "accuracy", "rewards/margins": "margin"},
        paper=Paper(
            "xu2024contrastive",
            "2401.08417",
            2024,
            "Contrastive Preference Optimization: Pushing the Boundaries of LLM Performance in Machine Translation",
            "Haoran Xu and Amr Sharaf and Yunmo Chen and Weiting Tan and Lingfeng Shen and Benjamin Van Durme"
            " and Kenton Murray and Young Jin Kim",
        ),
        loss_papers={"hinge": "zhao2023slic", "ipo": "azar2023general", "simpo": "meng2024simpo"},
        limits={"beta": POSITIVE, "cpo_alpha": COEFFICIENT, "simpo_gamma": COEFFICIENT},
        rules=(rules.cpo_problems,),
        symptoms={"label_leak": _PREFERENCE_SYMPTOMS["label_leak"]},
    ),
    Method(
        "rm",
        "reward modeling",
        REWARD_PAIRS,
        "examples",
        key_metrics={"rewards/accuracies": "accuracy", "rewards/margins": "margin"},
        paper=Paper(
            "ouyang2022training",
            "2203.02155",
            2022,
            "Training Language Models to Follow Instructions with Human Feedback",
            "Long Ouyang and Jeff Wu and Xu Jiang and Diogo Almeida and Carroll L. Wainwright and Pamela Mishkin"
            " and Chong Zhang and Sandhini Agarwal and Katarina Slama and Alex Ray and others",
        ),
        limits={"center_rewards_coefficient": COEFFICIENT},
        symptoms={"label_leak": _PREFERENCE_SYMPTOMS["label_leak"]},
        head="score",
        initial_rate=1e-5,  # TRL's default of 1e-4 suits adapters
        class_prefix="Reward",
    ),
    Method(
        "kd",
        "knowledge distillation",
        SUPERVISED,
        "tokens",
        second="teacher",
        key_metrics={"distill/divergence": "divergence"},
        paper=Paper(
            "hinton2015distilling",
            "1503.02531",
            2015,
            "Distilling the Knowledge in a Neural Network",
            "Geoffrey Hinton and Oriol Vinyals and Jeff Dean",
        ),
        limits={"kd_coef": FRACTION, "temperature": POSITIVE, "entropy_threshold": COEFFICIENT},
        groups={"teacher": TEACHER},
        rules=(
            rules.kd_problems,
            rules.recorded_problems,
            rules.teacher_option_problems,
            rules.kd_tokenizer_problems,
            rules.text_weight_problems,
        ),
    ),
    Method(
        "opd",
        "on-policy distillation",
        PROMPTS,
        "tokens",
        second="teacher",
        key_metrics={"distill/reverse_kl": "reverse KL", "generation/length": "length"},
        paper=Paper(
            "agarwal2023onpolicy",
            "2306.13649",
            2023,
            "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes",
            "Rishabh Agarwal and Nino Vieillard and Yongchao Zhou and Piotr Stanczyk and Sabela Ramos"
            " and Matthieu Geist and Olivier Bachem",
        ),
        loss_papers={"policy_gradient": "gu2023minillm", "entropy_aware_kl": "jin2026entropy"},
        limits={
            "lmbda": FRACTION,
            "temperature": POSITIVE,
            "max_completion_length": COUNT,
            "num_generations": COUNT,
            "entropy_threshold": COEFFICIENT,
        },
        groups={
            "teacher": TEACHER,
            "rollouts": ROLLOUTS,
            "sampler": SAMPLERS,
            "reward": REWARD,
            "token_weights": TOKEN_WEIGHTS,
        },
        rules=(
            rules.opd_problems,
            rules.opd_token_problems,
            rules.opd_reward_problems,
            sampler_problems,
            rules.teacher_option_problems,
        ),
        symptoms={
            "clipped_rollouts": "Raise train.max_completion_length together with train.max_length, or train the student"
            " by SFT on finished answers first, so that it ends its answers",
            "empty_rollouts": "Check how the prompts end. They must not end with an end-of-turn token, and must include"
            " the opening of the answer (train.apply_chat_template, model.chat_template). If the problem began during"
            " the run, lower train.learning_rate",
            "no_eos": "Train the student by SFT first, or set the chat template whose end token its answers use"
            " (train.apply_chat_template, model.chat_template)",
        },
    ),
)
METHODS: dict[str, Method] = {method.name: method for method in _ROWS}  # by the value of `method` in a recipe


@cache
def papers() -> dict[str, Paper]:
    """Return the papers of papers.yaml by their BibTeX key."""
    entries = yaml.safe_load(Path(__file__).with_name("papers.yaml").read_text(encoding="utf-8"))
    return {key: Paper(key, **fields) for key, fields in entries.items()}


def config_class(method: Method) -> "type[PostTrainConfig]":
    """Return the Config of a method. Imports torch."""
    config: type[PostTrainConfig] = getattr(import_module(method.module), method.config_name)
    return config


def trainer_class(method: Method) -> "type[PostTrainer]":
    """Return the Trainer of a method. Imports torch."""
    trainer: type[PostTrainer] = getattr(import_module(method.module), method.trainer_name)
    return trainer
