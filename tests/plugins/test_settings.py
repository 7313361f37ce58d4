# SPDX-License-Identifier: Apache-2.0
"""A setting that no engine can use is refused with its name, its value and what to set."""

import pytest

from vllm.kda_prefill_variables import GATE, LOG_LIMIT, RETENTION, SPLIT_MAMBA, SPLIT_TARGET
from vllm.plugins.kda_prefill_coalescing import settings
from vllm.plugins.kda_prefill_coalescing.block_layout import read_settings
from vllm_kda_prefill.bench import arms


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (RETENTION, "all", "RETENTION='all' is no retention policy; set it to ladder or replay"),
        (LOG_LIMIT, "many", "LOG_LIMIT='many' is not a number of plans"),
        (LOG_LIMIT, "-1", "LOG_LIMIT='-1' is not a number of plans"),
        (LOG_LIMIT, "1.5", "LOG_LIMIT='1.5' is not a number of plans to log; set it to 0 or more"),
        (LOG_LIMIT, "1e3", "LOG_LIMIT='1e3' is not a number of plans"),
        (LOG_LIMIT, "nan", "LOG_LIMIT='nan' is not a number of plans"),
        (LOG_LIMIT, "²", "LOG_LIMIT='²' is not a number of plans"),
        (GATE, "two", "COALESCING='two' is neither on nor off; set it to 1 or 0"),
        (GATE, "2", "COALESCING='2' is neither on nor off"),
        (SPLIT_TARGET, "many", "TARGET_BLOCK_SIZE='many' is neither auto nor .* the nearest is 128"),
        (SPLIT_TARGET, "nan", "TARGET_BLOCK_SIZE='nan' is neither auto nor"),
        (SPLIT_MAMBA, "1e3", "MAMBA_BLOCK_SIZE='1e3' is neither auto nor"),
        (SPLIT_MAMBA, "٥١٢", "MAMBA_BLOCK_SIZE='٥١٢' is neither auto nor"),
        (SPLIT_TARGET, "500", "nearest that work are 384 and 512"),
        (SPLIT_TARGET, "-5", "the nearest is 128"),
        (SPLIT_TARGET, "128.5", "neither auto nor a positive multiple of 128 tokens; the nearest is 128"),
        (SPLIT_MAMBA, "Auto", "MAMBA_BLOCK_SIZE='Auto' is neither auto nor"),
        (SPLIT_TARGET, "auto", "together, or neither"),
        (SPLIT_MAMBA, "512", "together, or neither"),
    ],
)
def test_a_useless_value_is_refused(monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        settings.register()


def test_mamba_blocks_are_whole_attention_blocks(monkeypatch):
    monkeypatch.setenv(SPLIT_TARGET, "512")
    monkeypatch.setenv(SPLIT_MAMBA, "768")
    with pytest.raises(ValueError, match="nearest that work are 512 and 1024"):
        read_settings()
    monkeypatch.setenv(SPLIT_MAMBA, "1024")
    assert read_settings() == (512, 1024)


def test_auto_is_read_beside_a_number_or_alone(monkeypatch):
    monkeypatch.setenv(SPLIT_TARGET, "auto")
    monkeypatch.setenv(SPLIT_MAMBA, "auto")
    assert read_settings() == ("auto", "auto")
    monkeypatch.setenv(SPLIT_MAMBA, "1024")
    settings.register()
    given = read_settings()
    assert given is not None
    assert given.given() == (None, 1024)


def test_defaults(monkeypatch):
    for name in settings.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    assert {name: read() for name, read in settings.SETTINGS.items()} == {
        GATE: False,
        RETENTION: "ladder",
        LOG_LIMIT: 0,
        SPLIT_TARGET: None,
        SPLIT_MAMBA: None,
    }


def test_the_measuring_tool_names_the_same_variables():
    assert (arms.GATE, arms.RETENTION, arms.LOG_LIMIT) == (GATE, RETENTION, LOG_LIMIT)
    assert arms.SPLIT == (SPLIT_TARGET, SPLIT_MAMBA)
