"""A tenant's limits, as its clients see them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.rpc.error_details_pb2 import QuotaFailure, RetryInfo
from grpc_status import rpc_status
from tests.support.limits import n_of_month

import drafthouse
from drafthouse.v1 import generation_pb2, generation_pb2_grpc
from drafthouse_server.config import Config
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.errors import ConfigError
from drafthouse_server.rpc.server import Server
from drafthouse_server.scheduling.sequence import Sequence
from drafthouse_server.serving.outbox import Outbox
from drafthouse_server.tenancy.admission import Ticket
from drafthouse_server.tenancy.tenants import LIMITS, Tenant, TenantRegistry, make_tenant

if TYPE_CHECKING:
    from tests.conftest import Eventually, GatedEngine, ServerFactory

KEY = (("authorization", "Bearer k"),)


async def started(start_server: ServerFactory, **limits: Any) -> Server:
    tenants = TenantRegistry({"k": Tenant("acme", **limits)})
    server: Server = await start_server(FakeEngine(), tenants=tenants)
    # No time passes: a rate of 600 a minute has one more after a tenth of a second.
    server.loop.admission._clock = lambda: 0.0
    return server


async def test_rates_are_told_in_the_initial_metadata(start_server: ServerFactory) -> None:
    server = await started(
        start_server, requests_per_s=5.0, input_tokens_per_min=600, output_tokens_per_min=300
    )
    asked = generation_pb2.GenerateRequest(max_output_tokens=10)
    asked.prompt.text = "hello"
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        call = stub.Generate(asked, metadata=KEY)
        headers = dict(tuple(await call.initial_metadata()))
        messages = [message async for message in call]
        n_prompt = messages[-1].result.usage.prompt_tokens
        told = {
            key.removeprefix("x-ratelimit-"): value
            for key, value in headers.items()
            if key.startswith("x-ratelimit-")
        }
        assert told.pop("reset-requests")
        assert 0 < float(told.pop("reset-tokens")) <= 2.1
        assert {key: int(value) for key, value in told.items() if "reset" not in key} == {
            "limit-requests": 5,
            "remaining-requests": 4,
            "limit-input-tokens": 600,
            "remaining-input-tokens": 600 - n_prompt,
            "limit-output-tokens": 300,
            "remaining-output-tokens": 290,
            "limit-tokens": 300,
            "remaining-tokens": 290,
        }


async def test_who_has_no_rates_is_told_none(start_server: ServerFactory) -> None:
    server = await started(start_server)
    asked = generation_pb2.GenerateRequest(max_output_tokens=2)
    asked.prompt.text = "hello"
    async with grpc.aio.insecure_channel(server.target) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(asked, metadata=KEY)
        assert not [key for key, _ in await call.initial_metadata() if "ratelimit" in key]


async def test_a_rate_is_refused_with_metric_limit_and_a_time(start_server: ServerFactory) -> None:
    server = await started(start_server, requests_per_s=0.5)
    asked = generation_pb2.GenerateRequest(max_output_tokens=1)
    asked.prompt.text = "hello"
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        async for _ in stub.Generate(asked, metadata=KEY):
            pass
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(asked, metadata=KEY):
                pass
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    status = rpc_status.from_call(caught.value)  # type: ignore[arg-type]  # it has all of a call
    details = {detail.TypeName(): detail for detail in status.details}
    failure, retry = QuotaFailure(), RetryInfo()
    assert details["google.rpc.QuotaFailure"].Unpack(failure)
    assert details["google.rpc.RetryInfo"].Unpack(retry)
    violation = failure.violations[0]
    assert (violation.subject, violation.quota_metric) == ("tenant:acme", "requests_per_s")
    assert 1.0 < retry.retry_delay.ToTimedelta().total_seconds() <= 2.0


async def test_a_new_client_for_each_call_that_waits_as_told_is_let_in(
    start_server: ServerFactory,
) -> None:
    tenants = TenantRegistry({"k": Tenant("acme", requests_per_s=5.0)})
    server = await start_server(FakeEngine(), tenants=tenants)
    was_refused = False
    for _ in range(14):
        async with drafthouse.AsyncClient(server.target, api_key="k", retry=None) as client:
            try:
                await client.generate("x", max_output_tokens=1).result()
            except drafthouse.TenantQuotaExceeded as error:
                assert not was_refused, "it has waited as it was told"
                was_refused = True
                await asyncio.sleep((error.retry_after or 0.0) + 0.01)
            else:
                was_refused = False
    assert server.loop.admission.n_active == 0


def n_month(server: Server) -> int:
    admission = server.loop.admission
    return n_of_month(admission._limits, Tenant("acme"), admission._month())


async def test_limits_count_what_was_sent_as_bills_do(
    start_server: ServerFactory, gated_engine: GatedEngine, eventually: Eventually
) -> None:
    """Beyond a stop text, and for a client that has left, more is generated than is sent."""
    tenant = Tenant("acme", tokens_per_month=100_000, output_tokens_per_min=100_000)
    tenants = TenantRegistry({"k": tenant})
    server = await start_server(gated_engine, tenants=tenants)
    async with drafthouse.AsyncClient(server.target, api_key="k") as client:
        asked: dict[str, Any] = {"temperature": 0, "max_output_tokens": 60}
        whole = await client.generate("x", **asked).result()
        n_prompt = whole.usage.prompt_tokens
        n_used = n_prompt + 60
        assert n_month(server) == n_used
        stopped = await client.generate("x", stop=[whole.text[9:11]], **asked).result()
        assert stopped.usage.output_tokens < 60
        n_used += n_prompt + stopped.usage.output_tokens
        assert n_month(server) == n_used
        stream = client.generate("x", max_output_tokens=500)
        await anext(aiter(stream))
        gated_engine.hold()
        try:
            await eventually(lambda: gated_engine.is_stuck)
            await stream.aclose()
            await eventually(lambda: server.loop.statistics().n_prompt_tokens == 3 * n_prompt)
        finally:
            gated_engine.release()
        await eventually(lambda: server.loop.admission.n_active == 0)
    statistics = server.loop.statistics()
    n_sent = statistics.n_output_tokens - 60 - stopped.usage.output_tokens
    assert 0 < n_sent < 500
    assert n_month(server) == n_used + n_prompt + n_sent


async def test_lengths_are_bounded_and_told_without_a_time(start_server: ServerFactory) -> None:
    server = await started(start_server, n_output_max=7, n_prompt_max=20)
    async with drafthouse.AsyncClient(server.target, api_key="k") as client:
        result = await client.generate("x", ignore_end_token=True).result()
        assert result.usage.output_tokens == 7
        for prompt, n_output in (("x", 8), ("x" * 40, 2)):
            with pytest.raises(drafthouse.TenantQuotaExceeded) as caught:
                await client.generate(prompt, max_output_tokens=n_output).result()
            assert caught.value.retry_after is None
    assert server.loop.admission.n_active == 0


async def test_what_a_request_asks_for_is_lowered_to_its_tenants_ceilings(
    start_server: ServerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await started(start_server, priority_max=-5, n_draft_max=1, weight=2.5)
    taken: list[Sequence] = []
    submit = server.loop.submit

    def note(sequence: Sequence, ticket: Ticket | None = None) -> Outbox:
        taken.append(sequence)
        return submit(sequence, ticket)

    monkeypatch.setattr(server.loop, "submit", note)
    async with drafthouse.AsyncClient(server.target, api_key="k") as client:
        await client.generate("x", max_output_tokens=1, priority=50, max_draft_tokens=3).result()
        await client.generate("x", max_output_tokens=1, priority=-50, end_user="u").result()
    assert [
        (s.request.priority, s.request.n_draft, s.request.weight, s.request.end_user) for s in taken
    ] == [
        (-5, 1, 2.5, ""),
        (-50, 1, 2.5, "u"),
    ]


async def test_an_end_user_has_its_own_cache_and_its_own_limits(
    start_server: ServerFactory,
) -> None:
    server = await started(start_server, end_user_active_max=4, end_user_requests_per_s=100.0)
    prompt = "a prompt of more than a few blocks of sixteen tokens each, so that it is kept" * 2

    async with drafthouse.AsyncClient(server.target, api_key="k") as client:

        async def n_reused(end_user: str) -> int:
            stream = client.generate(prompt, max_output_tokens=3, end_user=end_user)
            return (await stream.result()).usage.reused_prompt_tokens

        assert await n_reused("one") == 0
        assert await n_reused("two") == 0
        assert await n_reused("") == 0
        assert await n_reused("one") > 0
        with pytest.raises(drafthouse.InvalidField) as caught:
            await client.generate("x", end_user="é" * 33).result()
        assert [violation.field for violation in caught.value.violations] == ["end_user"]


def test_settings_of_a_tenant_make_a_tenant() -> None:
    settings: dict[str, object] = {
        "weight": 3,
        "requests_per_s": 2.5,
        "max_streams": 4,
        "models": ["tiny"],
        "max_priority": -5,
        "draft_max": 0,
    }
    made = make_tenant("acme", settings, n_waiting_max=128)
    assert made == Tenant(
        "acme",
        weight=3,
        requests_per_s=2.5,
        n_active_max=4,
        n_waiting_max=128,
        models=frozenset({"tiny"}),
        priority_max=-5,
        n_draft_max=0,
    )
    assert {limit.attribute for limit in LIMITS} == set(Tenant.__slots__) - {"name"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"wieght": 1.0}, "tenants.acme.wieght"),
        ({"weight": 0}, "tenants.acme.weight"),
        ({"weight": "much"}, "tenants.acme.weight"),
        ({"max_streams": True}, "tenants.acme.max_streams"),
        ({"models": "tiny"}, "tenants.acme.models"),
        ({"models": [1]}, "tenants.acme.models"),
    ],
)
def test_a_wrong_setting_of_a_tenant_is_named(settings: dict[str, object], words: str) -> None:
    config = Config(api_keys=("acme:k",), tenants={"acme": settings})
    with pytest.raises(ConfigError, match=words):
        TenantRegistry.from_config(config)


def test_limits_of_a_tenant_of_the_store_are_told_where_they_belong() -> None:
    """With a store, or certificates, clients without a key are others than `default`."""
    section: dict[str, object] = {"weight": 2.0, "models": ["a b", "c"], "queue_size": 10**7}
    words = "`drafthouse tenants set acme weight=2 'models=a b,c'"
    with pytest.raises(ConfigError, match=words) as caught:
        TenantRegistry.from_config(Config(store="sqlite:///a", tenants={"acme": section}))
    assert "every client" not in str(caught.value)
    authorities = Config(
        ssl_cert_file="a", ssl_key_file="b", ssl_client_ca_file="c", tenants={"acme": section}
    )
    with pytest.raises(ConfigError, match=r"set store, .* `drafthouse tenants add acme") as caught:
        TenantRegistry.from_config(authorities)
    assert "limits of tenant 'default'" in str(caught.value)
    unknown = Config(store="sqlite:///a", tenants={"acme": {"foo": 3}})
    with pytest.raises(ConfigError, match="tenants set acme LIMIT=VALUE`"):
        TenantRegistry.from_config(unknown)


def test_settings_of_nobody_are_refused() -> None:
    with pytest.raises(ConfigError, match="'bob' has settings and no key"):
        TenantRegistry.from_config(Config(api_keys=("acme:k",), tenants={"bob": {}}))
    with pytest.raises(ConfigError, match="every client is tenant 'default'"):
        TenantRegistry.from_config(Config(tenants={"bob": {}}))
    with pytest.raises(ConfigError, match="names no tenant; expected 1 to 64"):
        TenantRegistry.from_config(Config(tenants={"b d": {}}))
    registry = TenantRegistry.from_config(Config(tenants={"default": {"weight": 2.0}}))
    assert registry.identify(None, "").tenant.weight == 2.0
