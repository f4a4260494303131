"""Another server on the same prompts: anything that speaks OpenAI's HTTP API."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import httpx

from outrider.core.types import SamplingParams
from outrider.errors import ConfigError, OutriderError

MOST = 1e15
"""A count, a speed or a time that is this large is none."""


class PeerError(OutriderError):
    """The other server cannot be reached, refuses (`status`: its HTTP code), or answers something that is no answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """One answer. `decode_s` is the server's own figure where `source` is "timings", else the wall time, which holds
    the prompt and the network too ("usage and wall time")."""

    text: str
    prompt_tokens: int
    tokens: int
    decode_s: float
    total_s: float
    source: str
    draft_n: int
    draft_n_accepted: int
    finish_reason: str


def check_url(url: str, option: str) -> str:
    """The address without /v1. Raises ConfigError for a bad one."""
    base = url.rstrip("/").removesuffix("/v1")
    try:
        parsed = httpx.URL(base)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{option} {url!r} is not a URL ({error}): give http://host:port") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"{option} {url!r} is not allowed: give http://host:port or https://host")
    return base


class Peer:
    """A server at `url` (with or without /v1). `model` None: the first that it lists. Raises ConfigError for a bad URL.

    `sources` collects where the figures of its answers came from.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        option: str = "--peer-url",
    ) -> None:
        self.url = check_url(url, option)
        self.sources: set[str] = set()
        self._extras: dict[str, object] = {"cache_prompt": False}
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(timeout=timeout_s, headers=headers)
        self._model = model

    @property
    def model(self) -> str:
        """The model's name at the server; asks it once when none was given. Raises PeerError."""
        if self._model is None:
            self.connect()
        assert self._model is not None
        return self._model

    def connect(self) -> None:
        """Makes sure that the server answers and the model's name is known. Raises PeerError."""
        try:
            data = self._request("GET", "/v1/models", None).get("data")
        except PeerError as error:
            if self._model is None or error.status is None:
                raise
            return
        first = data[0] if isinstance(data, list) and data else None
        name = first.get("id") if isinstance(first, dict) else None
        if self._model is None:
            if not isinstance(name, str):
                raise PeerError(f"{self.url}/v1/models lists no model: name one with --peer-model")
            self._model = name

    def answer(self, messages: Seq[Mapping[str, str]] | None, text: str | None, params: SamplingParams) -> PeerAnswer:
        """Sends a conversation to /v1/chat/completions, or else text to /v1/completions. Raises PeerError."""
        body: dict[str, object] = {"model": self.model, "temperature": params.temperature, "stream": False}
        if params.max_tokens is not None:
            body["max_tokens"] = params.max_tokens
        if params.seed is not None:
            body["seed"] = params.seed
        body |= {"prompt": text} if messages is None else {"messages": list(messages)}
        path = "/v1/completions" if messages is None else "/v1/chat/completions"
        began = time.perf_counter()
        data = self._post(path, body)
        answer = self._read(data, time.perf_counter() - began)
        self.sources.add(answer.source)
        return answer

    def close(self) -> None:
        self._client.close()

    def _post(self, path: str, body: dict[str, object]) -> Mapping[str, object]:
        """Asks for no prompt cache, as our own lanes have none; a server that does not know the field is spared it."""
        try:
            return self._request("POST", path, body | self._extras)
        except PeerError as error:
            if not self._extras or error.status not in (400, 422):
                raise
            self._extras = {}
            return self._request("POST", path, body)

    def _request(self, method: str, path: str, body: dict[str, object] | None) -> Mapping[str, object]:
        where = self.url + path
        try:
            response = self._client.request(method, where, json=body)
        except httpx.ConnectError as error:
            raise PeerError(f"{where}: no connection ({error}): is the server running there?") from None
        except httpx.TimeoutException:
            limit = self._client.timeout.read
            raise PeerError(
                f"{where}: no answer within {limit:.0f} s: lower --max-tokens, or look at the server"
            ) from None
        except httpx.HTTPError as error:
            raise PeerError(f"{where}: {type(error).__name__}: {error}") from None
        if response.is_error:
            said = " ".join(response.text.split())[:300]
            raise PeerError(f"{where}: HTTP {response.status_code}: {said or 'no message'}", response.status_code)
        try:
            data = response.json()
        except ValueError:
            raise PeerError(f"{where}: the answer is not JSON: {response.text[:100]!r}") from None
        if not isinstance(data, dict):
            raise PeerError(f"{where}: the answer is a {type(data).__name__}, not a JSON object")
        return data

    def _read(self, data: Mapping[str, object], total_s: float) -> PeerAnswer:
        choices = data.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            raise PeerError(f"{self.url}: an answer without choices: {str(data)[:200]}")
        message = choice.get("message")
        text = message.get("content") if isinstance(message, dict) else choice.get("text")
        usage, timings = _mapping(data.get("usage")), _mapping(data.get("timings"))
        tokens = int(_number(timings, "predicted_n") or _number(usage, "completion_tokens") or 0)
        if not tokens:
            raise PeerError(
                f"{self.url}: an answer that counts no tokens: neither timings.predicted_n nor usage.completion_tokens "
                "is in it, so its speed cannot be told"
            )
        decode_s = _decode_seconds(timings, tokens)
        return PeerAnswer(
            text=str(text or ""),
            prompt_tokens=int(_number(usage, "prompt_tokens") or _number(timings, "prompt_n") or 0),
            tokens=tokens,
            decode_s=total_s if decode_s is None else decode_s,
            total_s=total_s,
            source="usage and wall time" if decode_s is None else "timings",
            draft_n=int(_number(timings, "draft_n") or 0),
            draft_n_accepted=int(_number(timings, "draft_n_accepted") or 0),
            finish_reason=str(choice.get("finish_reason") or ""),
        )


def _decode_seconds(timings: Mapping[str, object], tokens: int) -> float | None:
    """Seconds of decoding by the server's own clock, from llama.cpp's names; None when it says nothing."""
    per_second = _number(timings, "predicted_per_second")
    if per_second and tokens / per_second < MOST:
        return tokens / per_second
    milliseconds = _number(timings, "predicted_ms")
    return milliseconds / 1000 if milliseconds else None


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _number(data: Mapping[str, object], name: str) -> float | None:
    value = data.get(name)
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < MOST
    return float(value) if usable and isinstance(value, (int, float)) else None
