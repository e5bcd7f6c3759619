import pytest

from mini_infer_operator.cli.cluster import NotFoundError
from mini_infer_operator.cli.rollout_command import history_lines, target_of
from tests.operator.objects.test_history import kept


def revision(name: str, number: int, **spec: object) -> dict[str, object]:
    made = kept(name, number, **({"spec": spec} if spec else {}))
    made["metadata"] |= {"labels": {"serving.mini-infer.io/revision": name}, "creationTimestamp": "2026-01-01"}
    return made


def test_rollout_history_lists_what_each_revision_changed() -> None:
    first = revision("a", 1, image="x", unified={"replicas": 1})
    second = revision("b", 2, image="y", unified={"replicas": 3})
    assert history_lines([second, first, revision("old", 0)], "b") == [
        "   0  old  2026-01-01",
        "        its spec was not kept (made by an older operator)",
        "   1  a  2026-01-01",
        "   2  b  2026-01-01  (what the spec asks for)",
        "        image: x -> y",
    ]
    assert history_lines([], "") == ["no revision is kept"]


def test_rollout_undo_targets_the_previous_revision_or_the_named_one() -> None:
    revisions = [revision("a", 4), revision("b", 2), revision("c", 3)]
    assert target_of(revisions, "a", None)["revision"] == 3
    assert target_of(revisions, "c", None)["revision"] == 4
    assert target_of(revisions, "a", 2)["revision"] == 2
    with pytest.raises(NotFoundError, match=r"revision 9.*2, 3, 4"):
        target_of(revisions, "a", 9)
    with pytest.raises(NotFoundError, match="no earlier revision"):
        target_of([revision("a", 1)], "a", None)
