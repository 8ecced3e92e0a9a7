#!/usr/bin/env python3
"""Write reference renderings of chat templates (needs: pip install jinja2==3.1.6).

usage: templates.py OUT.json [tokenizer_config.json ...]

Each case is {"template", "vars", "want"} or, where jinja2 fails, "fails":
true. The environment is the one of transformers: an immutable sandbox,
trim_blocks, lstrip_blocks, loop controls, and tojson without HTML escapes.
Templates of the given config files are rendered over sample conversations
instead of the built-in ones.
"""

import json
import sys

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment


def env():
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller):
            return caller()

    e = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    e.filters["tojson"] = tojson
    e.globals["raise_exception"] = raise_exception
    return e


TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Get \"weather\" <b>天气</b> & 'more'", "parameters": {
    "type": "object", "properties": {"zeta": {"type": "string"}, "alpha": {"type": "number", "default": 1.0, "maximum": 1e20, "min": -0.5e-7},
                                     "n": {"enum": [1, 12345678901234567890, None, True, False, [], {}]}}, "required": ["zeta"]}}},
         {"type": "function", "function": {"name": "now", "description": None, "parameters": None}}]
CALL = [{"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"zeta": "Zürich\n\u0001\u2028", "alpha": 2}}}]
CHATS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Hello\n"}, {"role": "assistant", "content": "\n Hey 👋 "},
     {"role": "user", "content": "你好 'quoted' \"double\" \\back"}],
    [{"role": "user", "content": "w?"}, {"role": "assistant", "content": "", "tool_calls": CALL},
     {"role": "tool", "content": "{\"t\": 21}", "tool_call_id": "call_1"}, {"role": "tool", "content": "x"}, {"role": "user", "content": "thanks"},
     {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyou're welcome"}],
    [{"role": "user", "content": "<tool_response>a</tool_response>"}, {"role": "assistant", "content": "b", "reasoning_content": "\nc\n"}],
    [{"role": "system", "content": "s"}, {"role": "assistant", "content": "a", "tool_calls": CALL + CALL}, {"role": "user", "content": "u"}],
    [],
]


def contexts():
    for chat in CHATS:
        for tools in (None, TOOLS):
            for gen in (True, False):
                yield {"messages": chat, "tools": tools, "documents": None, "add_generation_prompt": gen, "bos_token": "<s>", "eos_token": "</s>"}
    yield {"messages": CHATS[1], "tools": None, "add_generation_prompt": True, "enable_thinking": False, "bos_token": "<s>", "eos_token": "</s>"}


CHATML = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages and messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}{{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, open=true) %}
{%- for m in messages[::-1] %}
    {%- set i = (messages|length - 1) - loop.index0 %}
    {%- if ns.open and m.role == "user" and not(m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}
        {%- set ns.open = false %}{%- set ns.last = i %}
    {%- endif %}
{%- endfor %}
{% for message in messages %}
    {%- if message.role in ["user", "system"] %}
<|im_start|>{{ message.role }}
{{ message['content'] | trim }}<|im_end|>
    {% elif message.role == "assistant" %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {%- set reasoning = message.reasoning_content if message.reasoning_content is defined and message.reasoning_content is not none else '' %}
<|im_start|>assistant
{% generation %}{% if loop.index0 > ns.last or reasoning %}<think>{{ reasoning.strip('\\n') }}</think>{% endif %}{{ content }}{% endgeneration %}
        {%- for call in message.tool_calls or [] %}
            {%- set f = call.function %}
            {{- '\\n<tool_call>\\n{"name": "' ~ f.name ~ '", "arguments": ' }}
            {%- if f.arguments is string %}{{- f.arguments }}{%- else %}{{- f.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}<|im_end|>
    {% else %}
        {%- if loop.first or loop.previtem.role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think></think>
{% endif %}{% endif %}
"""
HEADERS = """{{ bos_token }}{% macro block(role, text='none') -%}
<|start|>{{ role|upper }}<|end|>
{{ text }}{% endmacro %}
{# a comment #}
{% set system_message = '' %}
{% if messages and messages[0]['role'] == 'system' %}{% set system_message = messages[0]['content']|trim %}{% set messages = messages[1:] %}{% endif %}
{{ block('system', system_message) }}{{ block(role='x') }}
{%- for message in messages if message['role'] != 'tool' %}
    {%- if loop.index0 % 2 == 0 and message['role'] == 'assistant' %}{{ "odd order" }}{% endif %}
{{ block(message.role, message.content|trim ~ eos_token) }}
    {%- if not loop.last %},{% endif %}
{%- else %}
nothing
{%- endfor %}
{%- if tools is not none and tools %}{{ tools | tojson(indent=2) }}{{ tools|map(attribute='function.name')|join(', ') }}
{{ (tools|selectattr('function.description', 'none')|list|length) }}{% endif %}
{%- if add_generation_prompt %}{{ '\\n<|assistant|>' }}{% endif %}"""
SMALL = """{{ 1 + 2 * 3 - 4 // 3 }} {{ 7 % 3 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 7 / 2 }} {{ 2 ** 3 ** 2 }} {{ 1.0 }} {{ 1e22 }} {{ 0.00001 }} {{ 1 ~ 2 }}
{{ 'a' < 'b' < 'c' }} {{ 1 < 2 and 2 < 1 or 3 }} {{ not 1 == 2 }} {{ 1 in [1, 2] }} {{ 'x' not in 'abc' }} {{ none }} {{ true }} {{ [1, 'a', none, 2.5, true] }}
{{ {'a': 1, 'b': [1, 2]} }} {{ (1,) }} {{ (1, 2) }} {{ "it's" }} {{ ["it's", 'q"', "b\\\\", "\\n\\t", "é", "\\x00"] }} {{ missing }} {{ missing is defined }} {{ missing|default('d') }}
{{ ''|default('d', true) }} {{ 'abc'[1] }} {{ 'abcdef'[1:4] }} {{ 'abcdef'[::-1] }} {{ 'abcdef'[-2:] }} {{ [1,2,3,4][::2] }} {{ [1,2,3][5:] }} {{ 'abc'[10] }}
{{ 'a,b,c'.split(',') }} {{ 'a b  c'.split() }} {{ 'a,b,c'.split(',', 1) }} {{ 'a,b,c'.rsplit(',', 1)[0] }} {{ '  x '.strip() }}| {{ 'xxaxx'.strip('x') }} {{ 'abc'.upper() }}
{{ 'hello world'.title() }} {{ 'hELLO'.capitalize() }} {{ 'hello'|capitalize }} {{ 'aXbX'.replace('X', '-') }} {{ 'aXbX'|replace('X', '-', 1) }} {{ 'abc'.find('c') }} {{ 'aaa'.count('a') }}
{{ 'l1\\nl2\\n\\nl3'|indent(2) }} {{ 'l1\\nl2'|indent(2, true) }} {{ [3,1]|first }} {{ [3,1]|last }} {{ 'abc'|reverse }} {{ [1,2]|reverse|list }} {{ 'é你👋'|length }}
{{ {'b':1,'a':2}|dictsort }} {{ {'b':1,'a':2}|items|list }} {% for k, v in {'b':1,'a':2}.items() %}{{ k }}={{ v }};{% endfor %} {{ {'a':1}.get('b', 'z') }} {{ {'a':1}['a'] }} {{ {'keys':1}.keys()|list }}
{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{{ loop.revindex }}{{ loop.cycle('x','y') }}{% endfor %}
{% set x %}  block {{ 1 }} {% endset %}[{{ x }}]{% set a, b = 1, 2 %}{{ a }}{{ b }} {{ 'y' if a == 1 else 'n' }} {{ 'y' if a == 2 }}|
{% raw %}{{ raw }}{% endraw %} {{ "a" "b" }} {{ 'x' is string }} {{ 1 is number }} {{ {} is mapping }} {{ [] is sequence }} {{ 3 is odd }} {{ 4 is divisibleby 2 }} {{ 1 is not none }} {{ 5 is in [5] }}
{{ '<&>'|tojson }} {{ {'z':1,'a':'é\\u2028'}|tojson }} {{ [1,[2,{}],{'a':[]}]|tojson(indent=4) }} {{ {'z':1,'a':2}|tojson(sort_keys=true) }} {{ [1,2]|tojson(separators=(',', ':')) }} {{ 'é👋'|tojson(ensure_ascii=true) }}
{{ '3'|int + 1 }} {{ 'x'|int }} {{ '2.5'|float }} {{ 3.7|int }} {{ -3|abs }} {{ 'a'*3 }} {{ ['a','b']|join('-') }} {{ [1,2]|length == 2 }} {{ [1,2,3]|select('odd')|list }} {{ ['a', '']|reject('equalto','')|list }}
{{ ['b','a','B']|unique|list }} {{ 'x'.startswith(('a','x')) }} {{ 'a\\nb\\r\\nc'.splitlines() }} {{ [[1,2],[3,4]]|map('first')|list if false else 0 }} {{ ('a' ~ 1)|upper }} {{ 'A'|lower ~ 'b'|upper }}
{%- if true -%}   tight   {%- endif -%}   
   {%+ if true %}plus{% endif +%}
   {% if true %}
   indented
   {% endif %}
end
"""
FAILING = ["{{ raise_exception('no') }}", "{{ missing.attr }}", "{{ missing.a.b }}", "{{ 'a' + 1 }}", "{{ 1 < 'a' }}", "{{ [1].append(2) }}", "{{ 1 / 0 }}", "{{ missing|tojson }}", "{{ none + 'a' }}", "{% for a, b in [[1]] %}{% endfor %}",
           "{% if %}", "{{ 'a", "{% for x in y %}", "{% unknown %}", "{{ x | unknown }}", "{{ 1 2 }}", "{{", "{% endif %}", "{{ messages.append(1) }}", "{{ range(100001)|length }}"]
LINES = [l + "\n" for l in SMALL.split("\n")]


def main():
    cases = []
    e = env()

    def add(template, variables):
        case = {"template": template, "vars": variables}
        try:
            case["want"] = e.from_string(template).render(**variables)
        except Exception as err:  # every kind of failure counts the same
            case["fails"] = True
            case["error"] = str(err)[:80]
        cases.append(case)

    if len(sys.argv) > 2:
        for path in sys.argv[2:]:
            t = json.load(open(path))["chat_template"]
            for c in contexts():
                add(t, c)
    else:
        for t in (CHATML, HEADERS):
            for c in contexts():
                add(t, c)
        ctx = {"messages": CHATS[1]}
        for t in [SMALL] + LINES + FAILING:
            add(t, ctx)
    json.dump(cases, open(sys.argv[1], "w"), ensure_ascii=False, indent=0)
    print(len(cases), "cases,", sum("want" in c for c in cases), "rendered")


main()
