from mini_infer_operator.controller.claims import ANSWER_S, BELIEVED_S, Claims, Step

KEY, OTHER = ("n", "a"), ("n", "b")


def test_what_is_nobodys_is_claimed_and_what_is_ours_is_worked_on() -> None:
    claims = Claims("me")
    assert claims.step(KEY, {}, 0)[0] == Step.CLAIM
    assert claims.step(KEY, {"operator": "me"}, 0)[0] == Step.WORK
    assert claims.step(KEY, {"operator": "me", "challenger": ""}, 0)[0] == Step.WORK


def test_a_question_is_answered() -> None:
    assert Claims("me").step(KEY, {"operator": "me", "challenger": "other"}, 0)[0] == Step.ANSWER


def test_another_that_answers_keeps_all_its_services_and_is_asked_once() -> None:
    claims = Claims("me")
    assert claims.step(KEY, {"operator": "other"}, 0) == (Step.ASK, ANSWER_S)
    asked = {"operator": "other", "challenger": "me"}
    assert claims.step(KEY, asked, 1) == (Step.WAIT, ANSWER_S - 1)
    assert claims.step(OTHER, {"operator": "other"}, 1)[0] == Step.WAIT
    assert claims.step(KEY, {"operator": "other", "challenger": ""}, 2)[0] == Step.WAIT
    for moment in (ANSWER_S, ANSWER_S + 1, BELIEVED_S - 1):
        assert claims.step(KEY, {"operator": "other", "challenger": ""}, moment)[0] == Step.WAIT
        assert claims.step(OTHER, {"operator": "other"}, moment)[0] == Step.WAIT
    assert claims.step(OTHER, {"operator": "other"}, BELIEVED_S)[0] == Step.ASK


def test_one_that_goes_after_it_answered_loses_its_services_within_75_seconds() -> None:
    claims, status = Claims("me"), {"operator": "other"}
    assert claims.step(KEY, status, 0)[0] == Step.ASK
    taken_s = None
    for moment in range(1, 120):  # it answers once, at once, and is gone
        step, _ = claims.step(KEY, status, moment)
        if step == Step.ASK:
            status = {"operator": "other", "challenger": "me"}
        if step == Step.TAKE:
            taken_s = moment
            break
    assert taken_s is not None
    assert taken_s <= 75


def test_another_that_is_silent_loses_its_services() -> None:
    claims = Claims("me")
    claims.step(KEY, {"operator": "other"}, 0)
    asked = {"operator": "other", "challenger": "me"}
    assert claims.step(KEY, asked, ANSWER_S - 0.1)[0] == Step.WAIT
    assert claims.step(KEY, asked, ANSWER_S)[0] == Step.TAKE
    assert claims.step(OTHER, {"operator": "other"}, ANSWER_S + 1)[0] == Step.TAKE


def test_a_service_that_is_deleted_while_it_is_asked_about_says_nothing_of_the_other() -> None:
    claims = Claims("me")
    claims.step(KEY, {"operator": "other"}, 0)
    assert claims.step(OTHER, {"operator": "other"}, ANSWER_S + 1)[0] == Step.WAIT
    assert claims.step(OTHER, {"operator": "other"}, 2 * ANSWER_S)[0] == Step.ASK


def test_two_that_claim_each_others_settle_on_one() -> None:
    """Each asks the other; whoever owns a service answers, so every service keeps its owner."""
    one, two = Claims("one"), Claims("two")
    status = {"operator": "one"}
    assert two.step(KEY, status, 0)[0] == Step.ASK
    status["challenger"] = "two"
    assert one.step(KEY, status, 1)[0] == Step.ANSWER
    status["challenger"] = ""
    for moment in range(2, 60):
        assert two.step(KEY, status, moment)[0] == Step.WAIT
        assert one.step(KEY, status, moment)[0] == Step.WORK
