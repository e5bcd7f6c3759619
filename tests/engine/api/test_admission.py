import pytest

from mini_infer_contract.api_errors import ApiError
from mini_infer_engine.api.admission import Admission


def test_choices_are_let_in_up_to_the_limit_and_give_their_place_back() -> None:
    admission = Admission(max_choices=3, max_body_bytes=100)
    with admission.choices(2):
        with pytest.raises(ApiError) as caught, admission.choices(2):
            pass
        assert (caught.value.status, caught.value.code) == (429, "queue_full")
        assert int(caught.value.headers["retry-after"]) >= 1
        assert caught.value.body()["error"]["type"] == "rate_limit_error"
        with admission.choices(1):
            assert admission.num_choices == 3
    assert admission.num_choices == 0
    with pytest.raises(ValueError, match="x"), admission.choices(1):
        raise ValueError("x")
    assert admission.num_choices == 0


def test_one_body_alone_is_always_taken_and_others_wait_outside() -> None:
    admission = Admission(max_choices=3, max_body_bytes=100)
    with admission.body(1000):
        with pytest.raises(ApiError, match=r"1000 bytes.*--max-tokenizing-size") as caught, admission.body(1):
            pass
        assert caught.value.status == 429
    with admission.body(60), admission.body(40):
        assert admission.num_body_bytes == 100
    assert admission.num_body_bytes == 0
