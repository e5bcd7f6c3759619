"""The operator's log leaves out some of kopf's lines."""

import logging

import pytest

from mini_infer_operator.controller.run import QuietKopf

POSTING = "kopf._core.engines.posting"
REFUSED = (
    "Request attempt #1/3 failed; will retry: POST https://10.96.0.1/api/v1/namespaces/%s/events -> "
    "APIForbiddenError('...', {'details': {'causes': [{'reason': '%s'}]}, 'code': 403}, status=403)"
)


@pytest.mark.parametrize(
    ("name", "message", "is_shown"),
    [
        (POSTING, REFUSED % ("ends", "NamespaceTerminating"), False),
        (POSTING, REFUSED % ("default", "RBAC"), True),
        ("mini_infer_operator.controller.queue", "namespace: NamespaceTerminating", True),
        ("asyncio", "Task was destroyed but it is pending! kopf/_cogs/aiokits/aiotasks.py", False),
        ("asyncio", "Task was destroyed but it is pending! mini_infer_operator", True),
    ],
)
def test_log_leaves_out_what_kopf_cannot_help(name: str, message: str, is_shown: bool) -> None:
    record = logging.makeLogRecord({"name": name, "msg": message, "exc_info": (None, None, None)})
    assert QuietKopf().filter(record) is is_shown
    assert (record.exc_info is None) is name.startswith("kopf._core")
