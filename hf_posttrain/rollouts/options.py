"""Options of rollouts: source, sampler, reward, and weights of tokens. Importable without torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ..options import option
from ..trainer.limits import COUNT, MAX_FACTOR, POSITIVE_FRACTION, Limit, Problem
from ..trainer.option_group import OptionGroup, OptionKind


@dataclass(frozen=True)
class RolloutOptions(OptionKind):
    """The source of rollouts."""

    selector: ClassVar = "source"
    limits: ClassVar = {"train_max_tokens": COUNT}
    on_policy: ClassVar[bool] = False
    """Whether all rollouts are sampled from the current policy."""
    fixed: ClassVar[bool] = False
    """Whether the rollouts of a prompt never change, so that the sampler requires no new weights."""
    scored_once: ClassVar[bool] = False
    """Whether the source scores its rollouts with the teacher before training, as `teacher.precompute` asks."""

    train_max_tokens: int | dict[str, int] | None = option(
        None,
        "Largest number of tokens of a rollout that are sampled and trained, or {from, to, steps} for a number that "
        "grows linearly over the first steps. By default max_completion_length.",
    )


@dataclass(frozen=True)
class OnPolicyRollouts(RolloutOptions):
    """Rollouts sampled in every step from the current policy."""

    kind: ClassVar = "on_policy"
    implementation: ClassVar = "rollouts.source:OnPolicy"
    on_policy: ClassVar = True


@dataclass(frozen=True)
class FrozenRollouts(RolloutOptions):
    """Rollouts sampled once from the policy before training, and cached on disk."""

    kind: ClassVar = "frozen"
    implementation: ClassVar = "rollouts.frozen:Frozen"
    fixed: ClassVar = True
    scored_once: ClassVar = True


@dataclass(frozen=True)
class ReplayRollouts(RolloutOptions):
    """Rollouts of which some are sampled in every step, and others taken from earlier steps."""

    kind: ClassVar = "replay"
    implementation: ClassVar = "rollouts.replay:Replay"
    limits: ClassVar = RolloutOptions.limits | {"fresh_fraction": POSITIVE_FRACTION, "replay_steps": COUNT}

    fresh_fraction: float = option(0.25, "Share of the prompts of each step whose rollouts are sampled in that step.")
    replay_steps: int = option(16, "Number of past optimizer steps kept in the replay buffer.")


@dataclass(frozen=True)
class SamplerOptions(OptionKind):
    """The program that samples rollouts."""

    prefetch: ClassVar[bool] = False
    """Whether the rollouts of the next step are sampled while the current one trains."""


@dataclass(frozen=True)
class PolicySamplerOptions(SamplerOptions):
    """The model that is trained."""

    kind: ClassVar = "policy"
    implementation: ClassVar = "rollouts.policy_sampler:PolicySampler"
    limits: ClassVar = {"batch_size": COUNT}

    batch_size: int | None = option(
        None,
        "Largest number of rollouts in one generation call. By default all rollouts of a step, on a GPU as many as fit "
        "into its free memory. Random numbers depend on it. Set it to get the same rollouts on another GPU.",
    )


@dataclass(frozen=True)
class VLLMOptions(SamplerOptions):
    """A vLLM engine of either kind."""

    limits: ClassVar = {"check_steps": COUNT, "gpu_memory_utilization": POSITIVE_FRACTION}

    check_steps: int = option(
        20,
        "Number of transfers of weights between two comparisons of vLLM's log-probabilities with the student's. The "
        "first transfer is always checked.",
    )

    def fingerprint(self) -> dict[str, Any]:
        """Return the options that the results of a run depend on. Both kinds sample the same."""
        return {"kind": "vllm", "prefetch": self.prefetch}


@dataclass(frozen=True)
class VLLMColocateOptions(VLLMOptions):
    """A vLLM engine in each training process, on the GPU that it trains on."""

    kind: ClassVar = "vllm_colocate"
    implementation: ClassVar = "rollouts.vllm_in_process:VLLMInProcessSampler"

    gpu_memory_utilization: float = option(0.3, "Share of the GPU's memory that vLLM reserves.")


@dataclass(frozen=True)
class VLLMServerOptions(VLLMOptions):
    """A server that `vllm serve` started, for this run alone."""

    kind: ClassVar = "vllm_server"
    implementation: ClassVar = "rollouts.vllm_server:VLLMServerSampler"

    base_url: str = option(
        help="URL of the server, such as http://localhost:8000. The server must have access to output_dir.",
        kw_only=True,
    )
    prefetch: bool = option(  # type: ignore[misc]  # an option of this kind alone
        False, "Sample the rollouts of the next step while the current one trains, with weights that are one step old."
    )


@dataclass(frozen=True)
class RewardOptions(OptionKind):
    """A reward in addition to the teacher."""

    selector: ClassVar = ""
    limits: ClassVar = {"coef": Limit("must be above 0, and at most 1e6", above=0, at_most=MAX_FACTOR)}

    function: str = option(help="Function that grades a rollout: exact_match, or package.module:name.", kw_only=True)
    coef: float = option(1.0, "Factor of the grade when it is added to the advantage of each token.")


@dataclass(frozen=True)
class TokenWeightOptions(OptionKind):
    """A rule by which some tokens count more than others."""

    selector: ClassVar = "name"
    requires_advantage: ClassVar = False
    """Whether the rule weighs the advantage of the policy gradient, and no other loss."""


@dataclass(frozen=True)
class Cumulative(TokenWeightOptions):
    """Early tokens count more."""

    kind: ClassVar = "cumulative"
    limits: ClassVar = {"gain": Limit("must be above 0, and at most 100", above=0, at_most=100)}

    gain: float = option(0.5, "Additional weight of the first token.")


@dataclass(frozen=True)
class TopShare(TokenWeightOptions):
    """Only the tokens with the largest divergence count."""

    kind: ClassVar = "top_share"
    limits: ClassVar = {"share": POSITIVE_FRACTION}

    share: float = option(0.5, "Share of the tokens that count.")


@dataclass(frozen=True)
class Extremes(TokenWeightOptions):
    """Only the tokens with the largest and with the smallest advantage count."""

    kind: ClassVar = "extremes"
    limits: ClassVar = {"share": Limit("must be above 0, and at most 0.5", above=0, at_most=0.5)}

    share: float = option(0.25, "Share of the tokens that count, at each of the two ends.")


@dataclass(frozen=True)
class Bounded(TokenWeightOptions):
    """Tokens that both models find equally likely count little."""

    kind: ClassVar = "bounded"
    requires_advantage: ClassVar = True


@dataclass(frozen=True)
class Sign(TokenWeightOptions):
    """All tokens have an advantage of the same size."""

    kind: ClassVar = "sign"
    requires_advantage: ClassVar = True


ROLLOUTS = OptionGroup(OnPolicyRollouts, FrozenRollouts, ReplayRollouts)
SAMPLERS = OptionGroup(PolicySamplerOptions, VLLMColocateOptions, VLLMServerOptions)
REWARD = OptionGroup(RewardOptions, optional=True)
TOKEN_WEIGHTS = OptionGroup(Cumulative, TopShare, Extremes, Bounded, Sign, optional=True)


def sampler_problems(options: Any) -> Iterator[Problem]:
    """Yield the problems of the sampler of a Config or of the section `rounds`, whose groups are built."""
    sampler = options.sampler
    if not isinstance(sampler, VLLMOptions):
        return
    if isinstance(sampler, VLLMServerOptions) and not sampler.base_url.startswith(("http://", "https://")):
        problem = f"sampler.base_url={sampler.base_url!r} must be a URL such as http://localhost:8000"
        yield ("sampler.base_url", "sampler"), problem
    if not 0.01 <= options.temperature <= 2:
        problem = (
            f"temperature={options.temperature:g} must be from 0.01 to 2 for vLLM. Change it, or set sampler: policy"
        )
        yield ("temperature", "sampler"), problem


def uses_vllm(options: object) -> bool:
    """Return whether vLLM samples the rollouts of a Config, or the answers of the section `rounds`."""
    return isinstance(getattr(options, "sampler", None), VLLMOptions)
