"""Chat templates in the manner of the families that people train: minimal, written by us, each with what is odd in it.

FAMILIES: name -> Family. `said` is what a plain assistant turn trains, `last` the same of the last turn where the
template writes it otherwise; `call` is how the trained text of a turn with a call ends.
"""

# ruff: noqa: E501 (a template's lines are as long as they are)

from typing import NamedTuple

from tokenizers_for_tests import _bytes_and, _wrap


class Family(NamedTuple):
    template: str
    special: str  # its special tokens, apart by spaces
    said: str  # of an assistant's turn, with {} for its text
    eos: str
    last: str | None = None
    call: str | None = None  # None: it writes no calls
    bos: str | None = None
    system: bool = True  # does it write system turns?


def family_tokenizer(family):
    """A token for each byte, and the family's special tokens."""
    special = [*dict.fromkeys([*family.special.split(), family.eos, *([family.bos] if family.bos else []), "<pad>"])]
    return _wrap(_bytes_and(special), family.template, eos_token=family.eos, pad_token="<pad>", bos_token=family.bos)


def _each(body, opening, before=""):
    """A template: `before`, then `body` for each message, then what opens an answer."""
    return (
        before
        + "{% for m in messages %}"
        + body
        + "{% endfor %}{% if add_generation_prompt %}"
        + opening
        + "{% endif %}"
    )


_CALLS = (
    '{% for c in m.tool_calls or [] %}\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}"
)
_TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
_IM = "<|im_start|> <|im_end|> <|endoftext|>"
_OPEN = "<|im_start|>assistant\n"
_INST = "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"

FAMILIES = {
    "chatml": Family(_each(_TURN, _OPEN), _IM, "{}<|im_end|>", "<|im_end|>"),
    "qwen2.5": Family(
        _each(
            "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
            "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}" + _CALLS + "<|im_end|>\n{% endif %}",
            _OPEN,
            "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}",
        ),
        _IM,
        "{}<|im_end|>",
        "<|endoftext|>",
        call="</tool_call><|im_end|>",
    ),
    "qwen3": Family(  # an empty thought in the last turn alone, and thoughts of earlier turns dropped
        _each(
            "{% if m.role == 'assistant' %}<|im_start|>assistant\n{% if loop.last %}<think>\n"
            "{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
            + _CALLS
            + "<|im_end|>\n{% elif m.role == 'tool' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
            "{% else %}" + _TURN + "{% endif %}",
            _OPEN,
        ),
        _IM,
        "{}<|im_end|>",
        "<|im_end|>",
        "<think>\n\n</think>\n\n{}<|im_end|>",
        "</tool_call><|im_end|>",
    ),
    "llama2": Family(
        "{% if messages[0].role == 'system' %}{% set s = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
        "{% set ms = messages[1:] %}{% else %}{% set s = '' %}{% set ms = messages %}{% endif %}{% for m in ms %}"
        "{% if m.role == 'user' %}{{ bos_token }}[INST] {{ s if loop.first }}{{ m.content }} [/INST]"
        "{% elif m.role == 'assistant' %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}",
        "",
        " {} </s>",
        "</s>",
        bos="<s>",
    ),
    "llama3": Family(
        _each(
            "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>",
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            "{{ bos_token }}",
        ),
        "<|start_header_id|> <|end_header_id|>",
        "{}<|eot_id|>",
        "<|eot_id|>",
        bos="<|begin_of_text|>",
    ),
    "llama3.1": Family(  # of a turn with a call, the call alone
        _each(
            '{% if m.tool_calls %}<|start_header_id|>assistant<|end_header_id|>\n\n{"name": '
            '"{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
            "<|eot_id|>{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}"
            "<|eot_id|>{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
            "{% endif %}",
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            "{{ bos_token }}",
        ),
        "<|start_header_id|> <|end_header_id|>",
        "{}<|eot_id|>",
        "<|eot_id|>",
        call="}}<|eot_id|>",
        bos="<|begin_of_text|>",
    ),
    "mistral": Family(
        _each(
            _INST + "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{{ c.function | tojson }}"
            "{{ ', ' if not loop.last }}{% endfor %}]{{ eos_token }}{% elif m.role == 'tool' %}[TOOL_RESULTS] "
            "{{ m.content }}[/TOOL_RESULTS]{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% else %}"
            "{{ raise_exception('only user, assistant and tool') }}{% endif %}",
            "",
            "{{ bos_token }}",
        ),
        "[INST] [/INST] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]",
        " {}</s>",
        "</s>",
        call="}}]</s>",
        bos="<s>",
        system=False,
    ),
    "mistral7": Family(
        _each(
            "{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
            "{% elif m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}{{ eos_token }}{% endif %}",
            "",
            "{{ bos_token }}",
        ),
        "[INST] [/INST] [SYSTEM_PROMPT] [/SYSTEM_PROMPT]",
        "{}</s>",
        "</s>",
        bos="<s>",
    ),
    "gemma": Family(
        _each(
            "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}<start_of_turn>"
            "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n",
            "<start_of_turn>model\n",
            "{{ bos_token }}",
        ),
        "<start_of_turn> <end_of_turn>",
        "{}<end_of_turn>",
        "<eos>",
        bos="<bos>",
        system=False,
    ),
    "gemma3": Family(  # the system turn is part of the first question
        "{{ bos_token }}{% set s = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
        "{% for m in messages if m.role != 'system' %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ s if loop.first }}{% if m.content is string %}{{ m.content | trim }}{% else %}{% for p in m.content %}"
        "{{ p.text | trim }}{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        "<start_of_turn> <end_of_turn>",
        "{}<end_of_turn>",
        "<eos>",
        bos="<bos>",
    ),
    "gemma4": Family(  # a call, its result and the answer are one turn
        "{{ bos_token }}{% set ns = namespace(open=false) %}{% for m in messages %}{% if m.role == 'tool' %}"
        "<|tool_response>response:{{ m.name }}{{ '{' }}value:{{ m.content }}{{ '}' }}<tool_response|>"
        "{% else %}{% if not ns.open %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{% endif %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name }}{{ '{' }}{% for k, v in "
        "c.function.arguments.items() %}{{ k }}:{{ v }}{% endfor %}{{ '}' }}<tool_call|>{% endfor %}"
        "{% if m.tool_calls %}{% set ns.open = true %}{% else %}{% set ns.open = false %}<turn|>\n{% endif %}{% endif %}"
        "{% endfor %}{% if add_generation_prompt and not ns.open %}<|turn>model\n{% endif %}",
        "<|turn> <turn|> <|tool_call> <tool_call|> <|tool_response> <tool_response|>",
        "{}<turn|>",
        "<eos>",
        call="}}<tool_call|>",
        bos="<bos>",
    ),
    "phi3": Family(
        _each("<|{{ m.role }}|>\n{{ m.content }}<|end|>\n", "<|assistant|>\n"),
        "<|system|> <|user|> <|assistant|> <|end|>",
        "{}<|end|>",
        "<|endoftext|>",
    ),
    "phi4": Family(
        _each("<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>", "<|im_start|>assistant<|im_sep|>"),
        _IM + " <|im_sep|>",
        "{}<|im_end|>",
        "<|im_end|>",
    ),
    "deepseek3": Family(  # the arguments of a call must be text; turns with calls are those that have the key
        _each(
            "{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}<｜User｜>{{ m.content }}<｜Assistant｜>"
            "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% else %}"
            "{{ m.content if 'tool_calls' not in m or m.tool_calls }}"
            "{% for c in m.tool_calls or [] %}<｜tool▁call▁begin｜>{{ c.function.name + '\n' + c.function.arguments }}"
            "<｜tool▁call▁end｜>{% endfor %}<｜end▁of▁sentence｜>{% endif %}",
            "",
            "{{ bos_token }}",
        ),
        "<｜User｜> <｜Assistant｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜>",
        "{}<｜end▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        call="<｜tool▁call▁end｜><｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
    ),
    "gptoss": Family(  # other ends for calls, earlier answers and the last answer, which alone has its thinking
        _each(
            "{% if m.role == 'tool' %}<|start|>functions.{{ m.name }} to=assistant<|message|>{{ m.content | tojson }}<|end|>"
            "{% elif m.tool_calls %}<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary"
            " json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% elif m.role == 'assistant' %}"
            "{% set last = loop.last and not add_generation_prompt %}{% if last and m.thinking %}<|start|>assistant<|channel|>"
            "analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
            "<|start|>assistant<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if last else '<|end|>' }}"
            "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}",
            "<|start|>assistant",
        ),
        "<|start|> <|message|> <|channel|> <|end|> <|call|>",
        "<|channel|>final<|message|>{}<|end|>",
        "<|return|>",
        "<|channel|>final<|message|>{}<|return|>",
        "}}<|call|>",
    ),
    "glm4": Family(  # no end: the next header is where generation stops
        _each(
            "<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}" + _CALLS,
            "<|assistant|>\n",
            "[gMASK]<sop>",
        ),
        "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <|endoftext|>",
        "{}",
        "<|endoftext|>",
        "{}<|endoftext|>",
        "</tool_call>",
    ),
    "cohere": Family(
        _each(
            "<|START|><|{{ {'user': 'USER', 'assistant': 'CHATBOT', 'system': 'SYSTEM'}[m.role] }}|>{{ m.content }}<|END|>",
            "<|START|><|CHATBOT|>",
            "{{ bos_token }}",
        ),
        "<|START|> <|USER|> <|CHATBOT|> <|SYSTEM|>",
        "{}<|END|>",
        "<|END|>",
        bos="<BOS>",
    ),
    "cohere2": Family(  # two special tokens end a turn
        _each(
            "<|START|><|{{ {'user': 'USER', 'assistant': 'CHATBOT', 'system': 'SYSTEM'}[m.role] }}|>{% if m.role == "
            "'assistant' %}<|START_R|>{{ m.content }}<|END_R|>{% else %}{{ m.content }}{% endif %}<|END|>",
            "<|START|><|CHATBOT|>",
            "{{ bos_token }}",
        ),
        "<|START|> <|USER|> <|CHATBOT|> <|SYSTEM|> <|START_R|> <|END_R|>",
        "<|START_R|>{}<|END_R|>",
        "<|END|>",
        bos="<BOS>",
    ),
    "granite": Family(
        _each(
            "<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n",
            "<|start_of_role|>assistant<|end_of_role|>",
        ),
        "<|start_of_role|> <|end_of_role|>",
        "{}<|end_of_text|>",
        "<|end_of_text|>",
    ),
    "zephyr": Family(
        _each("<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n", "<|assistant|>\n"), "", "{}</s>", "</s>"
    ),
    "vicuna": Family(
        _each(
            "{% if m.role == 'system' %}{{ m.content }} {% elif m.role == 'user' %}USER: {{ m.content }} "
            "{% else %}ASSISTANT: {{ m.content }}</s>{% endif %}",
            "ASSISTANT:",
        ),
        "",
        " {}</s>",
        "</s>",
    ),
    "alpaca": Family(  # no special token in it at all
        _each(
            "{% if m.role == 'system' %}{{ m.content }}\n\n{% elif m.role == 'user' %}### Instruction:\n{{ m.content }}\n\n"
            "{% else %}### Response:\n{{ m.content }}\n\n{% endif %}",
            "### Response:\n",
        ),
        "",
        "{}",
        "</s>",
        "{}</s>",
    ),
    "olmo2": Family(
        _each(
            "<|{{ m.role }}|>\n{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n",
            "<|assistant|>\n",
            "{{ bos_token }}",
        ),
        "",
        "{}<|endoftext|>",
        "<|endoftext|>",
        bos="<|endoftext|>",
    ),
    "smolvlm": Family(  # contents that are strings are not written
        _each(
            "{{ m.role | capitalize }}: {% for p in m.content %}{{ p.text }}{% endfor %}<end_of_utterance>\n",
            "Assistant: ",
            "<|im_start|>",
        ),
        "<|im_start|> <end_of_utterance>",
        "{}<end_of_utterance>",
        "<end_of_utterance>",
    ),
    "lfm2": Family(  # the line break behind the end is tagged as well
        _each(
            "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>\n"
            "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}",
            _OPEN,
            "{{ bos_token }}",
        ),
        _IM,
        "{}<|im_end|>",
        "<|im_end|>",
        bos="<|startoftext|>",
    ),
    "exaone": Family(
        _each("[|{{ m.role }}|]{{ m.content }}[|endofturn|]\n", "[|assistant|]"),
        "[|system|] [|user|] [|assistant|]",
        "{}[|endofturn|]",
        "[|endofturn|]",
    ),
    "kimi": Family(
        _each(
            "<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}{% if m.tool_calls %}<|calls|>{% for c in "
            "m.tool_calls %}{{ c.function.name }}:{% if c.function.arguments is string %}{{ c.function.arguments }}"
            "{% else %}{{ c.function.arguments | tojson }}{% endif %}{% endfor %}<|calls_end|>{% endif %}<|im_end|>",
            "<|im_assistant|>assistant<|im_middle|>",
        ),
        "<|im_user|> <|im_system|> <|im_assistant|> <|im_tool|> <|im_middle|> <|im_end|> <|calls|> <|calls_end|>",
        "{}<|im_end|>",
        "<|im_end|>",
        call="}}<|calls_end|><|im_end|>",
    ),
}
