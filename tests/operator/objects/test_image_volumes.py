"""Refusals of API servers without image volumes are explained, and others are left as they are."""

import pytest

from mini_infer_operator.objects.image_volumes import image_volume_remedy

DROPPED = (
    'Deployment.apps "demo-1" is invalid: spec.template.spec.volumes[2]: Required value: must specify a volume type'
)
UNKNOWN = 'spec.template.spec.volumes[name="mini-infer-model"].image: field not declared in schema'


@pytest.mark.parametrize("refusal", [DROPPED, UNKNOWN])
def test_the_feature_is_named_when_a_server_without_it_refuses_an_image_volume(refusal: str) -> None:
    remedy = image_volume_remedy("oci://example.org/model:1", refusal)
    assert remedy is not None
    assert "ImageVolume" in remedy
    assert refusal in remedy
    assert "oci://example.org/model:1" in remedy


@pytest.mark.parametrize(
    ("uri", "refusal"),
    [("pvc://claim", DROPPED), ("oci://example.org/model:1", "admission webhook denied the request: no cost centre")],
)
def test_the_refusal_is_left_as_it_is_when_it_is_not_about_image_volumes(uri: str, refusal: str) -> None:
    assert image_volume_remedy(uri, refusal) is None
