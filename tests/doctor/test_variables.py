# SPDX-License-Identifier: Apache-2.0
"""Variables that are set, misspelt or unreadable, one line each."""

import os

import pytest

from vllm.kda_prefill_variables import GATE, LOG_LIMIT, RETENTION, SPLIT_MAMBA, SPLIT_TARGET
from vllm_kda_prefill.doctor import variables


@pytest.fixture
def clean(monkeypatch):
    for name in variables.OURS:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("value", "problem", "is_on", "colour", "message"),
    [
        ("1", "", True, "green", "='1' is on"),
        (None, "", False, "yellow", "is not set, so a server is stock"),
        ("0", "", False, "yellow", "is '0', so a server is stock"),
        ("maybe", f"{GATE}='maybe' is neither on nor off; set it to 1 or 0", False, "red", "neither on nor off"),
    ],
)
def test_gate(value, problem, is_on, colour, message):
    found = variables.gate_finding(value, problem, is_on)
    assert (found.colour, message in found.message) == (colour, True)


def test_values_are_green_or_red():
    environ = {GATE: "1", RETENTION: "replay", LOG_LIMIT: "x", SPLIT_TARGET: ""}
    good, bad = variables.value_findings(environ, {LOG_LIMIT: f"{LOG_LIMIT}='x' is no number; set it to 0 or more"})
    assert (good.colour, good.message) == ("green", f"{RETENTION}='replay'")
    assert (bad.colour, bad.hint) == ("red", "set it to 0 or more")


def test_block_sizes_beside_each_other():
    assert variables.pair_finding({SPLIT_TARGET: "512", SPLIT_MAMBA: "512"}, "") == []
    (alone,) = variables.pair_finding({SPLIT_MAMBA: "512"}, "set both together, or neither")
    assert (alone.colour, alone.message) == ("red", f"{SPLIT_MAMBA} is set alone")
    (ratio,) = variables.pair_finding(
        {SPLIT_TARGET: "1024", SPLIT_MAMBA: "512"}, "512 is no multiple; the nearest is 1"
    )
    assert (ratio.colour, ratio.hint) == ("red", "the nearest is 1")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("VLLM_B12X_KDA_PREFILL_COALESCE", GATE),
        ("VLLM_B12X_KAD_PREFILL_COALESCING", GATE),
        ("vllm_b12x_kda_prefill_coalescing", GATE),
        ("VLLM_KDA_PREFILL_RETENTION", RETENTION),
        ("VLLM_GLM53_SPLIT_TARGET_BLOCKSIZE", SPLIT_TARGET),
        ("VLLM_GLM53_MAMBA_BLOCK_SIZE", SPLIT_MAMBA),
    ],
)
def test_a_misspelt_name_is_yellow_and_names_the_right_one(name, meant):
    (found,) = variables.misspelt_findings({name: "1", "PATH": "x", GATE: "1"}, variables.OURS)
    assert (found.colour, found.hint) == ("yellow", f"did you mean {meant}?")
    assert name in found.message


def test_names_of_vllm_and_of_others_are_left_alone():
    environ = {"VLLM_B12X_MOE_FP4_FORCE_A16": "1", "VLLM_USE_V2_MODEL_RUNNER": "1", "HOME": "/"}
    assert variables.misspelt_findings(environ, variables.OURS) == []
    assert variables.misspelt_findings({"VLLM_KDA_X": "1"}, ["VLLM_KDA_X"]) == []


@pytest.mark.parametrize(
    ("installed", "allowed", "colour"),
    [
        (["kda_prefill_coalescing", "other"], None, "green"),
        (["kda_prefill_coalescing"], "other,kda_prefill_coalescing", "green"),
        (["kda_prefill_coalescing"], "", "red"),
        (["kda_prefill_coalescing"], "other", "red"),
        (["other"], None, "red"),
    ],
)
def test_plugin(installed, allowed, colour):
    assert variables.plugin_finding(installed, allowed).colour == colour


@pytest.mark.parametrize("value", ["maybe", "9" * 5000, "-1", "5.5", "1\n2", "\x00x"[1:], "[/]", "\udcff", "²"])
@pytest.mark.parametrize("name", variables.OURS)
def test_a_hostile_value_is_one_line_that_names_it(clean, name, value):
    clean.setenv(name, value)
    problem = variables.problem_of(name)
    assert problem.startswith(f"{name}=")
    assert "\n" not in problem


@pytest.mark.parametrize(
    ("attention", "mamba", "wrong"),
    [("512", "512", False), ("auto", "auto", False), ("512", None, True), ("1024", "512", True)],
)
def test_the_pair_is_asked_of_the_server(clean, attention, mamba, wrong):
    clean.setenv(SPLIT_TARGET, attention)
    if mamba is not None:
        clean.setenv(SPLIT_MAMBA, mamba)
    assert bool(variables.pair_problem()) == wrong


def test_vllms_own_variables_that_cannot_be_read_are_named():
    readers = {"VLLM_A": lambda: int("abc"), "VLLM_B": lambda: 1, GATE: lambda: int("abc"), "VLLM_C": lambda: int("x")}
    problems = variables.unreadable({"VLLM_A": "abc", "VLLM_B": "1", GATE: "abc"}, readers)
    (found,) = variables.unreadable_findings({"VLLM_A": "abc"}, problems)
    assert (found.colour, found.hint) == ("red", "unset VLLM_A, or mend it")
    assert "VLLM_A='abc'" in found.message


def test_the_environment_is_usable_inside_and_unchanged_after(clean):
    values = {GATE: "maybe", RETENTION: "x", SPLIT_TARGET: "7", SPLIT_MAMBA: "512", "VLLM_BATCH_INVARIANT": "abc"}
    for name, value in values.items():
        clean.setenv(name, value)
    with variables.usable({GATE, RETENTION, SPLIT_TARGET, "VLLM_BATCH_INVARIANT"}, False):
        assert not any(variables.problem_of(name) for name in variables.OURS)
        assert os.environ[GATE] == "0"
        assert "VLLM_BATCH_INVARIANT" not in os.environ
    assert {name: os.environ.get(name) for name in variables.OURS} == {LOG_LIMIT: None} | {
        name: value for name, value in values.items() if name in variables.OURS
    }
    assert os.environ["VLLM_BATCH_INVARIANT"] == "abc"
