"""Every form of a prompt is routed by its prefix: groups stay together, continuations follow."""

from __future__ import annotations

import json
import re

import pytest

from tests.proxy.proxy_harness import Harness, Proxy

pytestmark = pytest.mark.anyio

Fields = dict[str, object]


def ids(group: int) -> list[int]:
    return [group * 1000 + i for i in range(160)]


def text(group: int) -> str:
    return "".join(f"word {group} {i} " for i in range(60))


def turn(group: int, *more: str) -> list[dict[str, str]]:
    said = [{"role": "assistant", "content": words} for words in more]
    return [{"role": "user", "content": text(group)}, *said]


FORMS: dict[str, tuple[str, list[Fields], list[Fields]]] = {
    "token ids": (
        "/v1/completions",
        [{"prompt": ids(group)} for group in range(4)],
        [{"prompt": ids(group) + [7] * 90} for group in range(4)],
    ),
    "text": (
        "/v1/completions",
        [{"prompt": text(group)} for group in range(4)],
        [{"prompt": text(group) + "and so on " * 9} for group in range(4)],
    ),
    "batch of token ids": (
        "/v1/completions",
        [{"prompt": [ids(group), ids(group + 50)]} for group in range(4)],
        [{"prompt": [ids(group) + [7] * 90, ids(group + 50)]} for group in range(4)],
    ),
    "batch of texts": (
        "/v1/completions",
        [{"prompt": [text(group), text(group + 50)]} for group in range(4)],
        [{"prompt": [text(group) + "more " * 20, text(group + 50)]} for group in range(4)],
    ),
    "chat": (
        "/v1/chat/completions",
        [{"messages": turn(group)} for group in range(4)],
        [{"messages": turn(group, "said " * 30, "and " * 30)} for group in range(4)],
    ),
}


async def served_by(proxy: Proxy, path: str, fields: Fields) -> int:
    body = json.dumps({"model": "run-v1", "max_tokens": 16, **fields}).encode()
    answer = await proxy.request("POST", path, body=body)
    assert answer.status == 200
    return int(answer.json()["served_by"])


@pytest.mark.parametrize("form", FORMS)
async def test_a_group_and_its_next_turn_go_to_one_replica_and_groups_are_spread(
    harness: Harness, form: str
) -> None:
    path, groups, continued = FORMS[form]
    proxy = await harness.proxy(*await harness.replicas(2, "run-v1"))
    places: list[int] = []
    for first, following in zip(groups, continued, strict=True):
        served = {await served_by(proxy, path, first) for _ in range(4)}
        served.add(await served_by(proxy, path, following))
        assert len(served) == 1
        places += served
    assert sorted(places.count(place) for place in set(places)) == [2, 2]
    page = (await proxy.get("/metrics")).body.decode()
    outcomes = re.findall(r'_routed_total\{outcome="(\w+)"\} (\S+)', page)
    assert dict(outcomes) == {"new": "4.0", "hit": "16.0"}
