"""Rollouts: answers of the policy to prompts, and where they come from.

completion         a completion, a prompt with its completions, and the interface of a sampler
interface          what these modules use of a trainer
policy_sampler     samples with the model that trains
vllm               what both ways to sample with vLLM share
vllm_in_process    an engine of vLLM in each training process
vllm_server        a server that `vllm serve` started
prefetching        rollouts of the next window, sampled while this one trains
weight_sync        the policy's weights as vLLM takes them
source             rollouts of the current policy, and the interface of a source
replay             rollouts of the last optimizer steps
frozen             rollouts that are sampled once
batch, builder     the micro-batches of rollouts
reward             a grade of each rollout
options            options of sources, samplers, rewards and token weights, with the classes that they name
"""
