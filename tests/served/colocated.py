"""A training with vLLM's engine in this process, of the package that SITE has: python colocated.py SITE FOLDER KIND

Prints a line of JSON: how far log-probabilities were apart at each transfer, and those of each step's rollouts.
"""

import json
import logging
import os
import re
import sys

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": sys.argv[1],  # vLLM inspects the class of a model in another process
    "VLLM_CACHE_ROOT": f"{sys.argv[2]}/cache",  # it would find the class in a cache that a server has written
}  # fmt: skip
sys.path += [f"{os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}/support", sys.argv[1]]


class Kept(logging.Handler):
    """Messages of a logger."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def main(folder, kind):
    import peft
    from served_for_tests import served_model
    from training_for_tests import LORA, token_rows, trainer_for

    kept, logger = Kept(), logging.getLogger("hf_posttrain")
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    trainer = trainer_for(
        "opd", served_model(seed=5, tie_word_embeddings=kind == "tied"), token_rows("opd", 24), folder,
        second=served_model(seed=9), sampler={"kind": "vllm_colocate", "check_steps": 1}, max_steps=4,
        learning_rate=3e-3, num_generations=2, max_length=64, temperature=0.8,
        peft_config=peft.LoraConfig(**LORA) if kind == "lora" else None,
    )  # fmt: skip
    trainer.train()
    apart = [float(found) for line in kept.lines for found in re.findall(r"differ by (\S+) at most", line)]
    steps = [log["sampling/logp_difference"] for log in trainer.state.log_history if "sampling/kl" in log]
    print(json.dumps({"transfers": apart, "rollouts": steps}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[2:])
    os._exit(0)  # vLLM's engine has threads that stay
