from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter_bucket.ready_policy import ALL, ANY, ReadyPolicy
from adapter_bucket.ready_views import on_fleet, on_replica
from adapter_bucket.status import UNREAD, AdapterStatus, ReadyState, ReplicaStatus, RunStatus
from bucket_lora_proxy.auth import Doorkeeper
from bucket_lora_proxy.endpoints import common_models
from bucket_lora_proxy.errors import ApiError, ErrorType
from bucket_lora_proxy.headers import for_client, for_upstream
from bucket_lora_proxy.request_body import read_content, read_envelope, read_fields
from bucket_lora_proxy.upstream import Origin
from bucket_lora_proxy.watcher import parse_models


def status(**runs: RunStatus) -> ReplicaStatus:
    ready = [f"{run}-v{version}" for run, state in runs.items() for version in state.ready]
    return ReplicaStatus(
        replica_id="r", base_model="b", dtype="d", max_loras=1, max_lora_rank=1, ready=ready,
        runs=runs,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("run-v10", ReadyState.READY),
        ("run-v9", ReadyState.REFUSED),
        ("run-v8", ReadyState.PENDING),
        ("run-v7", ReadyState.RETIRED),
        ("run-v11", ReadyState.PENDING),
        ("other-v1", ReadyState.PENDING),
        ("nonsense", ReadyState.PENDING),
    ],
)
def test_a_replicas_status_says_the_state_of_any_adapter(name: str, state: ReadyState) -> None:
    run = RunStatus(state="running", latest=10, window=3, ready=[10], refused={9: "rank"})
    view = on_replica(status(run=run), name)
    assert (view.name, view.state) == (name, state)
    assert state is ReadyState.READY or view.reason


def test_a_run_that_a_replica_refuses_is_refused_and_one_it_cannot_read_is_awaited() -> None:
    run = RunStatus(state="running", latest=10, window=3, refusal="another base model")
    view = on_replica(status(run=run), "run-v10")
    assert (view.state, view.reason) == (ReadyState.REFUSED, "another base model")
    run = RunStatus(state=UNREAD, latest=0, window=1, error="unsigned")
    view = on_replica(status(run=run), "run-v10")
    assert (view.state, view.reason) == (ReadyState.PENDING, "unsigned")


def test_an_answer_about_the_adapter_is_taken_as_it_is() -> None:
    said = AdapterStatus(name="run-v1", state=ReadyState.REFUSED, reason="no")
    assert on_replica(status().model_copy(update={"adapter": said}), "run-v1") == said


READY, PENDING, REFUSED, RETIRED = (
    ReadyState.READY, ReadyState.PENDING, ReadyState.REFUSED, ReadyState.RETIRED,
)  # fmt: skip


@pytest.mark.parametrize(
    ("states", "need_any", "need_all"),
    [
        ([], PENDING, PENDING),
        ([READY], READY, READY),
        ([READY, PENDING], READY, PENDING),
        ([READY, REFUSED], READY, REFUSED),
        ([READY, RETIRED], READY, RETIRED),
        ([PENDING, REFUSED], PENDING, REFUSED),
        ([PENDING, RETIRED], PENDING, RETIRED),
        ([REFUSED, RETIRED], REFUSED, REFUSED),
        ([RETIRED, RETIRED], RETIRED, RETIRED),
    ],
)
def test_the_fleet_is_as_ready_as_needed(
    states: list[ReadyState], need_any: ReadyState, need_all: ReadyState
) -> None:
    views = {
        f"http://r{index}": AdapterStatus(name="run-v1", state=state, reason="because")
        for index, state in enumerate(states)
    }
    for policy, expected in ((ANY, need_any), (ALL, need_all)):
        view = on_fleet(views, "run-v1", policy=policy)
        assert view.state is expected
        assert (view.replicas, view.ready_on) == (len(states), states.count(READY))
        assert expected is READY or view.reason


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([READY], PENDING),
        ([READY, READY], READY),
        ([READY, READY, PENDING], READY),
        ([READY, PENDING, REFUSED], PENDING),
        ([READY, REFUSED, RETIRED], REFUSED),
    ],
)
def test_a_quorum_of_two_can_still_come_while_two_may_be_ready(
    states: list[ReadyState], expected: ReadyState
) -> None:
    views = {
        f"http://r{index}": AdapterStatus(name="run-v1", state=state, reason="because")
        for index, state in enumerate(states)
    }
    view = on_fleet(views, "run-v1", policy=ReadyPolicy.from_need("2"))
    assert view.state is expected
    if len(states) == 1:
        assert "only 1 of 2 replicas answer" in str(view.reason)


@pytest.mark.parametrize(
    ("retried", "need_any", "need_all"),
    [([True, True], True, True), ([True, False], True, False), ([False, False], False, False)],
)
def test_the_next_version_may_do_better_where_enough_replicas_still_try(
    retried: list[bool], need_any: bool, need_all: bool
) -> None:
    views = {
        f"http://r{index}": AdapterStatus(name="run-v1", state=REFUSED, reason="x", retried=again)
        for index, again in enumerate(retried)
    }
    for policy, expected in ((ANY, need_any), (ALL, need_all)):
        view = on_fleet(views, "run-v1", policy=policy)
        assert (view.state, view.retried) == (REFUSED, expected)
    pending = {**views, "http://r9": AdapterStatus(name="run-v1", state=PENDING, reason="x")}
    assert not on_fleet(pending, "run-v1", policy=ANY).retried


def test_headers_of_one_hop_are_dropped_in_both_directions() -> None:
    fields = [
        (b"connection", b"X-A , close"), (b"x-a", b"1"), (b"te", b"trailers"), (b"upgrade", b"h2c"),
        (b"transfer-encoding", b"chunked"), (b"content-length", b"3"), (b"x-b", b"2"),
        (b"content-encoding", b"gzip"), (b"connection", b"x-c"), (b"x-c", b"3"),
    ]  # fmt: skip
    kept = [(b"x-b", b"2"), (b"content-encoding", b"gzip")]
    assert for_upstream(fields) == kept
    assert for_client(fields) == kept


def test_connection_cannot_name_a_field_back_in() -> None:
    assert for_upstream([(b"connection", b"authorization"), (b"authorization", b"x")]) == []


def test_the_models_in_common_keep_the_first_lists_order() -> None:
    first = [{"id": "b", "max_model_len": 9}, {"id": "a"}, {"id": "c"}]
    second = [{"id": "a"}, {"id": "b", "max_model_len": 7}]
    assert common_models([first, second]) == [{"id": "b", "max_model_len": 7}, {"id": "a"}]  # type: ignore[list-item]


@pytest.mark.parametrize("body", [b"[]", b"{}", b'{"data": 5}', b'{"data": [1]}', b"no"])
def test_a_strange_model_list_is_a_value_error(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_models(body)


def test_an_origin_keeps_prefix_port_and_authority() -> None:
    origin = Origin.parse("https://h.example/vllm/")
    assert (origin.host, origin.port, origin.tls) == ("h.example", 443, True)
    assert (origin.base_path, origin.authority) == (b"/vllm", b"h.example")
    six = Origin.parse("http://[::1]:8001")
    assert (six.host, six.port, six.authority) == ("::1", 8001, b"[::1]:8001")


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b"{}", None),
        (b'{"model": null, "stream": false}', None),
        (b'{"model": "a\\u0062", "stream": true}', "ab"),
        (b'{"prompt": {"model": "x"}, "model": "y"}', "y"),
        (json.dumps({"prompt": '{"model": "x"}', "model": "y"}).encode(), "y"),
    ],
)
def test_the_model_is_read_from_the_top_level_only(body: bytes, model: str | None) -> None:
    assert read_fields(body).model == read_envelope(body).model == model


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, 512),
        ({"max_tokens": 16}, 16),
        ({"max_completion_tokens": 32, "max_tokens": 16}, 32),
        ({"max_tokens": 100_000}, 512),
        ({"max_tokens": 16, "n": 4}, 64),
        ({"max_tokens": -5, "n": 0}, 0),
    ],
)
def test_expected_decode_tokens_are_bounded(fields: dict[str, int], tokens: int) -> None:
    body = json.dumps(fields).encode()
    assert read_fields(body).decode_tokens == read_envelope(body).decode_tokens() == tokens


NAMES = st.sampled_from(["model", "prompt", "messages", "max_tokens", "n", "stop", "Model"])
VALUES = st.recursive(
    st.none() | st.integers(-5, 5) | st.text(max_size=3) | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=6,
)


@given(st.lists(st.tuples(NAMES, st.booleans(), VALUES), max_size=6))
def test_the_quick_parser_reads_what_the_lenient_one_does(
    members: list[tuple[str, bool, object]],
) -> None:
    """Repeated and escaped names, NaN, wrong types: both read the same, or both refuse."""
    written = []
    for name, escaped, value in members:
        key = "".join(f"\\u{ord(letter):04x}" for letter in name) if escaped else name
        written.append(f'"{key}": {json.dumps(value)}')
    body = ("{" + ", ".join(written) + "}").encode()
    try:
        envelope = read_envelope(body)
    except ApiError:
        with pytest.raises(ApiError):
            read_fields(body)
        return
    fields = read_fields(body)
    assert (fields.model, fields.decode_tokens) == (envelope.model, envelope.decode_tokens())
    assert repr(read_content(fields.content_json)) == repr(envelope.content())


@pytest.mark.parametrize("content", [b'"\xff"', b'["\\ud800"]'])
def test_a_prompt_that_is_no_text_is_refused_when_it_is_built(content: bytes) -> None:
    with pytest.raises(ApiError, match="not a valid generation request"):
        read_content(content)


def test_one_authorization_field_with_a_known_token_opens_the_door() -> None:
    door = Doorkeeper(["token-one-0123456", "token-two-0123456"])
    door.check([(b"authorization", b"bearer token-two-0123456")])
    for fields in (
        [],
        [(b"authorization", b"Bearer token-one-0123456"), (b"authorization", b"Bearer x")],
        [(b"authorization", b"Bearer \xff")],
    ):
        with pytest.raises(ApiError) as caught:
            door.check(fields)
        assert caught.value.type is ErrorType.UNAUTHORIZED
    Doorkeeper([]).check([])
