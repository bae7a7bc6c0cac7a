"""Rollouts: completions of prompts by the policy, their sources and the programs that sample them.

completion         a completion, a prompt with its completions, and the interface of a sampler
interface          attributes of a trainer that this subpackage uses
policy_sampler     samples with the model that is trained
vllm               shared base of both vLLM samplers
vllm_in_process    a vLLM engine in each training process
vllm_server        a server that `vllm serve` started
prefetching        rollouts of the next window, sampled while the current one trains
weight_sync        weights of the policy in the format that vLLM loads
source             interface of a source of rollouts, and rollouts of the current policy
replay             rollouts of the last optimizer steps
frozen             rollouts that are sampled once
batch, builder     micro-batches of rollouts
reward             grades of rollouts
options            options of sources, samplers, rewards and token weights, with the classes that they name
"""
