"""The Prometheus metrics of streams."""

from __future__ import annotations

from sparserow.ps_server.coordinator.metrics import CoordinatorMetrics
from sparserow.ps_server.coordinator.state.cluster import Cluster, ClusterOptions
from sparserow.ps_server.coordinator.state.stream_leases import JobStream
from sparserow.ps_server.coordinator.state.stream_requests import EventCounts


def test_a_stream_has_its_lag_its_events_and_its_watermark() -> None:
    cluster = Cluster.create(ClusterOptions(shards=1, slot_count=64))
    stream = JobStream("run", 1, "kafka clicks", EventCounts(events=9, dead=1, late=2), watermark=1_700_000_000_500_000)
    cluster.data.jobs[7], cluster.data.jobs[8] = stream, JobStream("run", 1, "kafka views")
    cluster.jobs.names[7], cluster.jobs.names[8] = "ads/train", "feed/train"
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for metric in CoordinatorMetrics(cluster).collect()
        for sample in metric.samples
        if "stream" in sample.name
    }
    assert found["sparserow_stream_events_total", "ads/train", "trained"] == 9
    assert found["sparserow_stream_events_total", "ads/train", "dead"] == 1
    assert found["sparserow_stream_events_total", "ads/train", "late"] == 2
    assert found["sparserow_stream_lag", "ads/train"] == 0
    assert found["sparserow_stream_watermark_seconds", "ads/train"] == 1_700_000_000.5
    assert ("sparserow_stream_watermark_seconds", "feed/train") not in found
