"""What shared prompts bring where layers keep a state, and where prompts are pictures: python -m benchmarks.prompts

    hybrid    Qwen3.5 of 44 million weights, text: pairs of answers to prompts of 256 tokens
    pictures  Qwen3-VL of the same size: pairs of answers to a picture of 448 x 448 pixels and a short question

Both as DPO has them, forward and backward of the policy in float32: time of a step and bytes that the backward keeps,
by layout, and by how much the log-probability of an answer is another than in the padded layout. Layouts take turns;
the time is the median. Gradients are compared in tests/scoring/test_recurrent_segments.py and
tests/methods/test_pictures.py.
"""

import argparse
import statistics
import sys
import time
from typing import Any

import torch
import transformers
from PIL import Image
from torch import Tensor

from hf_posttrain.batching.micro_batch import MicroBatch
from hf_posttrain.check.saved_tensors import SavedTensorCounter
from hf_posttrain.data.images import ImageReader, to_stored_image
from hf_posttrain.models.load import without_video_processor
from hf_posttrain.scoring import forward
from hf_posttrain.scoring.attention_selection import choose_attention, row_multiple
from hf_posttrain.scoring.head import LogProb
from hf_posttrain.scoring.layouts import Branch, Example, collate
from hf_posttrain.scoring.vision_inputs import VisionInputs

tf: Any = transformers  # its classes come lazily

LAYOUTS = ("padded", "packed", "shared")
WIDTH = 512
SECTIONS = [12, 10, 10]  # of the language model, and of its rotary frequencies for time, height and width
TEXT: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 8,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32768,
    "max_position_embeddings": 4096,
}
PLACE = 5
END = 6  # token ids: of a picture's features, and of everything else that is special


def hybrid(answer: int) -> tuple[Any, list[Example], Any]:
    """(model, examples, None)."""
    linear = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64}
    config = tf.Qwen3_5TextConfig(**TEXT, **linear, linear_value_head_dim=64)
    draw = torch.Generator().manual_seed(0)
    ids = lambda count: torch.randint(10, 30000, (count,), generator=draw).tolist()  # noqa: E731
    rows = [Example(ids(256), [Branch(ids(answer)), Branch(ids(answer))]) for _ in range(4)]
    return tf.Qwen3_5ForCausalLM(config), rows, None


def pictures(answer: int) -> tuple[Any, list[Example], Any]:
    """(model, examples, `VisionInputs`)."""
    vision = {
        "depth": 6,
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_heads": 6,
        "out_hidden_size": WIDTH,
        "deepstack_visual_indexes": [2],
    }
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": SECTIONS, "mrope_interleaved": True}
    names = ("image", "video", "vision_start", "vision_end")
    special = {f"{name}_token_id": PLACE if name == "image" else END for name in names}
    config = tf.Qwen3VLConfig(text_config=TEXT | {"rope_parameters": rope}, vision_config=vision, **special)
    model = tf.Qwen3VLForConditionalGeneration(config)
    reader = ImageReader(_processor())
    picture = to_stored_image(Image.effect_noise((448, 448), 60).convert("RGB"))
    count = reader.count_features(reader.expansion(picture))
    rows = [
        Example([7, *[PLACE] * count, *range(20, 40)], [Branch([*range(50, 50 + answer)])] * 2, images=[picture])
        for _ in range(4)
    ]
    return model, rows, VisionInputs.from_model(model, reader)


def _processor() -> Any:
    from tokenizers import Tokenizer, models
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    words = {**{f"w{n}": n for n in range(50)}, "<|image_pad|>": PLACE}
    del words["w5"]
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))
    images = Qwen2VLImageProcessorPil(patch_size=16, size={"shortest_edge": 4096, "longest_edge": 448 * 448})
    return without_video_processor(tf.Qwen3VLProcessor)(images, tokenizer)


def step(model: Any, batch: MicroBatch) -> tuple[float, int, Tensor]:
    """(seconds, bytes that the forward kept for the backward, log-probability of each answer)."""
    kept = SavedTensorCounter(model.parameters())
    start = time.perf_counter()
    with kept.counting():
        values = forward.score(model, batch, LogProb(batch.targets)).value
    size = kept.bytes
    del kept  # what it holds goes as the backward does
    answers = batch.per_branch(values)
    answers.sum().backward()
    seconds = time.perf_counter() - start
    model.zero_grad()
    return seconds, size, answers.detach()


def main(words: list[str] | None = None) -> int:
    """Print a line for each; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prompts", description=__doc__.partition("\n")[0])
    parser.add_argument("--answer", type=int, default=48, help="tokens of each answer")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args(words)
    for case in (hybrid, pictures):
        torch.manual_seed(0)
        model, rows, seen = case(given.answer)
        model.train()
        forward.enable_scoring(model)
        choose_attention(model, torch.device("cpu"))
        batches = {
            name: collate(rows, name, row_multiple=row_multiple([model]), vision_inputs=seen) for name in LAYOUTS
        }
        found: dict[str, list[tuple[float, int, Tensor]]] = {name: [] for name in LAYOUTS}
        for _ in range(given.repeats + 1):  # the first of each is left out
            for name, batch in batches.items():
                found[name].append(step(model, batch))
        times = {name: statistics.median(seconds for seconds, *_ in each[1:]) for name, each in found.items()}
        for name, each in found.items():
            kept = each[-1][1] / 2**20
            apart = ((each[-1][2] - found["padded"][-1][2]) / found["padded"][-1][2]).abs().max()
            print(
                f"{case.__name__:9s} {name:7s} {times[name]:.3f} s, {times['padded'] / times[name]:.2f}x padded, "
                f"{kept:.0f} MiB kept, answers within {apart:.0e}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
