"""Conversations and answered prompts: their tokens are transformers' own, and answers alone are learned."""

import gzip
import json

import numpy as np
import pytest
import tokenizers
from small_tokenizers import write_bpe

from jaxpipe.data import load_corpus, load_tokenizer
from jaxpipe.data.indexed import IndexedTokens, read_learned
from jaxpipe.data.prepare.preparation import prepare
from jaxpipe.errors import ConfigError, DataError
from jaxpipe.prepare import main

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# As Qwen2's, and the same with the answers marked as transformers asks for it.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' %}
        {% generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
# Answers before the last one lose their first word, as thoughts are left out.
FORGETFUL = TEMPLATE.replace(
    "message.content +",
    "(message.content if loop.last or message.role != 'assistant' else message.content[3:]) +",
)
# A space before the answer, which its first token has.
SPACED = (
    "{% for message in messages %}{{ message.role + ': ' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}"
    "{% endfor %}"
)
CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Où est le chat?"},
    {"role": "assistant", "content": "Sur le café ☕."},
    {"role": "user", "content": "The dog?"},
    {"role": "assistant", "content": "On the log."},
]


@pytest.fixture
def folder(tmp_path):
    """A tokenizer with a chat template."""
    write_bpe(tmp_path, special=SPECIAL)
    write_template(tmp_path, TEMPLATE)
    return tmp_path


def write_template(folder, template):
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "<|im_end|>"}))


def write_lines(folder, *lines, name="chats.jsonl"):
    text = "\n".join(line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines)
    (folder / name).write_text(text)
    return str(folder / name)


def prepared(folder, *lines, tokenizer=None, seq_len=500):
    file = write_lines(folder, *lines)
    tokenizer = tokenizer or str(folder)
    sizes = {"file_format": "chat", "seq_len": seq_len, "overwrite": True}
    return prepare([file], tokenizer=tokenizer, output=str(folder / "out"), **sizes)


def documents_of(folder):
    """The tokens of each document, and which are learned."""
    indexed = IndexedTokens.open(str(folder / "out"))
    learned = read_learned(indexed)
    ends = indexed.ends()
    return list(zip(np.split(indexed.tokens, ends[:-1]), np.split(learned, ends[:-1]), strict=True))


@pytest.mark.parametrize("template", [TEMPLATE, MARKED, SPACED], ids=["plain", "marked", "spaced"])
def test_messages_have_the_tokens_that_transformers_gives_them(folder, template):
    from transformers import PreTrainedTokenizerFast

    write_template(folder, template)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.no_truncation()
    library.no_padding()
    marked = MARKED if template is TEMPLATE else template
    theirs = PreTrainedTokenizerFast(tokenizer_object=library, chat_template=marked)
    chats = [CHAT, CHAT[1:3], [CHAT[1], {"role": "assistant", "content": "the mat."}]]  # " the" is one token
    prepared(folder, *({"messages": chat} for chat in chats))
    for chat, (tokens, learned) in zip(chats, documents_of(folder), strict=True):
        found = theirs.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        assert tokens.tolist() == found["input_ids"]
        mask = np.array(found["assistant_masks"])
        if (
            template is TEMPLATE
        ):  # nothing marks the end of an answer but the next message: its line break belongs to it
            mask[1:] |= mask[:-1]
        assert learned.tolist() == mask.tolist()


def test_an_answer_is_learned_to_its_end_and_the_prompt_is_only_read(folder):
    prepared(folder, {"prompt": "The cat sat ", "answer": "on the mat."}, {"prompt": "", "completion": "<|im_end|>"})
    tokenizer = load_tokenizer(str(folder), is_masked=False)
    (tokens, learned), (other, _) = documents_of(folder)
    # As a prompt is given to the model: with the token that this file puts before every text.
    assert tokenizer.decode(tokens) == "<|endoftext|>The cat sat on the mat.<|im_end|>"
    assert tokenizer.decode(tokens[learned == 1]) == "on the mat.<|im_end|>"
    assert tokenizer.separator == tokens[-1]
    assert len(other) > 5  # the name of a special token is ordinary text


def test_half_of_a_surrogate_pair_is_replaced(folder):
    prepared(folder, '{"prompt": "a\\ud800?", "answer": "b"}', tokenizer="byte")
    ((tokens, learned),) = documents_of(folder)
    assert bytes(tokens.tolist()).decode() == "a\ufffd?b\0"
    assert learned.tolist() == [0] * 5 + [1, 1]


def test_bytes_are_learned_from_the_first_byte_of_the_answer(folder):
    prepared(folder, {"prompt": "é?", "answer": "ñ."}, tokenizer="byte")
    ((tokens, learned),) = documents_of(folder)
    assert bytes(tokens.tolist()) == "é?ñ.\0".encode()
    assert learned.tolist() == [0, 0, 0, 1, 1, 1, 1]


def test_the_command_says_what_is_learned_and_how_to_train(folder, capsys):
    file = write_lines(folder, {"messages": CHAT})
    with gzip.open(f"{file}.gz", "wt") as compressed:
        compressed.write(json.dumps({"prompt": "a", "response": "b"}))
    flags = ["--format=chat", "--seq_len=200", f"--tokenizer={folder}", f"--output={folder}/out"]
    assert main([f"--input={file}*", *flags]) == 0
    shown = capsys.readouterr().out
    assert "documents  2" in shown
    assert "learned    " in shown
    assert "out.loss.bin" in shown
    assert shown.rstrip().endswith("--config.data.seq_len=200 --config.data.packing=documents")
    assert "vocab_size" not in shown
    assert main([f"--input={file}", *flags]) == 2  # nothing is overwritten
    # Without answers to learn, what said so goes.
    assert main([f"--input={file}.gz", "--format=jsonl", "--jsonl_key=prompt", *flags[2:], "--overwrite"]) == 0
    assert read_learned(IndexedTokens.open(f"{folder}/out")) is None


WRONG = {
    "no JSON": ("{", r"chats.jsonl:2 is not JSON"),
    "a list": ("[1]", r"chats.jsonl:2 is no conversation(.|\n)*found list"),
    "no answer": ({"prompt": "a"}, r"chats.jsonl:2 is no conversation(.|\n)*the keys prompt"),
    "two answers": ({"prompt": "a", "answer": "b", "response": "c"}, r"chats.jsonl:2 is no conversation"),
    "an empty answer": ({"prompt": "a", "answer": ""}, r"chats.jsonl:2 has an empty answer"),
    "no text": ({"prompt": 3, "answer": "b"}, r"chats.jsonl:2 has no text under 'prompt'"),
    "no messages": ({"messages": []}, r"chats.jsonl:2 has no messages"),
    "an unknown role": (
        {"messages": [{"role": "robot", "content": "a"}]},
        r"chats.jsonl:2 message 1 has an unknown role(.|\n)*'robot'; roles: system",
    ),
    "nothing said": ({"messages": [{"role": "user", "content": None}]}, r"chats.jsonl:2 message 1 has no text"),
    "an empty message of the assistant": (
        {"messages": [{"role": "assistant", "content": ""}]},
        r"chats.jsonl:2 message 1 is an empty answer",
    ),
    "a question alone": ({"messages": CHAT[:2]}, r"chats.jsonl:2 has no answer"),
    "an end of message inside": (
        {"messages": [{"role": "user", "content": "a<|im_end|>"}, CHAT[2]]},
        r"chats.jsonl:2 message 1 has the name of a special token in its text",
    ),
    "too long": ({"prompt": "a" * 500, "answer": "b"}, r"chats.jsonl:2 is longer than a row(.|\n)*--seq_len=200"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_line_is_named_and_nothing_is_written(folder, name):
    line, message = WRONG[name]
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(DataError, match=message) as error:
        prepared(folder, {"messages": CHAT}, line, seq_len=200)
    assert "Traceback" not in str(error.value)
    assert len(str(error.value).splitlines()) < 10
    assert sorted(path.name for path in folder.iterdir()) == sorted([*before, "chats.jsonl"])


def test_a_template_that_rewrites_answers_is_refused_unless_it_marks_them(folder):
    write_template(folder, FORGETFUL)
    prepared(folder, {"messages": CHAT[:3]})
    with pytest.raises(
        DataError, match=r"chats.jsonl:1 has answers that the template writes otherwise(.|\n)*generation"
    ):
        prepared(folder, {"messages": CHAT})


def test_special_tokens_of_the_map_are_known_to_the_template(folder):
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": None}))
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content + eos_token }}{% endfor %}"
    )
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    prepared(folder, {"messages": CHAT[1:3]})
    ((tokens, learned),) = documents_of(folder)
    tokenizer = load_tokenizer(str(folder), is_masked=False)
    assert tokenizer.decode(tokens[learned == 1]) == "Sur le café ☕.<|im_end|>"


@pytest.mark.parametrize("template", [["a text"], {"a": "b"}, 3])
def test_a_template_that_is_no_text_is_named(folder, template):
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(ConfigError, match=r"tokenizer_config.json has a chat template that cannot be read"):
        prepared(folder, {"messages": CHAT})


def test_a_conversation_whose_answer_the_template_leaves_out_is_named(folder):
    write_template(folder, "{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}")
    with pytest.raises(DataError, match=r"chats.jsonl:1 has nothing to learn"):
        prepared(folder, {"messages": CHAT})


def test_a_template_sees_the_messages_and_nothing_of_python(folder):
    write_template(folder, "{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(DataError, match=r"chats.jsonl:1 is refused by the chat template"):
        prepared(folder, {"messages": CHAT})
    write_template(folder, "{{ 1 // 0 }}")
    with pytest.raises(DataError, match=r"refused by the chat template(.|\n)*ZeroDivisionError"):
        prepared(folder, {"messages": CHAT})
    write_template(folder, "{{ raise_exception('no system messages') }}")
    with pytest.raises(DataError, match=r"refused by the chat template(.|\n)*no system messages"):
        prepared(folder, {"messages": CHAT})
    write_template(folder, "{% for message in %}")
    with pytest.raises(ConfigError, match=r"chat template that cannot be read(.|\n)*line 1"):
        prepared(folder, {"messages": CHAT})
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(DataError, match=r"has messages, and the tokenizer no chat template"):
        prepared(folder, {"messages": CHAT})
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    prepared(folder, {"messages": CHAT})


@pytest.mark.parametrize("more", [{"seq_len": None}, {"tokenizer": "bpe:400"}, {"is_masked": True}])
def test_a_chat_needs_a_row_and_a_tokenizer(folder, more):
    file = write_lines(folder, {"messages": CHAT})
    given = {"tokenizer": str(folder), "seq_len": 100, "file_format": "chat", "output": str(folder / "out"), **more}
    with pytest.raises(ConfigError, match="--format=chat"):
        prepare([file], **given)


def test_another_text_than_that_of_the_loss_is_refused(folder):
    prepared(folder, {"prompt": "a", "answer": "b"}, tokenizer="byte")
    (folder / "out.loss.idx").rename(folder / "kept.idx")
    (folder / "out.loss.bin").rename(folder / "kept.bin")
    prepared(folder, {"prompt": "a", "answer": "bc"}, tokenizer="byte")
    (folder / "kept.idx").rename(folder / "out.loss.idx")
    (folder / "kept.bin").rename(folder / "out.loss.bin")
    sizes = {"vocab_size": 256, "heldout_fraction": 0.5, "batch_size": 1, "seq_len": 1}
    with pytest.raises(DataError, match=r"out.loss.bin is of another text(.|\n)*4 tokens(.|\n)*3"):
        load_corpus(f"indexed:{folder}/out", tokenizer=load_tokenizer("byte", is_masked=False), **sizes)


def test_what_is_learned_belongs_to_the_fingerprint(folder):
    prepared(folder, *[{"prompt": "ab", "answer": "cd"}] * 20, tokenizer="byte")
    sizes = {"vocab_size": 256, "heldout_fraction": 0.5, "batch_size": 1, "seq_len": 4}

    def fingerprint():
        return load_corpus(
            f"indexed:{folder}/out", tokenizer=load_tokenizer("byte", is_masked=False), **sizes
        ).fingerprint

    first = fingerprint()
    assert first == fingerprint()
    prepared(folder, *[{"prompt": "abc", "answer": "d"}] * 20, tokenizer="byte")
    assert fingerprint() != first
