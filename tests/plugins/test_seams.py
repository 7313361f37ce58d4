"""The seam table: complete rows, and a refusal of any vLLM it was not written against."""

from pathlib import Path

import pytest

from vllm.plugins.kda_prefill_coalescing import seams


def test_the_pinned_wheel_is_the_one_the_seams_were_written_against():
    assert seams.changed_sources() == []
    seams.check_upstream()


def test_every_row_says_how_and_why_and_until_when():
    for seam in seams.SEAMS:
        assert seam.how
        assert seam.why
        assert seam.goes_when
        assert seam.upstream or seam.how.startswith("registry")


def test_a_changed_upstream_source_is_refused_and_named(monkeypatch):
    real = seams._module_source
    target = "vllm.v1.core.sched.scheduler"

    def edited(module):
        lines, tree = real(module)
        if module != target:
            return lines, tree
        return [line.replace("def _preempt_request(", "def _preempt_request (") for line in lines], tree

    monkeypatch.setattr(seams, "_module_source", edited)
    assert seams.changed_sources() == [f"{target}:Scheduler._preempt_request"]
    with pytest.raises(RuntimeError, match=r"Scheduler\._preempt_request.*Install the stock wheel"):
        seams.check_upstream()


@pytest.mark.parametrize("target", ["vllm.v1.core.sched.scheduler:Scheduler.gone", "vllm.gone:Scheduler"])
def test_a_missing_upstream_source_counts_as_changed(target):
    assert seams.source_digest(target) == "missing"


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(seams, "version", lambda name: "0.34.1")
    with pytest.raises(RuntimeError, match=r"needs vLLM 0\.33\.0, found 0\.34\.1"):
        seams.check_upstream()


def test_the_design_note_lists_the_table():
    text = (Path(__file__).parents[2] / "docs/design.md").read_text()
    for seam in seams.SEAMS:
        assert f"| {seam.name} | {seam.how} |" in text
