"""From what the user calls a model to a folder on this machine. No torch here: the HTTP process needs it too."""

from pathlib import Path

from mini_infer_engine.config.errors import ModelError

DEMO_MODEL = "demo"
DEMO_DIRECTORY = Path(__file__).parents[1] / "assets" / "demo"
_FILES_OF_A_MODEL = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def resolve_model(model: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """The folder that holds `model`: a folder as it is, "demo" from the package, anything else from the hub.

    A hub id is downloaded into huggingface_hub's cache (token from HF_TOKEN); without `weights` only the small files.

    Raises:
        ModelError: there is no such folder and the hub does not have it or cannot be reached.

    """
    if model == DEMO_MODEL:
        return DEMO_DIRECTORY
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelError(f"model {model!r} is a file; name the folder that holds it.")
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ModelError(f"model {model!r}: there is no such folder.")
    return _download(model, revision, weights=weights)


def _download(model: str, revision: str | None, *, weights: bool) -> Path:
    # Imported here: it takes a noticeable part of a second, and only hub ids need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    patterns = _FILES_OF_A_MODEL if weights else [p for p in _FILES_OF_A_MODEL if p != "*.safetensors"]
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
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
