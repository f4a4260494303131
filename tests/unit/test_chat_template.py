"""Chat templates: what they render, what messages they take, and what hostile ones cannot do."""

import json
import time

import pytest

from outrider.errors import ModelFileError, RequestError, UserError
from outrider.models.chat_template import CHATML, ChatTemplate
from outrider.models.template_sandbox import MAX_SECONDS
from outrider.models.tokenizer import Tokenizer
from tests.vocabulary import byte_level_vocabulary

TOY = Tokenizer.from_gguf(byte_level_vocabulary())
USER = {"role": "user", "content": "hi"}


def render(source, messages=(USER,), **options):
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(list(messages), **options)


def test_chatml():
    messages = [{"role": "system", "content": "Be brief."}, USER]
    prompt = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    assert render(CHATML, messages, add_generation_prompt=False) == prompt
    assert render(CHATML, messages) == prompt + "<|im_start|>assistant\n"


def test_blocks_are_trimmed_as_model_templates_expect():
    assert (
        render("{% for m in messages %}\n    {% if true %}\n{{ m.role }}\n    {% endif %}\n{% endfor %}\n") == "user\n"
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}|{{ eos_token }}", "<s>|</s>"),
        ("{{ messages[0]['content'] + '<b>' }}", "hi<b>"),
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}"
         "{% endfor %}", "02"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{% endfor %}", "1/1True"),
        ("{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m('a') ~ m(2) }}", "[a][2]"),
        ("{{ ' a-b '.strip().split('-') | join('+') }}{{ 'x'.replace('x', 'y') }}{{ '%02d' % 7 }}", "a+by07"),
        ("{{ 'a {} {}'.format(1, 'b') }}", "a 1 b"),
        ("{{ messages | map(attribute='role') | list }}{{ missing }}{{ none }}", "['user']None"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi"),
        ("{{ messages[0].content is string }}{{ messages[0].get('x', 'd') }}{{ messages[-1:] | length }}", "Trued1"),
        ("{{ '<' | e }}{{ '<' | safe }}{{ dict(a=1).items() | list }}", "&lt;<[('a', 1)]"),
        ("{% set t %}{{ 'a' }}b{% endset %}{{ t | upper }}", "AB"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)  # fmt: skip
def test_the_language_of_model_templates(source, expected):
    assert render(source) == expected


def test_tools_and_variables_reach_the_template():
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert render("{{ tools[0].function.name }}{{ enable_thinking }}", tools=tools, enable_thinking=False) == "fFalse"
    assert render("{{ 'none' if not tools else 'some' }}") == "none"
    assert render("{{ tools is none }}", tools=[]) == "True"


def test_text_parts_are_joined_and_call_arguments_become_objects():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    source = "{{ messages[0].content }}|{{ messages[1].content }}|{{ messages[1].tool_calls[0].function.arguments.x }}"
    before = json.dumps(messages)
    assert render(source, messages) == "a\nb||1"
    assert json.dumps(messages) == before


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ("hi", "messages is a str"),
        (["hi"], r"messages\[0\] is a str"),
        ([USER, {"content": "x"}], r"messages\[1\]\.role is None"),
        ([{"role": "", "content": "x"}], r"messages\[0\]\.role is ''"),
        ([{"role": "user"}], r"messages\[0\]\.content is missing"),
        ([{"role": "assistant", "content": None}], r"messages\[0\]\.content is missing"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content is a int"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\]\.content\[0\] is a str"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\]\.type is 'image_url'.*'text'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text is None"),
        ([{"role": "assistant", "tool_calls": {"a": 1}}], r"messages\[0\]\.tool_calls is a dict"),
        ([{"role": "assistant", "tool_calls": ["x"]}], r"tool_calls\[0\] is a str"),
        ([{"role": "user", "content": "x" * 3_000_000}], "3000000 characters; at most 2097152"),
    ],
)
def test_malformed_messages_are_refused_by_index_and_field(messages, message):
    with pytest.raises(RequestError, match=message):
        ChatTemplate(CHATML).render(messages)


def test_a_template_can_refuse_messages():
    with pytest.raises(RequestError, match="refuses these messages: roles must alternate"):
        render("{{ raise_exception('roles must\n alternate') }}")


@pytest.mark.parametrize("source", ["{{ 1/0 }}", "{{ a.b }}", "{{ none + 1 }}", "{% for x in 3 %}{% endfor %}"])
def test_a_failing_template_is_an_error_of_the_request(source):
    with pytest.raises(RequestError, match="fails on these messages"):
        render(source)


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ x", "{{ x | nothing }}", "{% unknown %}", "{{ " + "(" * 5000 + "}}"]
)
def test_an_invalid_template_is_an_error_of_the_file(source):
    with pytest.raises(ModelFileError, match="chat template"):
        ChatTemplate(source)


def test_a_huge_template_is_refused_before_it_is_compiled():
    with pytest.raises(ModelFileError, match="524289 characters"):
        ChatTemplate("x" * (512 * 1024 + 1))


DOUBLING = "{% set ns = namespace(x=START) %}{% for i in range(64) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x }}"
HOSTILE = {
    "class of a string": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "class printed": "{{ ''.__class__ }}",
    "class by item": "{{ ''['__class__'] }}",
    "class by attr filter": "{{ '' | attr('__class__') }}",
    "class by map": "{{ [''] | map(attribute='__class__') | list }}",
    "class by format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "class by format_map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "globals of a function": "{{ raise_exception.__globals__ }}",
    "globals of self": "{{ self.__init__.__globals__ }}",
    "globals of a macro": "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}",
    "globals of namespace": "{{ namespace.__init__.__globals__ }}",
    "builtins by cycler": "{{ cycler.__init__.__globals__.os }}",
    "changing a message": "{{ messages[0].update({'content': ''}) }}",
    "changing the list": "{{ messages.append(1) }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "from import": "{% from 'os' import path %}",
    "extends": "{% extends 'base' %}",
    "huge range": "{% for i in range(10**12) %}{% endfor %}",
    "nested ranges": "{% for i in range(9999) %}{% for j in range(9999) %}{% for k in range(9999) %}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "loops over strings": "{% set s = 'x' * 4000 %}{% for a in s %}{% for b in s %}{% for c in s %}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "output bomb": "{% for i in range(9999) %}{% for j in range(9999) %}" + "x" * 9999 + "{% endfor %}{% endfor %}",
    "output bomb in a macro": "{% macro m() %}{% for i in range(9999) %}{% for j in range(99) %}" + "x" * 9999
    + "{% endfor %}{% endfor %}{% endmacro %}{{ m() }}",
    "endless macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "branching macro": "{% macro m(n) %}{{ m(n - 1) if n }}{{ m(n - 1) if n }}{% endmacro %}{{ m(64) }}",
    "recursive loop": "{% for x in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "multiplied string": "{{ 'x' * 10**12 }}",
    "multiplied list": "{{ ([1] * 10**12) | length }}",
    "power": "{{ 10 ** (10 ** 12) }}",
    "doubled by ~": DOUBLING.replace("START", "'x'").replace("STEP", "ns.x ~ ns.x"),
    "doubled by +": DOUBLING.replace("START", "'x'").replace("STEP", "ns.x + ns.x"),
    "doubled list": DOUBLING.replace("START", "[1]").replace("STEP", "ns.x + ns.x"),
    "nested list": DOUBLING.replace("START", "[1]").replace("STEP", "[ns.x, ns.x]"),
    "nested dict": DOUBLING.replace("START", "[1]").replace("STEP", "{'a': ns.x, 'b': ns.x}"),
    "nested tuple": DOUBLING.replace("START", "[1]").replace("STEP", "(ns.x, ns.x)"),
    "doubled by %": DOUBLING.replace("START", "'x'").replace("STEP", "'%s%s' % (ns.x, ns.x)"),
    "doubled by format": DOUBLING.replace("START", "'x'").replace("STEP", "'{}{}'.format(ns.x, ns.x)"),
    "doubled by join": DOUBLING.replace("START", "'x'").replace("STEP", "ns.x.join(['', ns.x, ''])"),
    "doubled by join filter": DOUBLING.replace("START", "'x'").replace("STEP", "[ns.x, ns.x] | join"),
    "doubled by replace": DOUBLING.replace("START", "'x'").replace("STEP", "ns.x.replace('x', 'xx')"),
    "doubled by replace filter": DOUBLING.replace("START", "'x'").replace("STEP", "ns.x | replace('x', 'xx')"),
    "doubled by block set": "{% set ns = namespace(x='x') %}{% for i in range(64) %}"
    "{% set t %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = t %}{% endfor %}",
    "self-reference": "{% set n = namespace() %}{% set n.x = n %}{{ n }}",
    "wide format": "{{ '%999999999d' % 1 }}",
    "star format": "{{ '%*d' % (999999999, 1) }}",
    "wide str.format": "{{ '{:>999999999}'.format(1) }}",
    "center": "{{ 'x'.center(999999999) }}",
    "zfill": "{{ 'x'.zfill(999999999) }}",
    "indent": "{{ ('x\n' * 9999) | indent(999999999) }}",
    "json indent": "{{ messages | tojson(indent=999999999) }}",
    "wide date": "{{ strftime_now('%999999999Y') }}",
    "bytes of an int": "{{ (1).to_bytes(999999999, 'big') }}",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_stopped_quickly_in_one_line(name):
    started = time.monotonic()
    with pytest.raises(UserError) as caught:
        render(HOSTILE[name])
    assert time.monotonic() - started < 2 * MAX_SECONDS
    message = str(caught.value)
    assert "chat template" in message
    assert "\n" not in message
    assert len(message) < 400


def test_after_a_hostile_template_the_next_one_renders():
    template = ChatTemplate("{% for i in range(n) %}{% for j in range(n) %}{{ j }}{% endfor %}{% endfor %}")
    with pytest.raises(ModelFileError):
        template.render([USER], n=9999)
    assert template.render([USER], n=2) == "0101"


def test_a_long_conversation_stays_within_the_bounds():
    messages = [{"role": "user", "content": "word " * 50} for _ in range(4000)]
    assert render(CHATML, messages).count("<|im_start|>") == 4001


def test_a_model_without_a_template_gets_chatml_with_the_reason():
    plain = ChatTemplate.for_tokenizer(None, TOY)
    assert (plain.source, plain.is_own) == (CHATML, False)
    assert "no tokens of this model" in plain.reason
    marked = Tokenizer.from_gguf(byte_level_vocabulary(extra=(("<|im_start|>", 3),)))
    assert "vocabulary has ChatML" in ChatTemplate.for_tokenizer(None, marked).reason
    own = ChatTemplate.for_tokenizer("{{ bos_token }}{{ eos_token }}", TOY)
    assert own.render([USER]) == "<|begin|><|im_end|>"
    assert (own.is_own, own.reason) == (True, "the model's own")
    assert ChatTemplate.for_tokenizer(CHATML, TOY).is_own


def test_the_template_of_a_folder(tmp_path):
    def source():
        return ChatTemplate.from_folder(tmp_path, TOY).source

    assert source() == CHATML
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "one"}))
    assert source() == "one"
    config.write_text(json.dumps({"chat_template": [{"name": "default", "template": "two"}]}))
    assert source() == "two"
    (tmp_path / "chat_template.jinja").write_text("three")
    assert source() == "three"
    (tmp_path / "chat_template.jinja").unlink()
    config.write_text("[]")
    with pytest.raises(ModelFileError, match="its JSON is a list, expected an object"):
        source()
