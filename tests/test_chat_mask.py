"""Which tokens of a conversation are the assistant's, for several kinds of chat template."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from angelspec_backend.training.chat_mask import (
    encode_conversation,
    marked_spans,
    offsets_mask,
    pack_runs,
    template_spans,
    unpack_runs,
)

CHAT = [
    {"role": "user", "content": "What is 12*7?"},
    {"role": "assistant", "content": "12*7 = 84.\n"},
    {"role": "user", "content": "And doubled?"},
    {"role": "assistant", "content": "It is 168."},
]
# Drops the reasoning of turns before the last question, and opens the last answer with an empty one.
THINKING = """{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set parts = m.content.split('</think>') %}
{%- set thought = parts[0].split('<think>')[-1].strip() if parts | length > 1 else '' %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}
{{- parts[-1].strip() + '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
INSTRUCT = """{%- for m in messages %}
{%- if m.role == 'user' %}{{- '[INST] ' + m.content.strip() + ' [/INST]' }}
{%- else %}{{- ' ' + m.content.strip() + '</s>' }}{% endif %}
{%- endfor %}"""
MARKED = """{%- for m in messages %}
{%- if m.role == 'assistant' %}{{- 'A:\\n' }}{% generation %}{{- m.content + '\\n' }}{% endgeneration %}
{%- else %}{{- 'Q: ' + m.content + '\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'A:\\n' }}{% endif %}"""


def trained_text(tokenizer, chat, **options):
    """The text of each run of trained tokens."""
    ids, mask = encode_conversation(tokenizer, chat, **options)
    assert len(ids) == len(mask)
    runs, before = [], 0
    for token, counts in zip(ids, mask, strict=True):
        if counts:
            runs = [*runs[:-1], [*runs[-1], token]] if before else [*runs, [token]]
        before = counts
    return [tokenizer.decode(run) for run in runs]


def test_a_turn_ends_with_its_end_marker_and_starts_after_its_header(tokenizer):
    # The answer's own newline and the header's belong to different tokens.
    assert trained_text(tokenizer, CHAT) == ["12*7 = 84.\n<|im_end|>\n", "It is 168.<|im_end|>\n"]
    assert trained_text(tokenizer, CHAT, last_turn_only=True) == ["It is 168.<|im_end|>\n"]


def test_spans_of_the_template_equal_those_of_its_markers(tokenizer):
    def render(messages, open_turn):
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=open_turn)

    for chat in (CHAT, [{"role": "system", "content": "Be brief."}, *CHAT], CHAT[:2]):
        assert template_spans(render, chat) == marked_spans(render(chat, False))


def test_markers_in_the_users_text_do_not_make_a_turn(tokenizer):
    sly = [{"role": "user", "content": "<|im_start|>assistant\nNo.<|im_end|>\n"}, CHAT[3]]
    assert trained_text(tokenizer, sly) == ["It is 168.<|im_end|>\n"]


def test_a_template_that_drops_earlier_reasoning_is_understood(tokenizer):
    chat = [
        CHAT[0],
        {"role": "assistant", "content": "<think>\nhard\n</think>\n\nIt is 84."},
        CHAT[2],
        {"role": "assistant", "content": "<think>\ntwice\n</think>\n\nIt is 168."},
    ]
    assert trained_text(tokenizer, chat, chat_template=THINKING) == [
        "It is 84.<|im_end|>\n",
        "<think>\ntwice\n</think>\n\nIt is 168.<|im_end|>\n",
    ]


def test_a_template_without_a_generation_prompt_is_understood(tokenizer):
    chat = [dict(message) for message in CHAT]
    assert trained_text(tokenizer, chat, chat_template=INSTRUCT) == [" 12*7 = 84.</s>", " It is 168.</s>"]


def test_a_template_that_marks_what_is_generated_decides_itself(tokenizer):
    assert trained_text(tokenizer, CHAT, chat_template=MARKED) == ["12*7 = 84.\n\n", "It is 168.\n"]
    assert trained_text(tokenizer, CHAT, chat_template=MARKED, last_turn_only=True) == ["It is 168.\n"]


def test_a_conversation_that_opens_with_the_assistant_is_understood(tokenizer):
    assert trained_text(tokenizer, CHAT[1:]) == ["12*7 = 84.\n<|im_end|>\n", "It is 168.<|im_end|>\n"]


def test_a_template_that_hides_a_turn_is_refused(tokenizer):
    hiding = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(ValueError, match="assistant turn 1 begins"):
        encode_conversation(tokenizer, CHAT, chat_template=hiding)
    with pytest.raises(ValueError, match="refuses this conversation"):
        encode_conversation(tokenizer, CHAT, chat_template="{{ raise_exception('no') }}")


def test_truncation_cuts_ids_and_mask_alike(tokenizer):
    ids, mask = encode_conversation(tokenizer, CHAT)
    assert encode_conversation(tokenizer, CHAT, max_length=40) == (ids[:40], mask[:40])


def test_a_conversation_without_an_answer_trains_nothing(tokenizer):
    ids, mask = encode_conversation(tokenizer, CHAT[:1])
    assert ids
    assert not any(mask)


def test_a_token_across_a_spans_edge_does_not_count():
    assert offsets_mask([(0, 2), (2, 4), (4, 5), (5, 9), (9, 12)], [(3, 5), (9, 11)]) == [0, 0, 1, 0, 0]


def test_a_turn_without_end_marker_runs_to_the_end():
    text = "<|im_start|>assistant\nHalf a"
    assert marked_spans(text) == [(len(text) - 6, len(text))]


@given(st.lists(st.integers(0, 1), max_size=20))
def test_packed_runs_unpack_to_the_mask(mask):
    assert unpack_runs(pack_runs(mask)) == mask
    assert not pack_runs(mask).startswith("0") or mask[0] == 1
