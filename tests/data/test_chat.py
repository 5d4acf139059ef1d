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
from jaxpipe.data.prepare.templates import ChatTemplate, RefusedError
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
    return list(zip(np.split(indexed.tokens[:], ends[:-1]), np.split(learned[:], ends[:-1]), strict=True))


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
    "a key twice": (
        '{"prompt": "a", "answer": "b", "answer": "c"}',
        r"chats.jsonl:2 is not JSON(.|\n)*'answer' stands twice",
    ),
    "an unknown key": (
        {"prompt": "a", "answer": "b", "id": 3},
        r"chats.jsonl:2 has a key that is not followed: 'id'(.|\n)*known keys of a prompt: prompt, answer(.|\n)*"
        r"--ignore_key=id",
    ),
    "an unknown key of messages": (
        {"messages": CHAT, "id": 3},
        r"chats.jsonl:2 has a key that is not followed: 'id'(.|\n)*known keys of messages: messages, tools, documents,"
        r" chat_template_kwargs",
    ),
    "an unknown key of a message": (
        {"messages": [CHAT[1], {**CHAT[2], "score": 1}]},
        r"chats.jsonl:2 message 2 has a key that is not followed: 'score'(.|\n)*role, content, name",
    ),
    "a system prompt beside a prompt": (
        {"system": "Be kind.", "prompt": "a", "answer": "b"},
        r"chats.jsonl:2 has a key that is not followed: 'system'(.|\n)*first of the messages",
    ),
    "a system prompt beside messages": ({"system": "Be kind.", "messages": CHAT}, r"not followed: 'system'"),
    "a prompt beside messages": ({"prompt": "a", "answer": "b", "messages": CHAT}, r"not followed: 'prompt'"),
    "tools for a prompt": ({"prompt": "a", "answer": "b", "tools": []}, r"not followed: 'tools'"),
    "tools that the template does not read": (
        {"messages": CHAT, "tools": [{"type": "function"}]},
        r"chats.jsonl:2 has a key that is not followed: 'tools'(.|\n)*reads no other variable",
    ),
    "tools that are none": ({"messages": CHAT, "tools": "a"}, r"chats.jsonl:2 has no list of objects under 'tools'"),
    "a variable that the template does not read": (
        {"messages": CHAT, "chat_template_kwargs": {"enable_thinking": False}},
        r"chats.jsonl:2 has a key that is not followed: 'enable_thinking'",
    ),
    "a variable of transformers' own": (
        {"messages": CHAT, "chat_template_kwargs": {"add_generation_prompt": True}},
        r"chats.jsonl:2 has no variables under 'chat_template_kwargs'",
    ),
    "reasoning that the template does not read": (
        {"messages": [CHAT[1], {**CHAT[2], "reasoning": "le café"}]},
        r"chats.jsonl:2 message 2 has a key that is not followed: 'reasoning'",
    ),
    "half a weight": ({"messages": [CHAT[1], {**CHAT[2], "weight": 0.5}]}, r"message 2 says what is learned in a way"),
    "a question to learn": ({"messages": [{**CHAT[1], "train": True}, CHAT[2]]}, r"message 1 says what is learned"),
    "two opinions": (
        {"messages": [CHAT[1], {**CHAT[2], "weight": 1, "loss_mask": 0}]},
        r"message 2 says what is learned in a way that is not followed(.|\n)*weight=1, loss_mask=0",
    ),
    "no answer that is learned": ({"messages": [CHAT[1], {**CHAT[2], "weight": 0}]}, r"chats.jsonl:2 has no answer"),
    "an end of message in a key": (
        {"messages": [CHAT[1], {**CHAT[2], "name": "<|im_end|>"}]},
        r"chats.jsonl:2 message 2 has the name of a special token in its text(.|\n)*--markup",
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


READS_ALL = """{{ (documents is none)|string + (tools|length if tools else 0)|string + (mood or '') }}
{{- strftime_now('%Y')|length }}
{%- for message in messages %}{{ message.reasoning_content or '' }}{{ message.thinking or '' }}
{%- for call in message.tool_calls or [] %}{{ call|tojson(indent=1, sort_keys=true) }}{% endfor %}
{{- message.content or '' }}{{- message.language or '' }}|{% endfor %}"""


@pytest.mark.parametrize("key", ["reasoning", "thinking", "reasoning_content"])
def test_what_a_template_reads_is_followed(folder, key):
    write_template(folder, READS_ALL)
    asked = {"role": "assistant", "content": None, key: "a ", "tool_calls": [{"b": "é", "a": 1}]}
    line = {"messages": [{**CHAT[1], "language": "fr", "tool_call_id": "1"}, asked]}
    prepared(folder, line, {**line, "tools": [{}, {}], "documents": [{}], "chat_template_kwargs": {"mood": "!"}})
    tokenizer = load_tokenizer(str(folder), is_masked=False)
    texts = [tokenizer.decode(tokens) for tokens, _ in documents_of(folder)]
    said = 'Où est le chat?fr|a a {\n "a": 1,\n "b": "é"\n}|'
    assert texts == [f"True04{said}", f"False2!4{said}"]


def test_a_line_that_is_nested_too_deep_is_refused():
    """Python reads lines that it cannot write again, some calls further down."""
    deep = []
    for _ in range(100_000):
        deep = [deep]
    template = ChatTemplate("{{ tools|length }}", {}, "a file")
    assert template.render(CHAT, {"tools": deep[:0]})[0] == "0"
    with pytest.raises(RefusedError, match="nested too deep"):
        template.render(CHAT, {"tools": deep})


def test_marks_of_answers_are_left_out_of_a_text():
    """Also one inside of another, as templates of transformers may have them."""
    template = ChatTemplate(
        "{% for message in messages %}{% generation %}a{% generation %}b{% endgeneration %}c{% endgeneration %}"
        "{% endfor %}{% if add_generation_prompt %}{% generation %}d{% endgeneration %}{% endif %}",
        {},
        "a file",
    )
    assert template.render(CHAT[:2], {}) == ("abcabc", [(1, 2), (0, 3), (4, 5), (3, 6)])
    assert template.render(CHAT[:1], {}, is_asked=True) == ("abcd", [(1, 2), (0, 3), (3, 4)])


def test_a_key_to_ignore_is_left_out(folder):
    line = {"id": 1, "prompt": "a", "messages": [CHAT[1], {**CHAT[2], "score": 1}]}
    file = write_lines(folder, line)
    flags = [f"--input={file}", "--seq_len=200", f"--tokenizer={folder}", f"--output={folder}/out"]
    ignored = ["--ignore_key=id", "--ignore_key=prompt", "--ignore_key=score"]
    assert main([*flags, "--format=chat", *ignored]) == 0
    assert main([*flags, "--format=jsonl", *ignored, "--overwrite"]) == 2  # it would have no effect


def test_the_template_for_tools_is_used_where_there_are_tools(folder):
    several = {"default": TEMPLATE, "tool_use": "{{ tools[0].name }}" + TEMPLATE}
    named = [{"name": name, "template": template} for name, template in several.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    lines = [{"messages": CHAT}, {"messages": CHAT, "tools": [{"name": "sat"}]}]
    prepared(folder, *lines)
    first = [tokens.tolist() for tokens, _ in documents_of(folder)]
    tokenizer = load_tokenizer(str(folder), is_masked=False)
    assert tokenizer.decode(first[1]) == "sat" + tokenizer.decode(first[0])
    (folder / "chat_template.jinja").write_text(several["default"])
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(several["tool_use"])
    (folder / "tokenizer_config.json").unlink()
    prepared(folder, *lines)
    assert [tokens.tolist() for tokens, _ in documents_of(folder)] == first
    # The files of the data say as much.
    prepared(folder, *lines, tokenizer=str(folder / "out.tokenizer.json"))
    assert [tokens.tolist() for tokens, _ in documents_of(folder)] == first


@pytest.mark.parametrize("end", ["<|im_end|>", "<|endoftext|>"])
def test_markup_in_a_prompt_is_said_and_taken_if_asked_for(folder, capsys, end):
    """A prompt that was rendered before, with the beginning that the file puts before texts, and an end of its own.

    That is the end of a document, or the one that the template writes after an answer.
    """
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": end}))
    prompt = "<|endoftext|><|im_start|>user\nOù?<|im_end|>\n<|im_start|>assistant\n"
    answer = "Sur le café.<|im_end|>"
    file = write_lines(folder, {"prompt": prompt, "answer": answer}, {"prompt": "a", "answer": "b"})
    flags = [f"--input={file}", "--format=chat", "--seq_len=200", f"--tokenizer={folder}", f"--output={folder}/out"]
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.no_truncation()
    library.no_padding()
    whole = prompt + answer
    ids = library.encode(whole, add_special_tokens=False).ids
    assert main(flags) == 0
    said = capsys.readouterr().out
    assert "\nmarkup     1 lines" in said
    assert f"'<|endoftext|>' in {file}:1" in said
    assert "--markup" in said
    tokenizer = load_tokenizer(str(folder), is_masked=False)
    tokens, learned = documents_of(folder)[0]
    assert tokenizer.decode(tokens) == f"<|endoftext|>{whole}{end}"
    assert len(tokens) > len(ids) + 30
    assert main([*flags, "--markup", "--overwrite"]) == 0
    assert "\nmarkup " not in capsys.readouterr().out
    tokens, learned = documents_of(folder)[0]
    assert tokens.tolist() == ids  # neither a second beginning nor a second end
    assert tokenizer.decode(tokens[learned == 1]) == answer


def test_markup_in_messages_is_taken_if_asked_for(folder):
    chat = {"messages": [CHAT[1], {"role": "assistant", "content": "le<|im_end|>chat"}]}
    file = write_lines(folder, chat)
    sizes = {"tokenizer": str(folder), "output": str(folder / "out"), "file_format": "chat", "seq_len": 200}
    with pytest.raises(DataError, match="--markup"):
        prepare([file], **sizes)
    prepare([file], **sizes, reads_markup=True)
    ((tokens, _),) = documents_of(folder)
    assert (tokens == SPECIAL.index("<|im_end|>")).sum() == 3


def test_an_answer_that_is_not_learned_is_refused_where_marks_hide_it(folder):
    """One mark around all that follows the first message."""
    write_template(
        folder,
        "{{ messages[0].content }}{% generation %}{% for message in messages[1:] %}{{ message.content }}{% endfor %}"
        "{% endgeneration %}",
    )
    chat = [*CHAT[1:4], {**CHAT[4], "weight": 0}]
    with pytest.raises(DataError, match=r"chats.jsonl:1 has an answer that is not learned(.|\n)*1 parts are marked"):
        prepared(folder, {"messages": chat})
    prepared(folder, {"messages": CHAT[1:]})


TOO_LONG, TOO_LARGE = r"it computes for more than 0.5 s", r"it takes more than 1024 MiB of memory, or makes a text"
NESTED = "{% for _ in range(99999) %}" * 3 + "{% endfor %}" * 3
WITHOUT_END = {
    "nested loops": (NESTED, TOO_LONG),
    "one long operation": ("{% set n = 10 ** 10 %}{{ 10 ** n }}", TOO_LONG),
    "a constant that Jinja computes": ("{{ 10 ** (10 ** 10) }}", TOO_LONG),
    "indentation": ("{{ messages|tojson(indent=10**10) }}", TOO_LARGE),
    "a long text": ("{{ 'a' * (2 ** 23) }}", TOO_LARGE),
    "doubling": (
        "{% set a = namespace(b='aa') %}{% for _ in range(50) %}{% set a.b = a.b ~ a.b %}{% endfor %}",
        TOO_LARGE,
    ),
    "a call of itself": ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "RecursionError"),
    "brackets": ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", "RecursionError"),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.ci if name in ("doubling", "one long operation", "brackets") else ())
        for name in WITHOUT_END
    ],
)
def test_a_template_without_end_is_refused(folder, name, monkeypatch):
    template, message = WITHOUT_END[name]
    if message == TOO_LONG:  # else memory ends it, in whatever time that takes here
        monkeypatch.setattr("jaxpipe.data.prepare.sandbox.SECONDS", 0.5)
    if name == "one long operation":  # a line before it is rendered
        template = "{% if messages|length > 2 %}" + template + "{% endif %}" + TEMPLATE
    write_template(folder, template)
    with pytest.raises((DataError, ConfigError), match=message) as error:
        prepared(folder, {"messages": CHAT[1:3]}, {"messages": CHAT})
    is_at_once = isinstance(error.value, ConfigError)
    assert is_at_once == (name in ("a constant that Jinja computes", "brackets"))
    where = "has a chat template that cannot be read" if is_at_once else "is refused by the chat template"
    assert where in str(error.value)
    assert is_at_once or f"chats.jsonl:{2 if name == 'one long operation' else 1}" in str(error.value)
    assert not list(folder.glob("out*"))


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
