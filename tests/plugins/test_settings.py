"""A setting that no engine can use is refused with its name, its value and what to set."""

import pytest

from vllm.plugins.kda_prefill_coalescing import settings, split_settings


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (settings.RETENTION, "all", "RETENTION='all' is no retention policy; set it to ladder or replay"),
        (settings.LOG_LIMIT, "many", "LOG_LIMIT='many' is not a number of plans"),
        (settings.LOG_LIMIT, "-1", "LOG_LIMIT='-1' is not a number of plans"),
        (settings.LOG_LIMIT, "1.5", "LOG_LIMIT='1.5' is not a number of plans to log; set it to 0 or more"),
        (settings.LOG_LIMIT, "1e3", "LOG_LIMIT='1e3' is not a number of plans"),
        (settings.LOG_LIMIT, "nan", "LOG_LIMIT='nan' is not a number of plans"),
        (settings.LOG_LIMIT, "²", "LOG_LIMIT='²' is not a number of plans"),
        (settings.GATE, "two", "COALESCING='two' is neither on nor off; set it to 1 or 0"),
        (settings.GATE, "2", "COALESCING='2' is neither on nor off"),
        (split_settings.TARGET, "many", "TARGET_BLOCK_SIZE='many' is neither auto nor .* the nearest is 128"),
        (split_settings.TARGET, "nan", "TARGET_BLOCK_SIZE='nan' is neither auto nor"),
        (split_settings.MAMBA, "1e3", "MAMBA_BLOCK_SIZE='1e3' is neither auto nor"),
        (split_settings.MAMBA, "٥١٢", "MAMBA_BLOCK_SIZE='٥١٢' is neither auto nor"),
        (split_settings.TARGET, "500", "nearest that work are 384 and 512"),
        (split_settings.TARGET, "-5", "the nearest is 128"),
        (split_settings.TARGET, "128.5", "neither auto nor a positive multiple of 128 tokens; the nearest is 128"),
        (split_settings.MAMBA, "Auto", "MAMBA_BLOCK_SIZE='Auto' is neither auto nor"),
        (split_settings.TARGET, "auto", "together, or neither"),
        (split_settings.MAMBA, "512", "together, or neither"),
    ],
)
def test_a_useless_value_is_refused(monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        settings.register()


def test_recurrent_pages_are_whole_target_pages(monkeypatch):
    monkeypatch.setenv(split_settings.TARGET, "512")
    monkeypatch.setenv(split_settings.MAMBA, "768")
    with pytest.raises(ValueError, match="nearest that work are 512 and 1024"):
        split_settings.split_settings()
    monkeypatch.setenv(split_settings.MAMBA, "1024")
    assert split_settings.split_settings() == (512, 1024)


def test_auto_is_read_beside_a_number_or_alone(monkeypatch):
    monkeypatch.setenv(split_settings.TARGET, "auto")
    monkeypatch.setenv(split_settings.MAMBA, "auto")
    assert split_settings.split_settings() == ("auto", "auto")
    monkeypatch.setenv(split_settings.MAMBA, "1024")
    settings.register()
    given = split_settings.split_settings()
    assert given is not None
    assert given.given() == (None, 1024)


def test_defaults(monkeypatch):
    for name in settings.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    assert {name: read() for name, read in settings.SETTINGS.items()} == {
        settings.GATE: False,
        settings.RETENTION: "ladder",
        settings.LOG_LIMIT: 0,
        split_settings.TARGET: None,
        split_settings.MAMBA: None,
    }
