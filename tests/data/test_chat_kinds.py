"""Chats under every kind of tokenizer and several templates: tokens and what is learned are transformers' own."""

import json
import re
from itertools import cycle

import numpy as np
import pytest
import tokenizers
from small_tokenizers import KINDS, write_kind
from tokenizers import models, normalizers, pre_tokenizers

from jaxpipe.data import load_tokenizer
from jaxpipe.data.indexed import IndexedTokens, read_learned
from jaxpipe.data.prepare.preparation import prepare
from jaxpipe.errors import ConfigError, DataError

# Templates in the forms of well-known ones, each with the pattern of its answers, written down by hand.
CHATML = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = """{%- if tools %}{{- '<|im_start|>system\n' + tools | tojson(separators=(',', ':'), sort_keys=True) }}
{{- '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' %}{% generation %}
        {%- if message.reasoning_content %}{{- '(' + message.reasoning_content | trim + ') ' }}{% endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}{{- call.function | tojson(ensure_ascii=True) }}{% endfor %}
        {{- '<|im_end|>' }}{% endgeneration %}
    {%- else %}{{- message.content + '<|im_end|>' }}{% endif %}
    {{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
BRACKETS = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}"
    "{{ ' ' + message.content | trim + ' ' + eos_token }}{% else %}"
    "{{ '[' + message.role + '] ' + message.content | trim + ' [/' + message.role + ']' }}{% endif %}{% endfor %}"
)
PLAIN = (
    "{%- for message in messages -%}{{ message.role }}: {{ message.content }}\n{{ eos_token }}"
    "{%- if documents is not none -%}{{ raise_exception('documents are none') }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}assistant: {% endif -%}"
)
NAMED = (
    "{% set names = namespace(assistant='model') %}{% for message in messages %}"
    "{% if message.role == 'assistant' %}{{ '<|im_start|>model\n' }}{% generation %}{{ message.content | trim }}"
    "{{ '<|im_end|>\n' }}{% endgeneration %}{% else %}"
    "{{ '<|im_start|>' + (message.name or message.role) + '\n' + message.content | trim + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}"
)
TEMPLATES = {
    "chatml": (CHATML, r"<\|im_start\|>assistant\n(.*?<\|im_end\|>\n)"),
    "marked": (MARKED, r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)"),
    # Nothing asks for an answer: the first message's begins with its content, those of others with the space before.
    "brackets": (BRACKETS, r"(?:^<s> |\[/user\])(.*?</s>)"),
    "plain": (PLAIN, r"assistant: (.*?\n</s>)"),
    "named": (NAMED, r"<\|im_start\|>model\n(.*?<\|im_end\|>\n)"),
}

USER, ANSWER = {"role": "user", "content": "The dog?"}, {"role": "assistant", "content": "On the log."}
TOOL = {"type": "function", "function": {"name": "sat", "parameters": {"type": "object", "é": "è"}}}
CALL = {"type": "function", "function": {"name": "sat", "arguments": {"on": "café"}}}
CHATS = {
    "one answer": {"messages": [USER, {**ANSWER, "tool_calls": [], "thinking": None}], "tools": [], "documents": None},
    "system": {"messages": [{"role": "system", "content": "Be kind."}, USER, ANSWER]},
    "two answers": {
        "messages": [USER, ANSWER, {"role": "user", "content": " Où? "}, {**ANSWER, "content": "Là-bas  ☕"}]
    },
    "begun by the assistant": {"messages": [{**ANSWER, "content": "Is it?"}, USER, ANSWER]},
    "an answer twice": {"messages": [ANSWER, USER, ANSWER, USER, ANSWER]},
    "weights": {"messages": [USER, {**ANSWER, "weight": 0}, USER, {**ANSWER, "content": "yes", "weight": 1}]},
    "loss_mask": {"messages": [{**ANSWER, "loss_mask": 0}, USER, {**ANSWER, "content": "no"}], "tools": None},
    "train": {"messages": [USER, ANSWER, {**USER, "name": None}, {**ANSWER, "content": "(a)", "train": False}]},
    "reasoning": {"messages": [USER, {**ANSWER, "reasoning": "a dog sat"}]},
    "thinking": {"messages": [USER, {**ANSWER, "thinking": "a cat"}, USER, {**ANSWER, "weight": 0, "thinking": "b"}]},
    "tools": {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}], "tools": [TOOL]},
}
MARKED_ONLY = ("reasoning", "thinking", "tools")  # the others would leave these out, so they are refused
ENDS = ("<|im_end|>", "</s>")  # eos_token of the folder: another than the usual name in its vocabulary, and that one
CROSS_SECTION = list(zip(KINDS, cycle(TEMPLATES), cycle(ENDS), strict=False))


@pytest.mark.parametrize(("kind", "name", "end"), [("metaspace, space before", "chatml", "<|im_end|>")])
def test_tokens_and_what_is_learned_are_those_of_transformers(tmp_path, kind, name, end):
    _compare(tmp_path, kind, name, end)


@pytest.mark.ci
@pytest.mark.parametrize(("kind", "name", "end"), CROSS_SECTION)
def test_a_kind_under_a_template(tmp_path, kind, name, end):
    _compare(tmp_path, kind, name, end)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("end", ENDS)
def test_every_kind_under_every_template(tmp_path, kind, name, end):
    _compare(tmp_path, kind, name, end)


def _compare(folder, kind, name, end):
    """Compares all of `CHATS`, 7 kinds x 5 templates x 2 ends x 8 or 11 chats in all."""
    from transformers import PreTrainedTokenizerFast

    template, pattern = TEMPLATES[name]
    file = write_kind(folder, kind)
    told = {"chat_template": template, "bos_token": "<s>", "eos_token": end, "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(file), **told)
    chats = {key: chat for key, chat in CHATS.items() if name == "marked" or key not in MARKED_ONLY}
    documents = _documents_of(folder, [*chats.values(), {"prompt": "Is it?\n", "answer": "yes"}])
    for (key, chat), (tokens, learned) in zip(chats.items(), documents[:-1], strict=True):
        tools = {"tools": chat.get("tools")}
        text = theirs.apply_chat_template(chat["messages"], tokenize=False, **tools)
        found = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
        assert tokens.tolist() == found["input_ids"], key
        answers = [message for message in chat["messages"] if message["role"] == "assistant"]
        matches = list(re.finditer(pattern.replace("</s>", re.escape(end)), text, re.DOTALL))
        assert len(matches) == len(answers)
        mask, all_of_them = np.zeros(len(tokens), np.uint8), np.zeros(len(tokens), np.uint8)
        first, stop = np.array(found["offset_mapping"]).T
        for answer, match in zip(answers, matches, strict=True):
            inside = (match.start(1) < stop) & (first < match.end(1))
            all_of_them |= inside
            mask |= inside & all(answer.get(flag, 1) for flag in ("weight", "train", "loss_mask"))
        assert learned.tolist() == mask.tolist(), key
        assert 0 < learned.sum() < len(learned)
        if "{% generation %}" in template:
            kept = {"return_dict": True, "return_assistant_tokens_mask": True, **tools}
            found = theirs.apply_chat_template(chat["messages"], **kept)
            assert tokens.tolist() == found["input_ids"], key
            # Theirs takes places to ascend, which those of an empty token before a line break do not.
            if (np.diff(first) >= 0).all():
                assert all_of_them.tolist() == found["assistant_masks"], key
    tokens, learned = documents[-1]
    assert (tokens[-1], learned[-1]) == (theirs.eos_token_id, 1)


def _sizes(folder):
    names = {"tokenizer": str(folder), "output": str(folder / "out")}
    return {**names, "file_format": "chat", "seq_len": 500, "overwrite": True}


def _documents_of(folder, lines, **flags):
    (folder / "chats.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    prepare([str(folder / "chats.jsonl")], **_sizes(folder), **flags)
    indexed = IndexedTokens.open(str(folder / "out"))
    ends = indexed.ends()[:-1]
    return list(zip(np.split(indexed.tokens[:], ends), np.split(read_learned(indexed)[:], ends), strict=True))


PAIRS = [
    ("Q:\n", "Sure"),
    ("Q:", " yes"),
    ("Q:\n", " yes"),
    ("Q: ", "yes"),  # the space is a token's beginning, but the prompt has it
    ("", "yes"),
    (" ", "yes"),
    ("Is it", "?"),
    ("Où\n", "café"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_has_the_tokens_that_it_has_behind_its_prompt(tmp_path, kind):
    library = tokenizers.Tokenizer.from_file(str(write_kind(tmp_path, kind)))
    tokenizer = load_tokenizer(str(tmp_path), is_masked=False)
    documents = _documents_of(tmp_path, [{"prompt": prompt, "answer": answer} for prompt, answer in PAIRS])
    num_joint = 0
    for (prompt, answer), (tokens, learned) in zip(PAIRS, documents, strict=True):
        ids, before = (library.encode(text, add_special_tokens=False).ids for text in (prompt + answer, prompt))
        assert tokens[learned == 0].tolist() == before  # what jaxpipe.sample gives the model
        if kind == "words":
            continue
        if ids[: len(before)] == before:
            assert tokens[:-1].tolist() == ids, (prompt, answer)
            num_joint += 1
        # The text has no space more and none less, but for the one that the tokenizer puts before every text.
        said = tokenizer.decode(tokens[:-1])
        spaced = f" {prompt}{answer}" if kind == "byte level, space before" and prompt != " " else prompt + answer
        lossy = prompt == " " and kind in ("metaspace, space before", "unigram, space before")
        assert said == (spaced.removeprefix(" ") if lossy else spaced)
    assert kind == "words" or num_joint >= 5


def _merging():
    """Pairs that write "Q: " as "Q" and ": ", and "Q: y" as "Q", ":" and " y": as many tokens before the answer."""
    vocab = {token: index for index, token in enumerate(["</s>", "Q", ":", "_", "y", "_y", ":_"])}
    library = tokenizers.Tokenizer(models.BPE(vocab, [("_", "y"), (":", "_")]))
    library.normalizer = normalizers.Replace(" ", "_")
    return library


def _fused():
    """Words, of which all unknown ones are one token: that of two words that follow each other is that of the first."""
    library = tokenizers.Tokenizer(models.WordLevel({"</s>": 0, "?": 1, "y": 2}, unk_token="?"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    return library


def _few_letters():
    """Pairs as `_merging`, and no colon that could stand before an answer; nothing stands for what is unknown."""
    vocab = {token: index for index, token in enumerate(["</s>", "Q", "_", "y", "_y", "a"])}
    library = tokenizers.Tokenizer(models.BPE(vocab, [("_", "y")]))
    library.normalizer = normalizers.Replace(" ", "_")
    return library


@pytest.mark.parametrize(
    ("make", "prompt", "answer", "expected"),
    [
        (_merging, "Q: ", "y", ["Q", ":_", "y", "</s>"]),
        (_fused, "ab", "cd y", ["?", "?", "y", "</s>"]),
        (_few_letters, "Q ", "y", ["Q", "_", "y", "</s>"]),
    ],
)
def test_nothing_between_prompt_and_answer_is_doubled_or_lost(tmp_path, make, prompt, answer, expected):
    library = make()
    library.add_special_tokens(["</s>"])
    library.save(str(tmp_path / "tokenizer.json"))
    ((tokens, _),) = _documents_of(tmp_path, [{"prompt": prompt, "answer": answer}])
    assert [library.id_to_token(int(token)) for token in tokens] == expected


def test_an_answer_of_no_token_is_refused(tmp_path):
    """Words alone: the answer is nothing to this tokenizer, and its end alone would be learned."""
    write_kind(tmp_path, "words")
    with pytest.raises(DataError, match=r"chats.jsonl:1 has an answer that the tokenizer does not tell"):
        _documents_of(tmp_path, [{"prompt": "Is it", "answer": "\n"}])


MESSAGES = [{"role": "user", "content": "Q東"}, {"role": "assistant", "content": "y東京"}]


@pytest.mark.parametrize("line", [{"prompt": "Q東", "answer": "y東京<|im_end|>"}, {"messages": MESSAGES}])
def test_characters_of_chats_that_a_vocabulary_lacks_are_refused_or_dropped(tmp_path, line):
    """Letters of the names of special tokens are not lacking, where these names are the tokens."""
    library = _few_letters()
    library.add_special_tokens(["</s>", "<|im_end|>"])
    library.save(str(tmp_path / "tokenizer.json"))
    template = (
        "{% for message in messages %}{{ message.content }}"
        "{% if message.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(ConfigError, match=r"lacks 1 characters.*\n.*\n.*U\+6771 1 times"):
        _documents_of(tmp_path, [{"prompt": "Q東", "answer": "y"}])
    with pytest.raises(ConfigError, match=r"U\+6771"):
        _documents_of(tmp_path, [line], reads_markup=True)
    ((tokens, _),) = _documents_of(tmp_path, [line], reads_markup=True, drop_characters=True)
    assert [library.id_to_token(int(token)) for token in tokens] == ["Q", "y", "<|im_end|>"]
    dropped = prepare([str(tmp_path / "chats.jsonl")], **_sizes(tmp_path), reads_markup=True, drop_characters=True)
    assert dropped.notes.dropped == {"東": 2, "京": 1}


def test_unknown_words_of_chats_are_counted(tmp_path):
    library = _fused()
    library.add_special_tokens(["</s>"])
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": PLAIN, "eos_token": "</s>"}))
    chats = [{"prompt": "y", "answer": "ab y"}, {"messages": [USER, ANSWER]}]
    documents = _documents_of(tmp_path, chats)
    unknown = prepare([str(tmp_path / "chats.jsonl")], **_sizes(tmp_path)).notes.unknown
    assert unknown.num == sum(int((tokens == 1).sum()) for tokens, _ in documents) > 2
    assert unknown.first == f"{tmp_path / 'chats.jsonl'}:1"


@pytest.mark.parametrize("key", MARKED_ONLY)
def test_what_a_template_does_not_read_is_refused(tmp_path, key):
    write_kind(tmp_path, "byte level")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    what = "tools" if key == "tools" else key
    with pytest.raises(DataError, match=rf"chats.jsonl:1 .*key that is not followed: '{what}'"):
        _documents_of(tmp_path, [CHATS[key]])
