# SPDX-License-Identifier: Apache-2.0
"""The patch table: complete rows, and a refusal of any vLLM it was not written against."""

from pathlib import Path

import pytest

from vllm.plugins.kda_prefill_coalescing import upstream_sources
from vllm.plugins.kda_prefill_coalescing.patches import PATCHES, UPSTREAM


def test_the_pinned_wheel_is_the_one_patched():
    assert upstream_sources.changed_sources(UPSTREAM) == []
    upstream_sources.check_upstream(UPSTREAM)


def test_every_row_says_how_and_why_and_until_when():
    for patch in PATCHES:
        assert patch.how
        assert patch.why
        assert patch.goes_when
        assert patch.upstream or patch.how.startswith("registry")
        assert set(patch.upstream.items()) <= set(UPSTREAM)


def test_a_changed_source_is_refused_and_named(monkeypatch):
    real = upstream_sources._module_source
    target = "vllm.v1.core.sched.scheduler"

    def edited(module):
        lines, tree = real(module)
        if module != target:
            return lines, tree
        return [line.replace("def _preempt_request(", "def _preempt_request (") for line in lines], tree

    monkeypatch.setattr(upstream_sources, "_module_source", edited)
    assert upstream_sources.changed_sources(UPSTREAM) == [f"{target}:Scheduler._preempt_request"]
    with pytest.raises(RuntimeError, match=r"Scheduler\._preempt_request.*Install the stock wheel"):
        upstream_sources.check_upstream(UPSTREAM)


@pytest.mark.parametrize(
    "target", ["vllm.v1.core.sched.scheduler:Scheduler.gone", "vllm.gone:Scheduler", "vllm/gone.cuh"]
)
def test_a_missing_source_counts_as_changed(target):
    assert upstream_sources.source_digest(target) == "missing"


def test_a_changed_file_that_is_no_module_is_named(monkeypatch):
    target = "vllm/third_party/deep_gemm/include/deep_gemm/impls/sm120_fp8_paged_mqa_logits.cuh"
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + (b" " if path.name in target else b""))
    assert upstream_sources.changed_sources(UPSTREAM) == [target]


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(upstream_sources, "version", lambda name: "0.34.1")
    with pytest.raises(RuntimeError, match=r"needs vLLM 0\.33\.0, found 0\.34\.1"):
        upstream_sources.check_upstream(UPSTREAM)


def test_the_design_note_lists_the_table():
    text = (Path(__file__).parents[2] / "docs/design.md").read_text()
    for patch in PATCHES:
        assert f"| {patch.name} | {patch.how} |" in text
