"""Pictures of rows: every way to give one, where they stand, what is refused, and tokens that never lose a part."""

import base64
import io
import json
import shutil
from contextlib import suppress
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import ExifTags, Image
from training_for_tests import TABLE
from transformers.image_utils import load_image
from vision_for_tests import KINDS, TURN, family_of, pictures, processor_of

from hf_posttrain.data.images import (
    MARK,
    attach_image_reader,
    extract_images,
    get_image_reader,
    image_size,
    open_image,
    to_stored_image,
)
from hf_posttrain.data.prepare import prepare
from hf_posttrain.errors import InputError
from hf_posttrain.methods import config_class

PHOTO, LOGO = pictures()


def user(*parts):
    return {"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}


def said(text):
    return [{"role": "assistant", "content": text}]


def image(value=None, key="image"):
    return {"type": "image"} | ({} if value is None else {key: value})


def prepared(rows, method="sft", kind="qwen3_vl", tmp_path="out", **options):
    """The prepared rows, and the tokenizer."""
    tokenizer = attach_image_reader(processor_of(kind))
    config = config_class(TABLE[method])(output_dir=str(tmp_path), use_cpu=True, report_to="none", **options)
    made = rows if isinstance(rows, datasets.Dataset) else trainer_rows(rows)
    return prepare(made, TABLE[method], tokenizer, config, "train"), tokenizer


def trainer_rows(rows):
    from hf_posttrain.data.json_rows import from_rows

    return from_rows(rows)


def written(save):
    """The bytes that save(file) writes."""
    file = io.BytesIO()
    save(file)
    return file.getvalue()


PHOTO_HALF = Path(PHOTO).read_bytes()[: Path(PHOTO).stat().st_size // 2]


# ---- ways to give a picture


def ways():
    photo = Image.open(LOGO)
    data = Path(LOGO).read_bytes()
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    return {
        "path": {"images": [LOGO]}, "one path": {"image": LOGO}, "mapping": {"images": [{"path": LOGO, "bytes": None}]},
        "bytes": {"images": [{"bytes": data, "path": "x.png"}]}, "pil": {"images": [photo]}, "data url": {"image": url},
    }  # fmt: skip


@pytest.mark.parametrize("way", list(ways()))
def test_a_column_in_every_form(way):
    found, _ = prepared([{"messages": [user("What?"), *said("yes")]} | ways()[way]] * 2)
    expected, _ = prepared([{"messages": [user(image(LOGO), "What?"), *said("yes")]}] * 2)
    for name in ("prompt_ids", "completion_ids", "completion_mask"):
        assert found[name] == expected[name]
    assert open_image(found[0]["images"][0]).tobytes() == Image.open(LOGO).convert("RGB").tobytes()


@pytest.mark.parametrize("value", ["path", "pil", "bytes", "openai"])
def test_parts_of_a_content_in_every_form(value):
    data = Path(LOGO).read_bytes()
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    part = {
        "path": image(LOGO), "pil": image(Image.open(LOGO)), "bytes": image(data, "bytes"),
        "openai": {"type": "image_url", "image_url": {"url": url}},
    }[value]  # fmt: skip
    found, tokenizer = prepared([{"prompt": [user(part, "What?")], "completion": said("yes")}] * 2)
    text = tokenizer.decode(found[0]["prompt_ids"])
    reader = get_image_reader(tokenizer)
    assert text.count("<|image_pad|>") == reader.count_features(reader.expansion(to_stored_image(LOGO))) == 8
    assert len(found[0]["images"]) == 1


def test_a_data_set_with_an_image_feature():
    rows = {"messages": [[{"role": "user", "content": "What?"}, *said("yes")]] * 2, "image": [LOGO, PHOTO]}
    made = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    found, tokenizer = prepared(made)
    counts = [row["completion_ids"].count(get_image_reader(tokenizer).token_ids[0]) for row in found]
    assert counts == [8, 12]
    assert open_image(found[1]["images"][0]).size == (512, 600)


def test_places_in_a_text_and_the_beginning_without_any():
    rows = [
        {"messages": [{"role": "user", "content": "before <image> after"}, *said("yes")], "images": [LOGO]},
        {"messages": [{"role": "user", "content": "no place"}, *said("yes")], "images": [LOGO]},
        {"messages": [user("parts ", image(), " after"), *said("yes")], "images": [LOGO]},
    ]
    found, tokenizer = prepared(rows)
    texts = [tokenizer.decode(row["prompt_ids"] + row["completion_ids"]) for row in found]
    texts = [text.replace("<|image_pad|>" * 8, "*") for text in texts]
    place = "<|vision_start|>*<|vision_end|>"
    assert [text.split("user\n")[1].split("<|im_end|>")[0] for text in texts] == [
        f"before {place} after", f"{place}no place", f"parts {place} after"]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_processor(kind):
    """Several pictures among the text of several turns."""
    turns = [user(image(PHOTO), "What?", image(LOGO)), *said("a"), user("and ", image(LOGO)), *said("b")]
    found, tokenizer = prepared([{"messages": turns}] * 2, kind=kind)
    bare = [{"role": t["role"], "content": [{"type": p["type"]} if p["type"] == "image" else p for p in t["content"]]
             if isinstance(t["content"], list) else t["content"]} for t in turns]  # fmt: skip
    text = tokenizer.apply_chat_template(bare, tokenize=False)
    images = [Image.open(p).convert("RGB") for p in (PHOTO, LOGO, LOGO)]
    nested = images if kind.startswith("qwen") else [images]
    processor = get_image_reader(tokenizer).processor
    expected = processor(text=[text], images=nested, add_special_tokens=False)["input_ids"][0]
    ids = found[0]["prompt_ids"] + found[0]["completion_ids"]
    assert ids == expected[: len(ids)]
    assert len(expected) - len(ids) <= 1  # a line break behind the last turn
    features = {*get_image_reader(tokenizer).token_ids}
    assert all(not on for token, on in zip(found[0]["completion_ids"], found[0]["completion_mask"], strict=True)
               if token in features)  # fmt: skip
    assert sum(found[0]["completion_mask"]) > 10


def test_only_assistants_are_trained_around_pictures():
    turns = [user(image(LOGO), "What?"), *said("one"), user(image(PHOTO)), *said("two")]
    found, tokenizer = prepared([{"messages": turns}] * 2, assistant_only_loss=True)
    ids, mask = found[0]["completion_ids"], found[0]["completion_mask"]
    assert tokenizer.decode([i for i, on in zip(ids, mask, strict=True) if on]) == "one<|im_end|>two<|im_end|>"


@pytest.mark.parametrize("kind", KINDS)
def test_tags_of_a_template_are_kept_to_around_pictures(kind):
    """Of a template that writes more into an assistant's turn than it tags."""

    def trained(turns, template):
        tokenizer = attach_image_reader(processor_of(kind))
        tokenizer.chat_template = tokenizer.chat_template.replace("{% for m in messages %}", template)
        config = config_class(TABLE["sft"])(output_dir="out", use_cpu=True, report_to="none", train_on="assistant")
        [row] = prepare(trainer_rows([{"messages": turns}]), TABLE["sft"], tokenizer, config, "train")
        pairs = zip(row["completion_ids"], row["completion_mask"], strict=True)
        return tokenizer.decode([i for i, on in pairs if on]), len(row["images"])

    begin, end = map(str.strip, TURN[family_of(kind)])
    tagged = "{% for m in messages %}{% if m.role == 'assistant' %}" + begin + "assistant\nSKIP {% generation %}"
    tagged += "{{ m.content }}" + end + "{% endgeneration %}{% continue %}{% endif %}"
    turns = [user(image(LOGO), "What?"), *said("one"), user(image(PHOTO)), *said("two")]
    assert trained(turns, tagged) == (f"one{end}two{end}", 2)
    turns[1] = turns[1] | {"weight": 0}
    assert trained(turns, tagged) == (f"two{end}", 2)


def test_relative_paths_start_at_the_folder(tmp_path):
    shutil.copy(LOGO, tmp_path / "a.png")
    row = {"messages": [user(image("a.png"), "What?"), *said("yes")]}
    found, _ = prepared([row] * 2, image_folder=str(tmp_path))
    assert found[0]["images"][0]["path"] == str(tmp_path / "a.png")
    with pytest.raises(InputError, match=r"row 0: .*a.png: no such file \(relative paths start at the current folder"):
        prepared([row] * 2)


def test_a_placeholder_is_a_place_wherever_users_write_it():
    rows = [
        {"messages": [user("see <image> here"), *said("yes")], "images": [LOGO]},
        {"messages": [{"role": "user", "content": "see <image> here"}, *said("yes")], "images": [LOGO]},
        {"messages": [user("see ", image(LOGO), " here"), *said("yes")]},
    ]
    [one], [two], [three] = (prepared([row])[0] for row in rows)
    assert one == two == three
    alpaca = {"instruction": "What is it?", "input": "<image>", "output": "yes", "images": [LOGO]}
    [found], tokenizer = prepared([alpaca], apply_chat_template=True)
    assert "<image>" not in tokenizer.decode(found["prompt_ids"])
    assert len(found["images"]) == 1


def test_a_placeholder_in_an_answer_is_text():
    """Whatever the assistant is called; and a text that is an answer is no question."""
    for answer in ({"from": "gpt", "value": "<image>"}, {"from": "model", "value": "<image>"}, *said("<image>")):
        asked = {"from": "human", "value": "What?"} if "from" in answer else user("What?")
        [found], tokenizer = prepared([{"messages": [asked, answer], "images": [LOGO]}])
        assert "<image>" in tokenizer.decode(found["prompt_ids"] + found["completion_ids"])
        assert len(found["images"]) == 1
    [found], tokenizer = prepared([{"prompt": "Which tag?", "completion": "<image>"}], apply_chat_template=True)
    assert "<image>" in tokenizer.decode(found["completion_ids"])


def test_a_problem_names_its_picture_once():
    with pytest.raises(InputError) as caught:
        get_image_reader(attach_image_reader(processor_of("qwen3_vl"))).expansion({"path": __file__, "bytes": None})
    assert str(caught.value) == f"{__file__}: not an image that PIL can read"


def test_prepared_ids_come_with_their_pictures():
    rows, _ = prepared([{"prompt": [user(image(LOGO), "What?")], "completion": said("yes")}] * 2)
    columns = ("prompt_ids", "completion_ids", "images")
    again, _ = prepared([{name: row[name] for name in columns} for row in rows])
    assert [row["images"] for row in again] == [row["images"] for row in rows]
    assert again[0]["prompt_ids"] == rows[0]["prompt_ids"]


def test_photographs_stand_upright(tmp_path):
    """As transformers and `datasets` read those that a camera has marked as turned."""
    marks = Image.Exif()
    marks[ExifTags.Base.Orientation] = 6
    Image.open(LOGO).convert("RGB").resize((40, 20)).save(tmp_path / "a.jpg", exif=marks)
    picture = to_stored_image(str(tmp_path / "a.jpg"))
    assert image_size(picture) == open_image(picture).size == load_image(str(tmp_path / "a.jpg")).size == (20, 40)


# ---- what is refused


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [user(image("https://a.b/c.png")), *said("yes")]}, "images are not downloaded"),
        ({"messages": [user(image(__file__)), *said("yes")]}, "not an image that PIL can read"),
        ({"messages": [user("What?"), *said("yes")], "images": [7]}, "expected an image"),
        ({"messages": [user(image(), image()), *said("yes")], "images": [LOGO]},
         "2 image parts without an image, and 1 images"),
        ({"messages": [user(image(), "x"), *said("yes")]}, "1 image parts without an image, and 0 images"),
        ({"messages": [{"role": "user", "content": "<image> <image>"}, *said("yes")], "images": [LOGO]},
         "it has 1 images, and the text 2 <image>"),
        ({"messages": [user(image(LOGO), "<|image_pad|>"), *said("yes")]}, "the chat template writes 2 image tokens"),
        ({"messages": [user("<|image_pad|>"), *said("yes")]}, "Remove the image token from the text"),
        ({"prompt": "What?", "completion": "yes", "images": [LOGO]}, "a row with images requires messages"),
        ({"messages": [user(f"a{MARK}"), *said("yes")]}, "U.FDD0"),
        ({"messages": [user("What?"), *said("yes")], "images": [LOGO, None]}, "an image is null"),
        ({"messages": [user("What?"), *said("yes")], "images": [LOGO], "image": LOGO}, "Put all into one"),
        ({"text": "What is it?", "image": LOGO}, "a row with images requires messages"),
        ({"messages": [{"role": "user", "content": "<image>What?"}, *said("yes")], "images": []},
         "the text has 1 <image>, and the row has no image"),
        ({"messages": [user(image(LOGO), "<image> What?"), *said("yes")]},
         "the text has 1 <image>, and its images are parts of contents already"),
        ({"messages": [user(image(written(lambda file: Image.new("RGB", (2000, 3)).save(file, "PNG"))), "What?"),
                       *said("yes")]}, "aspect ratio"),
        ({"messages": [user(image(PHOTO_HALF), "What?"), *said("yes")]}, "bytes: image file is truncated"),
        ({"messages": [user(image(written(lambda file: Image.new("F", (8, 8)).save(file, "TIFF"))), "What?"),
                       *said("yes")]}, "its pixels are of mode F"),
    ],
)  # fmt: skip
def test_what_is_refused_names_the_row(row, message):
    with pytest.raises(InputError, match=f"train, row 0: .*{message}"):
        prepared([row] * 2)


def test_16_bits_are_not_white():
    """A gradient from black to white, as scanners and depth cameras save it."""
    ramp = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    scan = written(lambda file: Image.fromarray(ramp).save(file, "PNG"))
    shown = np.asarray(open_image({"bytes": scan, "path": None}))
    assert np.array_equal(shown[..., 0], ramp // 256)
    assert np.array_equal(shown[..., 0], shown[..., 2])


def test_pictures_in_one_of_two_answers_are_refused():
    answer = [{"role": "assistant", "content": [image(LOGO), {"type": "text", "text": "this"}]}]
    with pytest.raises(InputError, match="an image is in an answer"):
        prepared([{"prompt": [user("draw")], "chosen": answer, "rejected": said("no")}] * 2, "dpo")


def test_whole_conversations_share_their_pictures():
    asked = user(image(LOGO), "What?")
    found, _ = prepared([{"chosen": [asked, *said("good")], "rejected": [asked, *said("bad")]}] * 2, "dpo")
    assert len(found[0]["images"]) == 1
    other = user(image(PHOTO), "What?")
    with pytest.raises(InputError, match="their conversations have different images"):
        prepared([{"chosen": [asked, *said("good")], "rejected": [other, *said("bad")]}] * 2, "dpo")


@pytest.mark.parametrize("way", ["parts", "column", "placeholder"])
def test_whole_conversations_next_to_a_prompt_of_text(way):
    """UltraFeedback's rows, with a picture."""
    content = {"parts": [image(LOGO), {"type": "text", "text": "What?"}], "column": "What?"}.get(way, "<image> What?")
    asked = {"role": "user", "content": content}
    row = {"prompt": "What?" if way == "parts" else content}
    row |= {"chosen": [asked, *said("good")], "rejected": [asked, *said("bad")]}
    row |= {} if way == "parts" else {"images": [LOGO]}
    found, _ = prepared([row] * 2, "dpo")
    alone, _ = prepared([{name: value for name, value in row.items() if name != "prompt"}] * 2, "dpo")
    assert found[0] == alone[0]
    assert len(found[0]["images"]) == 1
    with pytest.raises(InputError, match="column 'prompt': 'Who' is not part of the turns that 'chosen' and 'rejected"):
        prepared([row | {"prompt": "Who"}] * 2, "dpo")


def test_a_tokenizer_alone_refuses_pictures():
    from hf_posttrain.data.json_rows import from_rows

    tokenizer = processor_of("qwen3_vl").tokenizer
    config = config_class(TABLE["sft"])(output_dir="out", use_cpu=True, report_to="none")
    for row in ({"messages": [user(image(LOGO)), *said("yes")]}, {"messages": [user("a"), *said("b")], "image": LOGO}):
        with pytest.raises(InputError, match=r"model\.images: true"):
            prepare(from_rows([row] * 2), TABLE["sft"], tokenizer, config, "train")


# ---- cut to size


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_vl", pytest.param("idefics3", marks=pytest.mark.slow)])
def test_no_picture_is_ever_cut(kind, caplog):
    """At every length rows have all of their pictures, or are left out; and it is said."""
    asked = [user("x", image(LOGO), "What is it" + "?" * 4 * n) for n in range(4)]
    rows = [{"prompt": [question], "completion": said("y" * 20)} for question in asked]
    whole, tokenizer = prepared(rows, kind=kind, max_length=None)
    features = {*get_image_reader(tokenizer).token_ids}
    count = lambda row: sum(i in features for i in row["prompt_ids"] + row["completion_ids"])  # noqa: E731
    expected = count(whole[0])
    seen = set()
    for size in range(12, 110):
        caplog.clear()
        try:
            found, _ = prepared(rows, kind=kind, max_length=size)
        except InputError as error:
            seen.add("none" if "nothing to train on" in str(error) else str(error))
            continue
        assert {count(row) for row in found} == {expected}
        if len(found) < len(rows):
            assert "rows are left out, since max_length would truncate their images" in caplog.text
            seen.add("some")
    assert seen == {"none", "some"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_vl", pytest.param("idefics3", marks=pytest.mark.slow)])
def test_a_conversation_keeps_the_pictures_before_its_last_trained_token(kind):
    """And no other: where its second answer is cut off whole, the second picture is not shown, with all its tokens."""
    turns = [user(image(LOGO), "What?"), *said("A logo."), user("And", image(PHOTO), "?"), *said("A face.")]
    _, tokenizer = prepared([{"messages": turns}], kind=kind)
    reader, seen = get_image_reader(tokenizer), set()
    for size in range(20, 220):
        with suppress(InputError):  # nothing to train on is left, or a picture would be cut
            [row], _ = prepared([{"messages": turns}], kind=kind, max_length=size, train_on="assistant")
            places = sum(i in reader.token_ids for i in row["prompt_ids"] + row["completion_ids"])
            assert places == sum(reader.count_features(reader.expansion(picture)) for picture in row["images"])
            assert row["completion_mask"][-1]
            seen.add(len(row["images"]))
    assert seen == {1, 2}


def test_prepared_rows_are_the_same_from_the_cache(tmp_path):
    path = tmp_path / "rows.jsonl"
    answer = {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}  # all contents of one kind
    rows = [{"messages": [user(image(LOGO), f"What {n}?"), answer]} for n in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw = lambda: datasets.load_dataset("json", data_files=str(path), cache_dir=str(tmp_path / "cache"))["train"]  # noqa: E731
    first, again = prepared(raw())[0], prepared(raw())[0]
    assert first.to_list() == again.to_list()
    assert first.cache_files == again.cache_files


def test_a_picture_keeps_what_it_was(tmp_path):
    buffer = io.BytesIO()
    Image.new("L", (20, 12), 99).save(buffer, format="PNG")
    found = open_image(to_stored_image(buffer.getvalue()))
    assert (found.mode, found.size, found.getpixel((3, 3))) == ("RGB", (20, 12), (99, 99, 99))
    row, taken = extract_images({"prompt": "see <image>", "images": [LOGO]}, "prompt")
    assert (row["prompt"], len(taken)) == (f"see {MARK}", 1)
