"""What /metrics tells: Prometheus' text format, under vLLM's names, so that its dashboards and alerts work.

Neighbours: app.py serves it; counts come from the decoder's totals and from finished answers.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..api import Result
from .work import Work

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class Metrics:
    """The figures of one server."""

    def __init__(self, work: Work, name: str) -> None:
        self.registry = CollectorRegistry()
        labels = ["model_name"]
        self._finished = Counter(
            "vllm:request_success", "Answers, by how they ended.", [*labels, "finished_reason"], registry=self.registry
        )

        def seconds(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(name, text, labels, registry=self.registry, buckets=buckets)

        self._first = seconds("vllm:time_to_first_token_seconds", "To the first token.")
        self._token = seconds("vllm:time_per_output_token_seconds", "A token.", _TOKEN_SECONDS)
        self._whole = seconds("vllm:e2e_request_latency_seconds", "A request.")
        self._name = name
        self.registry.register(_Totals(work, name))

    def first(self, seconds: float) -> None:
        """A first token came after so long."""
        self._first.labels(self._name).observe(seconds)

    def done(self, result: Result, seconds: float) -> None:
        """An answer is whole."""
        self._finished.labels(self._name, result.finish_reason).inc()
        self._whole.labels(self._name).observe(seconds)
        if result.stats.decode_tokens:
            self._token.labels(self._name).observe(result.stats.decode_s / result.stats.decode_tokens)

    def text(self) -> bytes:
        """The page."""
        return generate_latest(self.registry)


class _Totals(Collector):
    """What the engine counts anyway."""

    def __init__(self, work: Work, name: str) -> None:
        self._work, self._name = work, name

    def collect(self) -> Iterator[Metric]:
        """All of it as it is now."""
        stats, engine = self._work.model.stats, self._work.model.engine
        for name, text, value in (
            ("vllm:num_requests_running", "Requests with a slot.", len(engine.running)),
            ("vllm:num_requests_waiting", "Requests that wait for one.", len(engine.waiting)),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._name], value)
            yield gauge
        for name, text, value in (
            ("vllm:prompt_tokens", "Tokens of prompts.", stats.prompt_tokens),
            ("vllm:generation_tokens", "Tokens emitted.", stats.tokens),
            ("vllm:prefix_cache_queries", "Prompt tokens that were looked for.", stats.prompt_tokens),
            ("vllm:prefix_cache_hits", "... and found.", stats.cached_prompt_tokens),
            ("vllm:spec_decode_num_drafts", "Rounds with a draft.", sum(stats.drafted_at[:1])),
            ("vllm:spec_decode_num_draft_tokens", "Tokens drafted.", stats.drafted),
            ("vllm:spec_decode_num_accepted_tokens", "... and accepted.", stats.accepted),
        ):
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._name], value)
            yield counter
        places = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted, by place.", labels=["model_name", "position"]
        )
        for place, count in enumerate(stats.accepted_at):
            places.add_metric([self._name, str(place)], count)
        yield places
