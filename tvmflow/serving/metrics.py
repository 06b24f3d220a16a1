"""The server's metrics, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Metrics:
    """The Prometheus metrics of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "tvmflow_requests", "Requests answered, by HTTP status code.", ["code"], registry=self.registry
        )
        self.seconds = Histogram(
            "tvmflow_inference_seconds",
            "From the arrival of an inference request to its answer.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "tvmflow_inferences_in_flight", "Inference requests being answered.", registry=self.registry
        )
        self.batch_rows = Histogram(
            "tvmflow_batch_rows", "Rows of the batches that ran.", buckets=_ROWS, registry=self.registry
        )
        self.model = Gauge(
            "tvmflow_model_info", "1 for the version that is served.", ["name", "version"], registry=self.registry
        )
        self.swaps = Counter(
            "tvmflow_swaps", "Times that another version replaced the served one.", registry=self.registry
        )
        self.failed_swaps = Counter(
            "tvmflow_failed_swaps",
            "Times that the server refused a version that the channel named, or could not check it.",
            registry=self.registry,
        )
        self.failed_polls = Counter(
            "tvmflow_failed_polls", "Times that the release store could not be read.", registry=self.registry
        )
        ProcessCollector(registry=self.registry)
