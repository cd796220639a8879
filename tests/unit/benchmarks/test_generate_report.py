"""Rows that are made of a benchmark's rounds."""

from benchmarks.generate.report import rows


def test_adapters_over_the_base_and_over_a_peer_are_taken_within_rounds():
    def taken(base, one, eight, peer):
        cases = {"base": base, "one": one, "eight": eight}
        return {"load": 1.0} | {case: {"service": ours, "vllm": peer} for case, ours in cases.items()}

    rounds = [taken(100, 90, 80, 50), taken(10, 9.5, 8.5, 5), taken(200, 184, 164, 92)]
    found = rows({"adapters/float32/all/vllm": {"rounds": rounds}, "adapters/float32/qv": {"rounds": []}})
    of_one, of_eight = "16 sequences on one adapter, float32, all", "16 sequences on 8 adapters, float32, all"
    suffix = " (3 rounds, load 1 to 1)"
    assert found == [
        (f"{of_one}: throughput over the base's", f"0.920{suffix}", ">= 0.90"),
        (f"{of_one}: over vllm's", f"1.90x{suffix}", ">= 1.5"),
        (f"{of_eight}: throughput over the base's", f"0.820{suffix}", ">= 0.85"),
        (f"{of_eight}: over vllm's", f"1.70x{suffix}", ">= 1.5"),
    ]
