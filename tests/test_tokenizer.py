"""The target's tokenizer behind core's protocol, on a tiny real one."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from angelspec_backend.core.config import ConfigError
from angelspec_backend.core.fields import InvalidRequest
from angelspec_backend.triton.tokenizer import HuggingFaceTokenizer, load_tokenizer


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<s>", "</s>", "<unk>", "hello", "world", "user", ":"]
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def test_the_bos_is_added_once_also_to_a_text_that_begins_with_it(tokenizer):
    wrapped = HuggingFaceTokenizer(tokenizer)
    assert wrapped.encode("hello world", add_special_tokens=True) == [0, 3, 4]
    assert wrapped.encode("<s>hello world", add_special_tokens=True) == [0, 3, 4]
    assert wrapped.encode("<s>hello world", add_special_tokens=False) == [0, 3, 4]
    assert wrapped.encode("hello world", add_special_tokens=False) == [3, 4]


def test_special_tokens_are_not_shown(tokenizer):
    assert HuggingFaceTokenizer(tokenizer).decode((0, 3, 4, 1)) == "hello world"


def test_chats_are_written_in_the_targets_format(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
    text = HuggingFaceTokenizer(tokenizer).render([{"role": "user", "content": "hello"}])
    assert text == "user:hello"


def test_a_missing_template_and_a_template_that_objects_are_the_clients_error(tokenizer):
    with pytest.raises(InvalidRequest, match="no chat template"):
        HuggingFaceTokenizer(tokenizer).render([{"role": "user", "content": "hello"}])
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        HuggingFaceTokenizer(tokenizer).render([{"role": "user", "content": "hello"}])


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot load the tokenizer"):
        load_tokenizer(str(tmp_path))
