"""The names that dashboards made for vLLM scrape, for the same facts."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from api.histogram import Histogram
from api.replicas import Fleet
from api.store_metrics import StoreSamples

LABELS = ("model_name", "engine")
COUNTERS = {
    "num_preemptions": "preempted",
    "prefix_cache_hits": "prefix_hits",
    "prefix_cache_queries": "prefix_queries",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": "ttft_s",
    "inter_token_latency_seconds": "itl_s",
    "e2e_request_latency_seconds": "e2e_s",
}


def collect(
    fleet: Fleet, samples: dict[str, dict[int, Histogram]], store: StoreSamples, model: str
) -> Iterator[Metric]:
    """The aliases; engine = our replica."""
    heard = [(r.index, r.stats) for r in fleet.replicas if r.stats is not None]
    running = GaugeMetricFamily("vllm:num_requests_running", "sequences in the batch", labels=LABELS)
    waiting = GaugeMetricFamily("vllm:num_requests_waiting", "requests queued or held", labels=LABELS)
    usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "KV blocks in use, 1 = all", labels=LABELS)
    info = GaugeMetricFamily(
        "vllm:cache_config_info", "KV cache sizes", labels=(*LABELS, "num_gpu_blocks", "block_size")
    )
    for index, stats in heard:
        names = (model, str(index))
        running.add_metric(names, stats.running)
        waiting.add_metric(names, stats.waiting + stats.held)
        usage.add_metric(names, stats.kv_blocks_used / max(1, stats.kv_blocks_total))
        info.add_metric((*names, str(stats.kv_blocks_total), str(stats.block_size)), 1)
    yield from (running, waiting, usage, info)
    for name, ours in COUNTERS.items():
        counter = CounterMetricFamily(f"vllm:{name}", f"{ours.replace('_', ' ')}, of a replica", labels=LABELS)
        for index, stats in heard:
            counter.add_metric((model, str(index)), stats.counters.get(ours, 0.0))
        yield counter
    for name, ours in HISTOGRAMS.items():
        family = HistogramMetricFamily(f"vllm:{name}", "seconds", labels=LABELS)
        for index, histogram in samples[ours].items():
            family.add_metric((model, str(index)), histogram.buckets(), histogram.sum)
        yield family
    operations = HistogramMetricFamily(
        "vllm:rl_weight_update_operation_duration_seconds", "phases of pushes", labels=(*LABELS, "operation")
    )
    for phase, histogram in store.phases.items():
        operations.add_metric((model, "0", phase), histogram.buckets(), histogram.sum)
    yield operations
