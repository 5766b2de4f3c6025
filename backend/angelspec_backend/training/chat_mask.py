"""Which tokens of a conversation are the assistant's: what a drafter is trained to predict.

A turn's span runs from just after its header, where generation starts, up to and including the end-of-turn
marker.  A token counts if it lies inside a span as a whole: one that begins before belongs to the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from jinja2 import TemplateError

Message = dict[str, Any]
Span = tuple[int, int]  # characters of the rendered text
Render = Callable[[Sequence[Message], bool], str]  # messages, whether to open an assistant turn

SENTINEL = "\ue000angelspec\ue000"  # private use: in no conversation


@dataclass(frozen=True)
class TurnMarkers:
    """What encloses an assistant turn in a template's text."""

    header: str
    end: str


CHATML = TurnMarkers("<|im_start|>assistant\n", "<|im_end|>\n")


def marked_spans(text: str, markers: TurnMarkers = CHATML) -> list[Span]:
    """Spans of the assistant turns in rendered text; a turn without an end marker runs to the end."""
    spans, at = [], text.find(markers.header)
    while at >= 0:
        start = at + len(markers.header)
        end = text.find(markers.end, start)
        end = len(text) if end < 0 else end + len(markers.end)
        spans.append((start, end))
        at = text.find(markers.header, end)
    return spans


def template_spans(render: Render, messages: Sequence[Message]) -> list[Span]:
    """Spans of the assistant turns for any chat template, found by rendering parts of the conversation.

    Raises ValueError if the template refuses the conversation, or does not show where a turn begins and ends.
    """
    text = _rendered(render, messages)
    if text is None:
        raise ValueError("the chat template refuses this conversation")
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return [
        _prefix_span(render, messages, turn, text) or _replaced_span(render, messages, turn, text)
        for turn in turns
    ]


def _rendered(render: Render, messages: Sequence[Message], open_turn: bool = False) -> str | None:
    """The text of some messages, None if the template refuses them."""
    try:
        return render(messages, open_turn) if messages else None
    except TemplateError:
        return None


def _prefix_span(render: Render, messages: Sequence[Message], turn: int, text: str) -> Span | None:
    """The turn's span if the conversation up to it renders to the beginning of the text."""
    before, until = _rendered(render, messages[:turn], True), _rendered(render, messages[: turn + 1])
    if before is None or until is None or not (text.startswith(until) and until.startswith(before)):
        return None
    return (len(before), len(until)) if len(before) < len(until) else None


def _replaced_span(render: Render, messages: Sequence[Message], turn: int, text: str) -> Span:
    """The turn's span found by replacing its content; for templates that drop earlier turns' reasoning."""
    replaced = {**messages[turn], "content": SENTINEL}
    whole = _rendered(render, [*messages[:turn], replaced, *messages[turn + 1 :]]) or ""
    before, found, after = whole.partition(SENTINEL)
    fits = len(before) + len(after) <= len(text) and text.startswith(before) and text.endswith(after)
    if not found or not fits:
        raise ValueError(f"the chat template does not show where assistant turn {turn} begins and ends")
    opening = _rendered(render, messages[:turn], True)
    start = len(opening) if opening is not None and before.startswith(opening) else len(before)
    marker = (_rendered(render, [*messages[:turn], replaced]) or "").partition(SENTINEL)[2]
    shared = next((n for n in range(len(marker), 0, -1) if after.startswith(marker[:n])), 0)
    return start, len(text) - len(after) + shared


def offsets_mask(offsets: Iterable[tuple[int, int]], spans: Sequence[Span]) -> list[int]:
    """1 for tokens that lie inside a span.  offsets: characters (start, end) of each token."""
    return [int(any(start >= first and end <= last for first, last in spans)) for start, end in offsets]


def encode_conversation(
    tokenizer: Any,
    messages: Sequence[Message],
    last_turn_only: bool = False,
    max_length: int | None = None,
    **template_options: Any,
) -> tuple[list[int], list[int]]:
    """Token ids of a conversation and its loss mask, both [tokens].

    tokenizer: a fast tokenizer of transformers with a chat template.  If the template marks what is generated
      ({% generation %}), the marks decide, else the turns' spans.
    last_turn_only: count the last assistant turn only
    max_length: longer conversations are cut at the end
    template_options: for the template, such as enable_thinking
    Raises ValueError as `template_spans` does, and if the tokenizer does not say which characters a token
    stands for.
    """
    template = tokenizer.get_chat_template(
        template_options.get("chat_template"), template_options.get("tools")
    )
    if "generation %}" in template or "generation -%}" in template:
        encoded = tokenizer.apply_chat_template(
            list(messages), return_dict=True, return_assistant_tokens_mask=True, **template_options
        )
        ids, mask = list(encoded["input_ids"]), list(encoded["assistant_masks"])
        mask = _last_run(mask) if last_turn_only else mask
        return ids[:max_length], mask[:max_length]
    if not tokenizer.is_fast:
        raise ValueError("the tokenizer gives no character offsets: a fast tokenizer is needed")

    def render(part: Sequence[Message], open_turn: bool) -> str:
        return tokenizer.apply_chat_template(
            list(part), tokenize=False, add_generation_prompt=open_turn, **template_options
        )

    spans = template_spans(render, messages)
    encoded = tokenizer(render(messages, False), add_special_tokens=False, return_offsets_mapping=True)
    mask = offsets_mask(encoded["offset_mapping"], spans[-1:] if last_turn_only else spans)
    return encoded["input_ids"][:max_length], mask[:max_length]


def _last_run(mask: Sequence[int]) -> list[int]:
    """The last run of ones only."""
    runs = [(value, len(list(run))) for value, run in groupby(mask)]
    last = max((i for i, (value, _) in enumerate(runs) if value), default=-1)
    return [int(i == last) for i, (_, length) in enumerate(runs) for _ in range(length)]


def pack_runs(mask: Sequence[int]) -> str:
    """Run lengths separated by commas, the first of them of zeros: [0, 0, 1] -> "2,1", [1] -> "0,1"."""
    runs = [(value, len(list(run))) for value, run in groupby(mask)]
    lengths = ([0] if runs and runs[0][0] else []) + [length for _, length in runs]
    return ",".join(map(str, lengths))


def unpack_runs(packed: str) -> list[int]:
    """The mask that `pack_runs` packed."""
    lengths = map(int, packed.split(",")) if packed else []
    return [i % 2 for i, length in enumerate(lengths) for _ in range(length)]
