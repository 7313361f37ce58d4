"""An engine whose pages are too coarse for 8K spans is refused before its weights load, with the way to mend it."""

import json

import pytest

from vllm_kda_prefill.planning import GLM_SHAPES  # isort: skip  (the platform before vLLM)

from vllm.plugins.kda_prefill_coalescing import SPLIT_MAMBA, SPLIT_TARGET, config_check, layout_check
from vllm_kda_prefill.cache_report import EngineShape
from vllm_kda_prefill.layer_stubs import as_gpu

COARSE = {(1, "auto"): 4608, (1, "fp8"): 9216, (2, "auto"): 2560, (2, "fp8"): 4608, (4, "fp8"): 2560}
FINE = {(4, "auto"): 1536, (8, "auto"): 1024, (8, "fp8"): 1536}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("glm")
    (folder / "config.json").write_text(json.dumps(GLM_SHAPES))
    return folder


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    for name in (SPLIT_TARGET, SPLIT_MAMBA):
        monkeypatch.delenv(name, raising=False)

    def set_sizes(target, mamba):
        monkeypatch.setenv(SPLIT_TARGET, str(target))
        monkeypatch.setenv(SPLIT_MAMBA, str(mamba))

    return set_sizes


def unmet(model, tp, dtype, capability=9):
    with as_gpu(capability):
        config = EngineShape(model, tp, tp, 3, dtype, 16384, capability).vllm_config()
        return list(layout_check.unmet_by_layout(config))


@pytest.mark.parametrize("shape", COARSE)
def test_stocks_raise_is_refused_and_the_two_settings_named(model, shape):
    (message,) = unmet(model, *shape)
    assert message.startswith(f"recurrent pages of {COARSE[shape]} tokens leave ")
    assert message.endswith(f"set {SPLIT_TARGET} and {SPLIT_MAMBA} to 512 and 512, or to auto")


@pytest.mark.parametrize("shape", FINE)
def test_a_raise_that_leaves_four_boundaries_is_let_through(model, shape):
    assert unmet(model, *shape) == []


@pytest.mark.parametrize("sizes", [(512, 512), (512, 1024), (1024, 1024), ("auto", "auto"), ("auto", 1024)])
def test_fine_settings_mend_every_shape(model, settings, sizes):
    settings(*sizes)
    assert unmet(model, 4, "fp8") == []


@pytest.mark.parametrize(
    ("sizes", "capability", "message"),
    [
        ((512, 2048), 9, "recurrent pages of 2048 tokens leave 3 boundaries"),
        ((640, 640), 9, "TARGET_BLOCK_SIZE=640 is not a multiple of 512 tokens"),
        ((512, 512), 12, "TARGET_BLOCK_SIZE=512 is not a multiple of 1024 tokens"),
        ((1024, 2048), 12, "to 1024 and 1024, or to auto"),
        (("auto", 2048), 9, "leave no pair to choose"),
    ],
)
def test_settings_that_cannot_work_are_named_before_the_model_loads(model, settings, sizes, capability, message):
    settings(*sizes)
    assert message in unmet(model, 4, "fp8", capability)[0]


@pytest.mark.parametrize(
    ("sizes", "block_size", "pages"),
    [
        ((512, 512), 1024, "512"),
        ((512, 512), 512, ""),
        (("auto", "auto"), 768, "512 or 1024"),
        (("auto", "auto"), 1024, ""),
        (("auto", 512), 1024, "512"),
    ],
)
def test_a_block_size_that_contradicts_the_settings_is_named_before_the_model_loads(
    model, settings, sizes, block_size, pages
):
    settings(*sizes)
    with as_gpu(9):
        config = EngineShape(model, 4, 4, 3, "fp8", 16384).vllm_config()
        config.cache_config.block_size, config.cache_config.user_specified_block_size = block_size, True
        found = list(layout_check.unmet_by_layout(config))
    assert [message.rpartition(": leave")[0] for message in found] == (
        [f"--block-size {block_size} contradicts {SPLIT_TARGET}={sizes[0]}, which makes pages of {pages} tokens"]
        if pages
        else []
    )


def test_the_start_up_error_carries_it(model):
    with as_gpu(9):
        config = EngineShape(model, 4, 4, 3, "fp8", 16384).vllm_config()
        with pytest.raises(ValueError, match=f"recurrent pages of 2560 tokens.*{SPLIT_TARGET} and {SPLIT_MAMBA}"):
            config_check.check(config)


@pytest.mark.parametrize(("shape", "end"), [((4, "auto"), 7680), ((8, "auto"), None)])
def test_pages_that_do_not_fill_the_budget_are_warned_of(model, monkeypatch, shape, end):
    warnings = []
    monkeypatch.setattr(layout_check.logger, "warning_once", lambda message, *args: warnings.append(message % args))
    with as_gpu(9):
        config = EngineShape(model, shape[0], 1, 3, shape[1], 16384).vllm_config()
        config_check.check(config)
    assert [f"at {end} of 8192 tokens" in warning for warning in warnings] == ([True] if end else [])
