"""A chat template in harmony for checkpoints of gpt-oss that have none, after openai/harmony's docs/format.md.

It reads messages as `harmony_messages` returns them.
"""

import json
from collections.abc import Mapping


def built_in_templates(files: Mapping[str, str]) -> dict[str, str]:
    """Returns the templates of a folder without any, by name: one if its config.json is gpt-oss's."""
    try:
        config = json.loads(files.get("config.json", "{}"))
    except ValueError:
        return {}
    is_gpt_oss = isinstance(config, dict) and config.get("model_type") == "gpt_oss"
    return {"default": HARMONY_TEMPLATE} if is_gpt_oss else {}


HARMONY_TEMPLATE = r"""
{%- macro fields(schema, indent) -%}
    {%- for name, field in schema['properties'].items() -%}
        {%- if field['description'] %}{{ indent + '// ' + field['description'] + '\n' }}{% endif -%}
        {{- indent + name + ('' if name in (schema['required'] or []) else '?') + ': ' }}
        {{- type_of(field, indent + '    ') + (' | null' if field['nullable'] else '') + ',' -}}
        {%- if field['default'] is defined -%}
            {{- ' // default: ' + (field['default'] if field['enum'] else field['default'] | tojson) -}}
        {%- endif -%}
        {{- '\n' -}}
    {%- endfor -%}
{%- endmacro -%}
{%- macro type_of(schema, indent) -%}
    {%- set options = schema['oneOf'] or schema['anyOf'] -%}
    {%- if options -%}
        {%- for option in options %}{{ type_of(option, indent) + (' | ' if not loop.last else '') }}{% endfor -%}
    {%- elif schema['type'] == 'object' and schema['properties'] -%}
        {{- '{\n' + fields(schema, indent) + indent + '}' -}}
    {%- elif schema['type'] == 'string' and schema['enum'] -%}
        {{- '"' + schema['enum'] | join('" | "') + '"' -}}
    {%- elif schema['type'] == 'array' -%}
        {{- type_of(schema['items'], indent) + '[]' if schema['items'] else 'Array<any>' -}}
    {%- elif schema['type'] == 'integer' -%}number
    {%- elif schema['type'] is string -%}{{ schema['type'] }}
    {%- elif schema['type'] -%}{{ schema['type'] | join(' | ') | replace('integer', 'number') }}
    {%- else -%}any
    {%- endif -%}
{%- endmacro -%}
{{- '<|start|>system<|message|>' }}
{{- model_identity if model_identity is defined else 'You are ChatGPT, a large language model trained by OpenAI.' }}
{{- '\nKnowledge cutoff: 2024-06\nCurrent date: ' + strftime_now('%Y-%m-%d') + '\n\nReasoning: ' }}
{{- reasoning_effort if reasoning_effort is defined else 'medium' }}
{{- '\n\n# Valid channels: analysis, commentary, final. Channel must be included for every message.' }}
{{- "\nCalls to these tools must go to the commentary channel: 'functions'." if tools }}{{ '<|end|>' }}
{%- set instructions = messages[0].content if messages[0].role in ('system', 'developer') else '' %}
{%- if instructions or tools %}
    {{- '<|start|>developer<|message|>' }}
    {{- '# Instructions\n\n' + instructions if instructions }}
    {{- '\n\n' if instructions and tools }}
    {%- if tools %}
        {{- '# Tools\n\n## functions\n\nnamespace functions {\n\n' }}
        {%- for tool in tools %}
            {%- set parameters = tool.function.parameters %}
            {%- for line in (tool.function.description or '').splitlines() %}{{ '// ' + line + '\n' }}{% endfor %}
            {{- 'type ' + tool.function.name + ' = ' }}
            {{- '(_: {\n' + fields(parameters, '') + '})' if parameters and parameters['properties'] else '()' }}
            {{- ' => any;\n\n' }}
        {%- endfor %}
        {{- '} // namespace functions' }}
    {%- endif %}
    {{- '<|end|>' }}
{%- endif %}
{%- set state = namespace(last_final=-1, name='') %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and not message.tool_calls %}{% set state.last_final = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {%- if not state.name %}{{ raise_exception('a result needs a call before it') }}{% endif %}
        {{- '<|start|>functions.' + state.name + ' to=assistant<|channel|>commentary<|message|>' + message.content }}
        {{- '<|end|>' }}
    {%- elif message.role == 'assistant' %}
        {%- if message.thinking and (loop.index0 > state.last_final or (loop.last and not add_generation_prompt)) %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- set call = message.tool_calls[0].function %}
            {%- set state.name = call.name %}
            {%- if message.content %}
                {{- '<|start|>assistant<|channel|>commentary<|message|>' + message.content + '<|end|>' }}
            {%- endif %}
            {{- '<|start|>assistant<|channel|>commentary to=functions.' + call.name + ' <|constrain|>json<|message|>' }}
            {{- (call.arguments if call.arguments is string else call.arguments | tojson) + '<|call|>' }}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{{- '<|start|>assistant' if add_generation_prompt }}"""
