"""Chat templates written for the tests, each in the manner of a family of models."""

QWEN_THINKING = """
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{% endif %}
    {{- 'You may call these functions:\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' }}{{ tool | tojson }}
    {%- endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}
        {%- set ns.last_query = messages|length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}{% continue %}{% endif %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if not reasoning and '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last_query and reasoning %}
            {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {%- generation %}{{- content }}{% endgeneration %}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}
"""

LLAMA3 = """
{{- bos_token }}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- if not date_string is defined %}{% set date_string = strftime_now('%Y') %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + date_string + '\n' }}
{%- if tools is not none %}
    {{- 'Environment: ipython\n' }}
    {%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ '\n\n' }}{% endfor %}
{%- endif %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.tool_calls is defined and message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception('only one tool call at once') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' }}{{ call.arguments | tojson }}{{ '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim }}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""

MISTRAL_TOOLS = """
{%- set ns = namespace(turn=0, system='') %}
{%- for message in messages if message.role == 'system' %}{% set ns.system = message.content %}{% endfor %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and loop.last %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + (ns.system + '\n\n' if ns.system and loop.last else '') + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' and message.tool_calls is defined and message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
            {{- ', ' if not loop.last else ']' + eos_token }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + '}[/TOOL_RESULTS]' }}
    {%- elif message.role != 'system' %}
        {{- raise_exception('Only user, assistant, system and tool roles are supported, not ' + message.role) }}
    {%- endif %}
{%- endfor %}
"""

CHATML = """
{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
<|im_start|>system
You are helpful.<|im_end|>
    {% endif %}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
"""

RAG = """{% for document in documents or [] %}[{{ loop.index }}] {{ document.title }}: {{ document.text }}
{% endfor %}{% for message in messages %}{{ message.role | upper }}> {{ message.content }}
{% endfor %}{{ 'ASSISTANT>' if add_generation_prompt }}"""

STYLES = {
    "qwen_thinking": QWEN_THINKING,
    "llama3": LLAMA3,
    "mistral_tools": MISTRAL_TOOLS,
    "chatml": CHATML,
    "gemma": GEMMA,
    "rag": RAG,
}

DEEPSEEK_V3 = """{{ bos_token }}{% set ns = namespace(first=false) %}{% for message in messages %}
{%- if message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}{% endif %}
{%- if message['role'] == 'assistant' and message['content'] is none %}
    {%- for tool in message['tool_calls'] %}
        {{- '<|Assistant|><|calls|>' if loop.first else '\n' }}
        {{- '<|call|>' + tool['type'] + '<|sep|>' + tool['function']['name'] + '\n```json\n' }}
        {{- tool['function']['arguments'] + '\n```<|call end|>' }}
    {%- endfor %}{{ '<|calls end|>' }}
{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none %}
    {{- '<|Assistant|>' + message['content'].split('</think>')[-1] + eos_token }}
{%- endif %}
{%- if message['role'] == 'tool' %}{{ '<|output|>' + message['content'] + '<|output end|>' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"""
"""DeepSeek V3, R1 and R1's distilled models: a call is shown where the content is null, its arguments are a string."""

DEEPSEEK_V31 = """{{ bos_token }}{% for message in messages %}
{%- if message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}{% endif %}
{%- if message['role'] == 'assistant' and message['tool_calls'] is defined and message['tool_calls'] is not none %}
    {{- '<|Assistant|></think>' }}
    {%- for tool in message['tool_calls'] %}
        {%- if loop.first %}{{ (message['content'] or '') + '<|calls|>' }}{% endif %}
        {{- '<|call|>' + tool['function']['name'] + '<|sep|>' + tool['function']['arguments'] + '<|call end|>' }}
    {%- endfor %}{{ '<|calls end|>' + eos_token }}
{%- elif message['role'] == 'assistant' %}{{ '<|Assistant|></think>' + message['content'] + eos_token }}{% endif %}
{%- if message['role'] == 'tool' %}{{ '<|output|>' + message['content'] + '<|output end|>' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|Assistant|></think>' }}{% endif %}"""
"""DeepSeek V3.1: arguments are a string, the content is anything."""

QWEN_CODER = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
<function={{ call.function.name }}>
{%- for name, value in call.function.arguments.items() %}
<parameter={{ name }}>
{{ value if value is string else value | tojson }}
</parameter>
{%- endfor %}
</function>
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Qwen3 Coder, and with other tags GLM 4.5 and MiniMax M2: arguments have to be an object."""

HERMES = """{{ bos_token }}{% for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
    {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
    {{- call.function.arguments | tojson }}{{ '}\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

PYTHON_REPR = """{% for message in messages %}[{{ message.role }}]{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments }}){% endfor %}
{% endfor %}"""
"""Prints an object as Python writes it: a string is JSON."""

WITH_CALLS = {
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "qwen_coder": QWEN_CODER,
    "hermes": HERMES,
    "python_repr": PYTHON_REPR,
    "qwen_thinking": QWEN_THINKING,
    "llama3": LLAMA3,
    "mistral_tools": MISTRAL_TOOLS,
}
"""Templates that show earlier calls of tools."""

HARMONY = """<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.

Reasoning: {{ reasoning_effort if reasoning_effort is defined else 'medium' }}

# Valid channels: analysis, commentary, final. Channel must be included for every message.
{%- if tools %}{{ "\nCalls to these tools must go to the commentary channel: 'functions'." }}{% endif %}
{{- '<|end|>' }}
{%- set has_developer = messages[0].role in ('developer', 'system') %}
{%- if has_developer or tools %}
    {{- '<|start|>developer<|message|>' }}
    {%- if has_developer %}{{ '# Instructions\n\n' + messages[0].content }}{% endif %}
    {%- if tools %}{{ '\n\n# Tools\n\n' + tools | tojson }}{% endif %}
    {{- '<|end|>' }}
{%- endif %}
{%- set turns = messages[1:] if has_developer else messages %}
{%- set last = namespace(name=none) %}
{%- for message in turns %}
    {%- if message.role == 'user' %}{{ '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {%- if last.name is none %}{{ raise_exception('There is no call before a result') }}{% endif %}
        {{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson + '<|end|>' }}
    {%- elif message.role == 'assistant' and 'tool_calls' in message %}
        {%- set later = namespace(has_final=false) %}
        {%- for other in turns[loop.index:] %}
            {%- if other.role == 'assistant' and 'tool_calls' not in other %}{% set later.has_final = true %}{% endif %}
        {%- endfor %}
        {%- if message.content and message.thinking %}
            {{- raise_exception('Cannot pass both content and thinking in a message with calls') }}
        {%- endif %}
        {%- if (message.content or message.thinking) and not later.has_final %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + (message.content or message.thinking) }}
            {{- '<|end|>' }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson + '<|call|>' }}
        {%- set last.name = call.name %}
    {%- elif message.role == 'assistant' %}
        {%- if loop.last and not add_generation_prompt and message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
        {%- set last.name = none %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
"""gpt-oss: it shows the first call of a message alone, reasoning from `thinking`, and instructions from the front."""
