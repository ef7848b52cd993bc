"""aiperf's completions payloads sent through the Drafthouse SDK.

Each message of the server becomes one event of an OpenAI stream, with the time at which it came;
the last one carries the server's own token counts (`--use-server-token-count`).
"""

from __future__ import annotations

import json
import time
from typing import Any
from urllib.parse import urlsplit

from aiperf.common.hooks import on_init, on_stop
from aiperf.common.models import ErrorDetails, RequestInfo, RequestRecord, SSEMessage
from aiperf.plugin.schema.schemas import TransportMetadata
from aiperf.transports.base_transports import BaseTransport, FirstTokenCallback

import drafthouse

__all__ = ["DrafthouseTransport"]


class DrafthouseTransport(BaseTransport):
    """Sends requests to a Drafthouse server; one connection per worker of aiperf."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._client: drafthouse.AsyncClient | None = None

    @classmethod
    def metadata(cls) -> TransportMetadata:
        """Returns how aiperf shall know this transport."""
        return TransportMetadata(transport_type="drafthouse", url_schemes=["drafthouse"])

    @on_init
    async def _connect(self) -> None:
        # aiperf takes http:// URLs only, whatever the transport.
        address = urlsplit(self.model_endpoint.endpoint.base_urls[0]).netloc
        self._client = drafthouse.AsyncClient(address, retry=None)

    @on_stop
    async def _close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    def get_url(self, request_info: RequestInfo) -> str:
        """Returns the server's address."""
        url: str = request_info.model_endpoint.endpoint.base_urls[0]
        return url

    async def send_request(
        self,
        request_info: RequestInfo,
        payload: dict[str, Any] | bytes,
        *,
        first_token_callback: FirstTokenCallback | None = None,
    ) -> RequestRecord:
        """Generates; errors become part of the record, as aiperf wants them."""
        assert self._client is not None, "aiperf has called the init hook"
        body = json.loads(payload) if isinstance(payload, bytes) else payload
        record = RequestRecord(start_perf_ns=time.perf_counter_ns(), request_headers={})
        try:
            stream = self._client.generate(
                body["prompt"],
                max_output_tokens=body["max_tokens"],
                temperature=body.get("temperature", 0.0),
                ignore_end_token=body.get("ignore_eos", False),
            )
            async for chunk in stream:
                if chunk.token_ids:
                    message = _event(record, {"choices": [{"index": 0, "text": chunk.text or " "}]})
                    if first_token_callback is not None:
                        ttft_ns = message.perf_ns - record.start_perf_ns
                        if await first_token_callback(ttft_ns, message):
                            first_token_callback = None
            usage = (await stream).usage
            counts = {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.output_tokens,
                "total_tokens": usage.prompt_tokens + usage.output_tokens,
            }
            _event(record, {"choices": [], "usage": counts})
            record.status = 200
        except drafthouse.DrafthouseError as error:
            record.error = ErrorDetails(type=type(error).__name__, message=str(error), code=500)
        record.end_perf_ns = time.perf_counter_ns()
        return record


def _event(record: RequestRecord, content: dict[str, Any]) -> SSEMessage:
    now_ns = time.perf_counter_ns()
    if record.recv_start_perf_ns is None:
        record.recv_start_perf_ns = now_ns
    event = {"object": "text_completion"} | content
    message = SSEMessage.parse(f"data: {json.dumps(event)}", now_ns)
    record.responses.append(message)
    return message
