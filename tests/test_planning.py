"""Plans before anything is collected."""

from distill.planning import estimated_bytes_per_target
from tests.helpers import make_spec


def test_estimates_are_near_what_was_measured() -> None:
    """At V = 49,152 and shards of the default size (benchmarks/codec): never below, a seventh above at most."""

    def estimate(top_k: int, precision: str) -> float:
        return estimated_bytes_per_target(make_spec(vocab_size=49_152, top_k=top_k, cache_precision=precision))

    for top_k, compact, exact in ((50, 62.5, 152.0), (128, 133.7, 359.0), (200, 197.3, 537.0)):
        assert compact < estimate(top_k, "compact") < compact * 8 / 7
        assert exact < estimate(top_k, "exact") < exact * 8 / 7
