"""The mask of assistants of one conversation."""

from hf_posttrain.data.assistant_mask import Conversation, assistant_masks


def assistant_mask(template, messages, chosen=None):
    """The ids and the mask of a conversation."""
    text, spans = template.render_with_spans(messages)
    [result] = assistant_masks(template.tokenizer, [Conversation(template, messages, text, spans, chosen)])
    return result
