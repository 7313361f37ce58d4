"""A setting that no engine can use is refused with its name, its value and what to set."""

import pytest

from vllm.plugins.kda_prefill_coalescing import settings, split_layout


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (settings.RETENTION, "all", "RETENTION='all' is no retention policy; set it to ladder or replay"),
        (settings.LOG_LIMIT, "many", "LOG_LIMIT='many' is not a number of plans"),
        (settings.LOG_LIMIT, "-1", "LOG_LIMIT='-1' is not a number of plans"),
        (split_layout.TARGET, "500", "nearest that work are 384 and 512"),
        (split_layout.TARGET, "-5", "nearest that work are 128 and 256"),
        (split_layout.MAMBA, "auto ", "nearest that work are 128 and 256"),
        (split_layout.MAMBA, "512", "together, or neither"),
    ],
)
def test_a_useless_value_is_refused(monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        settings.register()


def test_recurrent_pages_are_whole_target_pages(monkeypatch):
    monkeypatch.setenv(split_layout.TARGET, "512")
    monkeypatch.setenv(split_layout.MAMBA, "768")
    with pytest.raises(ValueError, match="nearest that work are 512 and 1024"):
        split_layout.split_sizes()
    monkeypatch.setenv(split_layout.MAMBA, "1024")
    assert split_layout.split_sizes() == (512, 1024)


def test_defaults(monkeypatch):
    for name in settings.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    assert {name: read() for name, read in settings.SETTINGS.items()} == {
        settings.GATE: False,
        settings.RETENTION: "ladder",
        settings.LOG_LIMIT: 0,
        split_layout.TARGET: None,
        split_layout.MAMBA: None,
    }
