"""Explains an API server's refusal of a model that is an image volume (KEP-4639). Pure."""

_REFUSALS = ("must specify a volume type", ".image")
"""Texts of refusals: servers without the feature drop the volume's source, and newer ones name the field."""


def image_volume_remedy(uri: str, refusal: str) -> str | None:
    """Returns why a server refuses an `oci://` model and what to do; None for other models and refusals."""
    if not uri.startswith("oci://") or not any(text in refusal for text in _REFUSALS):
        return None
    return (
        f"this API server does not take image volumes, by which {uri} is mounted ({refusal}): use Kubernetes 1.33 or "
        "newer with the feature gate ImageVolume on API server and kubelets (on by default since 1.35), or write "
        "pvc:// or hf:// in spec.model.uri"
    )
